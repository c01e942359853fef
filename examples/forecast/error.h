// The one form of an error in what the user gave: where, what was expected, what came.
#pragma once

#include <stdexcept>
#include <string>

namespace forecast {

[[noreturn]] inline void fail(
    const std::string& place, const std::string& expected, const std::string& got) {
  throw std::runtime_error(
      place + ": expected " + expected + ", got " + (got.empty() ? "nothing" : got));
}

}  // namespace forecast
