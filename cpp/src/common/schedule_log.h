// Prints schedules if the environment variable LLTM_SCHEDULE is set. N: rows in all steps.
#pragma once

#include "common/tensor_steps.h"

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

template <typename Args>
void log_schedule(const Args& args, const std::string& schedule) {
  const at::Tensor& h = args.h_0;
  std::ostringstream line;
  line << "lltm: N=" << flat_size(args.input) << " B=" << h.size(0) << " I=" << args.input->size(-1)
       << " H=" << h.size(1) << ", " << schedule << '\n';
  std::fputs(line.str().c_str(), stderr);
}

}  // namespace lltm
