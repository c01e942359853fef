// With LLTM_SCHEDULE in the environment, every sequence prints what was chosen for it, and every
// step on the CPU.
#pragma once

#include <cstdint>
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

// N rows of all steps, B rows of the state.
inline void log_schedule(
    std::int64_t rows,
    std::int64_t batch,
    std::int64_t input,
    std::int64_t hidden,
    const std::string& schedule) {
  std::ostringstream line;
  line << "lltm: N=" << rows << " B=" << batch << " I=" << input << " H=" << hidden << ", "
       << schedule << '\n';
  std::fputs(line.str().c_str(), stderr);
}

}  // namespace lltm
