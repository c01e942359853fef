#include "cpu/tune.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace lltm::cpu {
namespace {

// The limit, in calls, of those that take long.
constexpr int64_t kMostCalls = 20;

// All candidates are measured this often, but for those that are left out before.
constexpr int kRounds = 7;
// From here on a change may be made, and who is not clearly faster by now is left out.
constexpr int kLeastRounds = 3;
// A smaller gain may be noise.
constexpr double kClearly = 0.97;
// After the first round, who took longer than this is left out. A candidate's first call may take
// some milliseconds more, in which oneDNN compiles kernels.
constexpr double kHopeless = 1.1;
constexpr double kFirstCall = 5e-3;

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Candidate {
  size_t index;
  double seconds = kNever;  // the shortest time
};

// What no candidate may take longer than to stay in the race after so many rounds.
double longest(int rounds, double present) {
  if (rounds >= kLeastRounds) return kClearly * present;
  return rounds == 1 ? kHopeless * present + kFirstCall : present;
}

void measure_once(Candidate& candidate, const MeasureCandidate& measure, TuningCost& cost) {
  const double seconds = measure(candidate.index).value_or(kNever);
  candidate.seconds = seconds == kNever ? kNever : std::min(candidate.seconds, seconds);
  if (seconds == kNever) return;
  if (cost.calls++ == 0) cost.limit = std::max(cost.limit, kMostCalls * seconds);
  cost.seconds += seconds;
}

}  // namespace

std::optional<size_t> fastest(size_t count, const MeasureCandidate& measure, TuningCost& cost) {
  Candidate present = {0};
  std::vector<Candidate> others;
  for (size_t index = 1; index < count; ++index) others.push_back({index});
  for (int round = 1; round <= kRounds && !others.empty(); ++round) {
    if (cost.seconds >= cost.limit) return 0;
    measure_once(present, measure, cost);
    if (present.seconds == kNever) return {};
    for (Candidate& other : others) {
      if (cost.seconds >= cost.limit) return 0;
      measure_once(other, measure, cost);
    }
    const double most = longest(round, present.seconds);
    std::erase_if(others, [&](const Candidate& other) { return other.seconds > most; });
  }
  if (others.empty()) return 0;
  const auto by_time = [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; };
  return std::min_element(others.begin(), others.end(), by_time)->index;
}

std::string to_string(const TuningCost& cost) {
  std::ostringstream text;
  text << "measured " << cost.calls << " calls in " << std::lround(1000 * cost.seconds) << " ms";
  return text.str();
}

std::mutex& tuning_turn() {
  static std::mutex& turn = *new std::mutex;  // outlives every thread
  return turn;
}

}  // namespace lltm::cpu
