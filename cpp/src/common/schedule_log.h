// If the environment variable LLTM_SCHEDULE is set, prints the schedule of each sequence and, on
// the CPU, each step.
#pragma once

#include "common/steps.h"

#include <ATen/core/Tensor.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace lltm {

inline bool logs_schedules() {
  static const bool set = [] {
    const char* const value = std::getenv("LLTM_SCHEDULE");
    return value != nullptr && std::string(value) != "0";
  }();
  return set;
}

// N is the number of rows in all steps, B the batch size.
template <typename Args>
void log_schedule(const Args& args, const std::string& schedule) {
  const at::Tensor& h = args.state_h();
  std::ostringstream line;
  line << "lltm: N=" << flat_size(args.input) << " B=" << h.size(0) << " I=" << args.input->size(-1)
       << " H=" << h.size(1) << ", " << schedule << '\n';
  std::fputs(line.str().c_str(), stderr);
}

}  // namespace lltm
