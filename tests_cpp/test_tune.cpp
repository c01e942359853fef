// The search for the fastest schedule (cpu/tune.h), by timings that the tests make up.
#include "cpu/tune.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace lltm::cpu {
namespace {

constexpr double kMillisecond = 1e-3;

using Times = std::vector<std::vector<double>>;

// Candidates whose calls take given milliseconds, one after another, the last one from then on.
class Timings {
 public:
  explicit Timings(Times milliseconds)
      : milliseconds_(std::move(milliseconds)), calls_(milliseconds_.size()) {}

  std::optional<size_t> fastest() {
    return cpu::fastest(
        milliseconds_.size(), [this](size_t candidate) { return measure(candidate); }, cost);
  }
  size_t calls(size_t candidate) const { return calls_[candidate]; }

  TuningCost cost;

 private:
  std::optional<double> measure(size_t candidate) {
    EXPECT_LT(cost.seconds, cost.limit) << "a call after the limit";
    const std::vector<double>& times = milliseconds_[candidate];
    const size_t call = calls_[candidate]++;
    if (times.empty()) return {};
    return times[std::min(call, times.size() - 1)] * kMillisecond;
  }

  Times milliseconds_;
  std::vector<size_t> calls_;
};

TEST(Tuning, FindsTheFastest) {
  for (size_t best = 0; best < 5; ++best) {
    Times times = {{1.0}, {1.1}, {1.2}, {0.96}, {0.9}};
    times[best] = {0.5};
    EXPECT_EQ(Timings(times).fastest(), best);
  }
}

TEST(Tuning, OfOneCandidateMeasuresNothing) {
  Timings timings(Times{{1.0}});
  EXPECT_EQ(timings.fastest(), 0);
  EXPECT_EQ(timings.cost.calls, 0);
}

TEST(Tuning, KeepsWhatIsInUseWithinNoise) {
  EXPECT_EQ(Timings(Times{{1.0}, {1.0}}).fastest(), 0);
  EXPECT_EQ(Timings(Times{{1.0}, {0.98}}).fastest(), 0);
  EXPECT_EQ(Timings(Times{{1.0}, {0.96}}).fastest(), 1);
}

// What disturbs a measurement makes it longer.
TEST(Tuning, IsNotMisledByADisturbedCall) {
  EXPECT_EQ(Timings(Times{{9.0, 1.0}, {1.1}}).fastest(), 0) << "what is in use, the first time";
  EXPECT_EQ(Timings(Times{{1.0, 9.0, 1.0}, {1.1}}).fastest(), 0) << "what is in use, later";
  EXPECT_EQ(Timings(Times{{1.0}, {4.0, 0.8}}).fastest(), 1) << "a first call that compiles kernels";
  EXPECT_EQ(Timings(Times{{1.0}, {0.9, 9.0, 0.9}}).fastest(), 1) << "another, later";
}

TEST(Tuning, LeavesOutTheHopelessAfterOneCall) {
  Timings timings(Times{{20.0}, {40.0}, {19.0}});
  EXPECT_EQ(timings.fastest(), 2);
  EXPECT_EQ(timings.calls(1), 1);
  EXPECT_GT(timings.calls(2), 3);
}

TEST(Tuning, LeavesOutWhatGivesNoResult) {
  Timings timings(Times{{1.0}, {}, {0.8}});
  EXPECT_EQ(timings.fastest(), 2);
  EXPECT_EQ(timings.calls(1), 1);
  EXPECT_EQ(Timings(Times{{}, {1.0}}).fastest(), std::nullopt);
}

TEST(Tuning, KeepsToItsLimit) {
  // 100 ms of short calls.
  Timings brief(Times(100, {1.0}));
  EXPECT_EQ(brief.fastest(), 0);
  EXPECT_EQ(brief.cost.calls, 100);
  // 20 of long ones.
  Times times(100, {1000.0});
  Timings lengthy(times);
  EXPECT_EQ(lengthy.fastest(), 0);
  EXPECT_EQ(lengthy.cost.calls, 20);
  // One lucky call is not enough for a change.
  times[1] = {500.0};
  EXPECT_EQ(Timings(times).fastest(), 0);
}

// ---- several aspects --------------------------------------------------------

using Point = std::array<int, 2>;

// One step up or down along an axis.
std::vector<Point> neighbours(const Point& point, size_t axis) {
  Point less = point, more = point;
  --less[axis];
  ++more[axis];
  return {less, more};
}

constexpr std::array<size_t, 2> kAxes = {0, 1};

// The least at (2, -1).
double valley(const Point& p) {
  return 1 + std::abs(p[0] - 2) + std::abs(p[1] + 1);
}

TEST(Tuning, GoesFromAspectToAspectUntilNothingChanges) {
  TuningCost cost;
  std::set<Point> measured;
  const auto measure = [&](const Point& p) -> std::optional<double> {
    measured.insert(p);
    return 0.1 * valley(p) * kMillisecond;
  };
  // From (1, 0) one step along each axis is enough.
  EXPECT_EQ(tune(Point{1, 0}, kAxes, neighbours, measure, cost), (Point{2, -1}));
  EXPECT_TRUE(measured.contains(Point{2, -2})) << "a second time from where it is then";
  EXPECT_LT(cost.seconds, cost.limit);
}

// Another process took the core from the one that is in use, and now it takes it from the other.
TEST(Tuning, HasToFindItTwice) {
  for (const double then : {0.5, 1.5}) {
    TuningCost cost;
    std::array<int, 2> calls = {};
    const auto measure = [&](int schedule) -> std::optional<double> {
      const bool at_first = calls[schedule]++ < 9;  // 7 rounds, and 2 of the second pass
      return kMillisecond * (schedule == 0 ? 1.0 : at_first ? 0.5 : then);
    };
    const auto other = [](int schedule, size_t) { return std::vector<int>{1 - schedule}; };
    EXPECT_EQ(tune(0, std::array<size_t, 1>{0}, other, measure, cost), then < 1 ? 1 : 0);
    EXPECT_EQ(cost.calls, calls[0] + calls[1]);
  }
}

TEST(Tuning, OfAllAspectsKeepsToOneLimit) {
  TuningCost cost;
  const auto measure = [](const Point& p) -> std::optional<double> { return valley(p); };
  const auto best = tune(Point{9, 9}, kAxes, neighbours, measure, cost);
  EXPECT_DOUBLE_EQ(cost.limit, 20 * valley({9, 9})) << "calls of the first";
  EXPECT_GE(cost.seconds, cost.limit);
  EXPECT_LE(cost.seconds, 2 * cost.limit + 2 * valley({9, 9})) << "and once more";
  EXPECT_EQ(best->at(0), 8) << "what was known by then";
}

TEST(Tuning, FindsNothingWhereWhatIsInUseGivesNoResult) {
  TuningCost cost;
  const auto measure = [](const Point&) -> std::optional<double> { return {}; };
  EXPECT_EQ(tune(Point{0, 0}, kAxes, neighbours, measure, cost), std::nullopt);
}

// ---- the cache --------------------------------------------------------------

const TuningKey kKey = {1}, kOtherKey = {2};

TEST(TuningCache, SearchesOnceForEachKey) {
  TuningCache<int> cache;
  int searches = 0;
  const auto search = [&] { return std::optional(++searches); };
  EXPECT_EQ(cache.find_or(kKey, search), 1);
  EXPECT_EQ(cache.find_or(kKey, search), 1);
  EXPECT_EQ(cache.find_or(kOtherKey, search), 2);
  EXPECT_EQ(cache.find_or(kKey, search), 1);
  EXPECT_EQ(searches, 2);
}

TEST(TuningCache, SearchesAgainWhereNothingWasFound) {
  TuningCache<int> cache;
  EXPECT_EQ(cache.find_or(kKey, [] { return std::optional<int>(); }), std::nullopt);
  EXPECT_EQ(cache.find_or(kKey, [] { return std::optional(3); }), 3);
}

TEST(TuningCache, LetsTheNextSearchAfterAnException) {
  TuningCache<int> cache;
  const auto fail = []() -> std::optional<int> { throw std::runtime_error("no memory"); };
  EXPECT_THROW(cache.find_or(kKey, fail), std::runtime_error);
  EXPECT_EQ(cache.find_or(kKey, [] { return std::optional(3); }), 3);
}

// Of any cache and key: measurements would disturb each other.
TEST(TuningCache, DoesNotWaitForAnotherThreadThatMeasures) {
  TuningCache<int> cache;
  TuningCache<double> other_cache;
  EXPECT_EQ(cache.find_or(kOtherKey, [] { return std::optional(7); }), 7);
  EXPECT_EQ(
      cache.find_or(
          kKey,
          [&] {
            std::thread([&] {
              const auto search = [] { return std::optional(4); };
              EXPECT_EQ(cache.find_or(kKey, search), std::nullopt);
              EXPECT_EQ(other_cache.find_or(kKey, [] { return std::optional(4.0); }), std::nullopt);
              EXPECT_EQ(cache.find_or(kOtherKey, search), 7) << "what is known";
            }).join();
            return std::optional(5);
          }),
      5);
  EXPECT_EQ(cache.find_or(kKey, [] { return std::optional(6); }), 5);
}

TEST(TuningCache, SearchesOnceForThreadsAtOnce) {
  TuningCache<int> cache;
  std::atomic<int> searches = 0;
  const auto call = [&] {
    for (int64_t key = 0; key < 1000; ++key) {
      const auto found = cache.find_or({key}, [&] {
        ++searches;
        return std::optional(static_cast<int>(key));
      });
      EXPECT_EQ(found.value_or(key), key);
    }
  };
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k) threads.emplace_back(call);
  for (std::thread& thread : threads) thread.join();
  call();
  EXPECT_EQ(searches, 1000);
}

}  // namespace
}  // namespace lltm::cpu
