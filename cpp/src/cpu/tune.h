// Schedules by measurement, with LLTM_TUNE in the environment: the search, and what it found for
// calls of each kind in this process. What is tried stands in schedule.h, what is measured in
// engine.cpp.
//
// No header of torch, so that the tests can search by timings of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lltm::cpu {

// What tuning a kind of call costs: measured calls, and the seconds that these took together.
struct TuningCost {
  int64_t calls = 0;
  double seconds = 0;
  // Seconds after which no call is begun: a tenth, or 20 calls where these take longer.
  double limit = 0.1;
};

std::string to_string(const TuningCost& cost);

// The seconds that a call takes, or nothing where it gave no result.
using MeasureCandidate = std::function<std::optional<double>(size_t candidate)>;

// Which of `count` candidates is the fastest; 0, what is in use, unless another is clearly faster,
// and nothing where candidate 0 gives no result. They take turns, and the shortest of its times
// counts for each.
std::optional<size_t> fastest(size_t count, const MeasureCandidate& measure, TuningCost& cost);

// Coordinate descent from `first`: aspect by aspect the fastest of the alternatives to what is in
// use, until nothing changes or time is up. What it ends with is measured against `first` once
// more, within a limit of its own, and has to win again: on a busy machine a measurement can be
// wrong. Nothing where `first` gives no result.
//   alternatives(schedule, aspect)  a vector of schedules
//   measure(schedule)               as MeasureCandidate
template <typename Schedule, typename Aspects, typename Alternatives, typename Measure>
std::optional<Schedule> tune(
    const Schedule& first,
    const Aspects& aspects,
    const Alternatives& alternatives,
    const Measure& measure,
    TuningCost& cost) {
  // Aspects depend on each other: a second pass looks at them with what the others have become.
  constexpr int kPasses = 2;
  const auto race = [&](const std::vector<Schedule>& candidates, TuningCost& spent) {
    return fastest(
        candidates.size(), [&](size_t index) { return measure(candidates[index]); }, spent);
  };
  Schedule present = first;
  bool changed = true;
  for (int pass = 0; pass < kPasses && changed; ++pass) {
    changed = false;
    for (const auto aspect : aspects) {
      std::vector<Schedule> candidates = alternatives(present, aspect);
      candidates.insert(candidates.begin(), present);
      const std::optional<size_t> best = race(candidates, cost);
      if (!best.has_value()) return {};
      present = candidates[*best];
      changed = changed || *best != 0;
    }
  }
  if (present == first) return first;
  TuningCost again;
  const std::optional<size_t> best = race({first, present}, again);
  cost.calls += again.calls;
  cost.seconds += again.seconds;
  if (!best.has_value()) return {};
  return *best == 0 ? first : present;
}

// Whatever the time of a call depends on.
using TuningKey = std::vector<int64_t>;

// Held by the one thread of the process that measures.
std::mutex& tuning_turn();

template <typename Schedule>
class TuningCache {
 public:
  // The schedule for a kind of call, found by search() the first time. Nothing while another
  // thread measures, because neither would find out anything, and where search() finds nothing,
  // after which the next call searches again.
  template <typename Search>
  std::optional<Schedule> find_or(const TuningKey& key, const Search& search) {
    if (auto known = find(key)) return known;
    const std::unique_lock<std::mutex> turn(tuning_turn(), std::try_to_lock);
    if (!turn.owns_lock()) return {};
    // Another thread may have found it in between.
    if (auto known = find(key)) return known;
    const std::optional<Schedule> found = search();
    if (found.has_value()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      schedules_.emplace(key, *found);
    }
    return found;
  }

 private:
  std::optional<Schedule> find(const TuningKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = schedules_.find(key);
    return found == schedules_.end() ? std::nullopt : std::optional(found->second);
  }

  std::mutex mutex_;
  std::map<TuningKey, Schedule> schedules_;
};

}  // namespace lltm::cpu
