#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>

namespace lltm_bench {
namespace {

// Of sorted values, with linear interpolation.
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - std::floor(position)) * (sorted[above] - sorted[below]);
}

// Amount of a rate in one call: Google Benchmark has divided it by the time.
double per_call(const benchmark::UserCounters& counters, const char* name, double seconds) {
  const auto counter = counters.find(name);
  return counter == counters.end() ? 0 : counter->second.value * seconds;
}

// The part of a group's name that says the dtype.
std::string dtype_of(const std::string& group) {
  const size_t begin = group.find('/') + 1;
  return group.substr(begin, group.find('/', begin) - begin);
}

}  // namespace

bool Report::ReportContext(const Context& context) {
  PrintBasicContext(&GetErrorStream(), context);
  return true;
}

void Report::ReportRuns(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    if (run.run_type != Run::RT_Iteration || run.iterations == 0) continue;
    const std::string& full_name = run.run_name.function_name;
    const size_t slash = full_name.rfind('/');
    const std::string group = full_name.substr(0, slash);
    const std::string name = full_name.substr(slash + 1);
    auto found = std::find_if(contenders_.begin(), contenders_.end(), [&](const Contender& c) {
      return c.index == run.family_index;
    });
    if (found == contenders_.end()) {
      found = contenders_.insert(found, Contender{run.family_index, group, name, {}});
    }
    const double seconds = run.real_accumulated_time / static_cast<double>(run.iterations);
    found->seconds.push_back(seconds);
    found->flops = per_call(run.counters, kFlops, seconds);
    found->bytes = per_call(run.counters, kBytes, seconds);
  }
}

void Report::Finalize() {
  // Interleaved, they end in any order.
  std::sort(contenders_.begin(), contenders_.end(), [](const Contender& a, const Contender& b) {
    return a.index < b.index;
  });
  std::map<std::string, double> peak;  // FLOP/s by dtype
  for (Contender& contender : contenders_) {
    std::sort(contender.seconds.begin(), contender.seconds.end());
    if (contender.group.rfind(kPeakGroup, 0) == 0) {
      double& best = peak[dtype_of(contender.group)];
      best = std::max(best, contender.flops / quantile(contender.seconds, 0.5));
    }
  }

  std::string group;
  double first = 0;
  for (const Contender& contender : contenders_) {
    const double median = quantile(contender.seconds, 0.5);
    const bool heads_group = contender.group != group;
    if (heads_group) {
      group = contender.group;
      first = median;
      std::printf(
          "\n%s\n  %-16s %12s %21s %7s\n", group.c_str(), "", "median", "quartiles", "ratio");
    }
    std::printf(
        "  %-16s %9.2f us %10.2f %10.2f",
        contender.name.c_str(),
        median * 1e6,
        quantile(contender.seconds, 0.25) * 1e6,
        quantile(contender.seconds, 0.75) * 1e6);
    if (heads_group) {
      std::printf(" %7s", "");
    } else {
      std::printf(" %7.2f", first / median);
    }
    if (contender.flops > 0) {
      std::printf("  %7.1f GFLOP/s", contender.flops / median * 1e-9);
      const auto best = peak.find(dtype_of(group));
      if (best != peak.end()) {
        std::printf(", %3.0f %% of peak", 100 * contender.flops / median / best->second);
      }
    }
    if (contender.bytes > 0) std::printf("  %7.1f GB/s", contender.bytes / median * 1e-9);
    std::printf("\n");
  }
  std::printf(
      "\nMedians and quartiles over the repetitions; ratio: the time of the group's first line\n"
      "over this line's. The peak is the fastest line of %s/<dtype>/.\n",
      kPeakGroup);
}

}  // namespace lltm_bench
