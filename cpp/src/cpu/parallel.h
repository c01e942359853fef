#pragma once

#include "cpu/barrier.h"
#include "cpu/machine.h"
#include "cpu/range.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

// libgomp's entry points, called directly as by GCC: Clang then uses libtorch's OpenMP runtime
// instead of loading another.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num() noexcept;
int omp_get_num_threads() noexcept;
}

namespace lltm::cpu {

// 1 inside another region.
inline int64_t available_threads() {
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Threads in regions of this process, of all callers.
inline std::atomic<int64_t> running_threads{0};

// The threads of a region share `slots` grid positions, of which groups of `sharing` have barriers.
struct Region {
  Region(int64_t count, int64_t sharing)
      : slots(count), barriers(count, sharing, spins_of(running_threads += slots)) {}
  ~Region() { running_threads -= slots; }

  const int64_t slots;
  Barriers barriers;
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::exception_ptr exception;  // must not leave the region
};

// A region, as seen by one of its threads.
class Team {
 public:
  Team(Region& region, int64_t thread, int64_t threads)
      : region_(region), thread_(thread), threads_(threads) {}

  // Calls work(slot) for this thread's grid positions: several if OpenMP provides too few threads.
  // `work` returns false if values are out of range.
  //
  // After the first failure (an exception or values out of range), work is skipped, but every
  // thread still reaches every barrier.
  template <typename Work>
  void for_each_slot(const Work& work) {
    if (region_.stopped.load(std::memory_order_relaxed)) return;
    try {
      visit([&](int64_t slot) {
        if (!work(slot)) region_.stopped.store(true, std::memory_order_relaxed);
      });
    } catch (...) {
      const std::lock_guard<std::mutex> lock(region_.mutex);
      if (!region_.exception) region_.exception = std::current_exception();
      region_.stopped.store(true, std::memory_order_relaxed);
    }
  }

  // Waits for the grid positions of the same groups.
  void barrier() {
    if (threads_ == 1 || !region_.barriers.any()) return;
    ++round_;
    visit([&](int64_t slot) { region_.barriers.arrive(slot, round_); });
    visit([&](int64_t slot) { region_.barriers.wait(slot, round_); });
  }

 private:
  template <typename Visit>
  void visit(const Visit& visit) const {
    for (int64_t slot = thread_; slot < region_.slots; slot += threads_) visit(slot);
  }

  Region& region_;
  const int64_t thread_, threads_;
  uint32_t round_ = 0;
};

// Calls body(team) on each thread, or only on this thread for a single grid position. Returns false
// if values were out of range. Rethrows the first exception.
template <typename Body>
bool parallel_region(int64_t slots, const Body& body, int64_t sharing = 1) {
  struct Call {
    const Body& body;
    Region region;
  } call = {body, Region(slots, sharing)};
  const int64_t threads = slots > 1 ? available_threads() : 1;
  if (threads == 1) {
    Team team(call.region, 0, 1);
    body(team);
  } else {
    const auto run = [](void* data) {
      auto* const call = static_cast<Call*>(data);
      Team team(call->region, omp_get_thread_num(), omp_get_num_threads());
      call->body(team);
    };
    // Always all threads, as in ATen's regions: libgomp ends those that a smaller region does not
    // need, and the next larger region creates them again.
    GOMP_parallel(run, &call, static_cast<unsigned>(threads), /*flags=*/0);
  }
  if (call.region.exception) std::rethrow_exception(call.region.exception);
  return !call.region.stopped;
}

// Calls body(begin, end) for nearly equal parts of [0, n), on average at least `grain` long.
// Returns false if a call returned false.
template <typename Body>
bool parallel_for(int64_t n, int64_t grain, const Body& body) {
  const auto run = [&](Range part) {
    if constexpr (std::is_void_v<decltype(body(part.begin, part.end))>) {
      body(part.begin, part.end);
      return true;
    } else {
      return body(part.begin, part.end);
    }
  };
  const int64_t parts = n > grain ? std::min((n + grain - 1) / grain, available_threads()) : 1;
  if (parts <= 1) return n <= 0 || run({0, n});
  return parallel_region(parts, [&](Team& team) {
    team.for_each_slot([&](int64_t slot) { return run(share(n, parts, slot)); });
  });
}

// Calls body(task, part, parts) for all parts of `tasks` equal tasks, which are divided if there
// are fewer than threads. Threads have at least `grain` of `work` each. Returns false if a call
// did.
template <typename Body>
bool parallel_tasks(int64_t tasks, int64_t work, int64_t grain, const Body& body) {
  const int64_t threads = std::clamp<int64_t>(work / grain, 1, available_threads());
  const int64_t parts = (threads + tasks - 1) / tasks, all = tasks * parts;
  return parallel_for(all, (all + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    bool good = true;
    for (int64_t k = begin; k < end; ++k) good &= body(k / parts, k % parts, parts);
    return good;
  });
}

}  // namespace lltm::cpu
