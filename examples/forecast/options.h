// The command line of forecast.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace forecast {

constexpr const char* kUsage =
    R"(usage: forecast train DATA.csv --checkpoint FILE --losses FILE [--epochs N] [--period N]
                [--columns NAME,... --hidden N --context N --seed N | --resume]
       forecast predict DATA.csv --checkpoint FILE --steps N
)";

struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct Options {
  std::string command, data, checkpoint, losses;
  std::vector<std::string> columns;  // none: as read_csv chooses
  int64_t epochs = 20, hidden = 32, context = 48, seed = 0;
  int64_t period = 0;  // none
  int64_t steps = 0;
  bool resume = false;
};

// Throws UsageError.
Options parse(const std::vector<std::string>& words);

}  // namespace forecast
