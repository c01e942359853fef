// Times the layers of lltm/realtime.h: nanoseconds a sample by the length of a call, and how the
// times of single samples scatter.
//
//     lltm_realtime_benchmark lstm-40.rt ...      `make bench-realtime` makes the files
#include <lltm/realtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double nanoseconds(Clock::duration time) {
  return std::chrono::duration<double, std::nano>(time).count();
}

// The fastest of several rounds.
double per_sample(lltm::realtime::Layer& layer, std::int64_t steps) {
  constexpr std::int64_t kSamples = 4096, kRounds = 30;
  std::vector<float> x(steps * layer.input_size(), 0.1f), y(steps * layer.hidden_size());
  double best = 1e9;
  for (std::int64_t round = 0; round < kRounds; ++round) {
    const auto begin = Clock::now();
    for (std::int64_t k = 0; k < kSamples; k += steps) layer.process(x.data(), y.data(), steps);
    best = std::min(best, nanoseconds(Clock::now() - begin) / kSamples);
  }
  return best;
}

// Of calls of one sample, each timed: a clock takes some 20 ns.
std::vector<double> sorted_times(lltm::realtime::Layer& layer) {
  std::vector<float> x(layer.input_size(), 0.1f), y(layer.hidden_size());
  std::vector<double> times(200'000);
  for (double& time : times) {
    const auto begin = Clock::now();
    layer.process(x.data(), y.data(), 1);
    time = nanoseconds(Clock::now() - begin);
  }
  std::sort(times.begin(), times.end());
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  std::printf(
      "%-16s%28s%38s\n",
      "ns a sample",
      "calls of 1, 16, 512",
      "one call: median, 99, 99.9 %, most");
  for (int k = 1; k < argc; ++k) {
    lltm::realtime::Layer layer(argv[k]);
    std::printf("%-16s", argv[k]);
    for (const int steps : {1, 16, 512}) std::printf("%9.0f", per_sample(layer, steps));
    const std::vector<double> times = sorted_times(layer);
    for (const double part : {0.5, 0.99, 0.999}) {
      std::printf(
          "%9.0f", times[static_cast<std::size_t>(part * static_cast<double>(times.size()))]);
    }
    std::printf("%9.0f\n", times.back());
  }
}
