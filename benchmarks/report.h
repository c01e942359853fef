// What lltm_bench prints: groups of benchmarks of the same work side by side.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lltm_bench {

// A benchmark's name is `group/contender`. The group's first contender is the
// one that the others are compared with. Groups whose name begins with
// `micro_kernel/<dtype>/` give the peak of the others of that dtype, the second
// part of their name.
constexpr const char* kPeakGroup = "micro_kernel";

// Rates, as names of counters.
constexpr const char* kFlops = "FLOP/s";
constexpr const char* kBytes = "B/s";

// Collects every repetition and prints medians, quartiles and ratios at the end;
// all samples are in the file that --benchmark_out names.
class Report : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override;
  void ReportRuns(const std::vector<Run>& runs) override;
  void Finalize() override;

 private:
  struct Contender {
    int64_t index = 0;  // in the order of registration
    std::string group, name;
    std::vector<double> seconds;  // per call, one value a repetition
    double flops = 0;             // of one call
    double bytes = 0;
  };

  std::vector<Contender> contenders_;
};

}  // namespace lltm_bench
