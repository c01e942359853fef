#pragma once

#include "cpu/range.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

// libgomp's entry points, called directly as by GCC: Clang then uses libtorch's OpenMP runtime
// instead of loading another.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num() noexcept;
int omp_get_num_threads() noexcept;
}

namespace lltm::cpu {

// 1 inside another region.
inline int64_t available_threads() {
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Threads with at least `grain` units of `work`, at most `parts`.
inline int64_t threads_for(int64_t work, int64_t grain, int64_t parts) {
  return std::clamp<int64_t>(work / grain, 1, std::min(available_threads(), parts));
}

class Team {
 public:
  // Calls work(slot) for this thread's grid positions: several if OpenMP provides too few threads.
  // `work` returns false if values are out of range.
  //
  // After the first failure (an exception or values out of range), work is skipped, but every
  // thread still reaches every barrier.
  template <typename Work>
  void for_each_slot(int64_t slots, const Work& work) {
    if (stopped_.load(std::memory_order_relaxed)) return;
    try {
      const int64_t threads = alone_ ? 1 : omp_get_num_threads();
      for (int64_t slot = alone_ ? 0 : omp_get_thread_num(); slot < slots; slot += threads) {
        if (!work(slot)) stopped_.store(true, std::memory_order_relaxed);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!exception_) exception_ = std::current_exception();
      stopped_.store(true, std::memory_order_relaxed);
    }
  }

  void barrier() {
    if (!alone_) GOMP_barrier();
  }

 private:
  template <typename Body>
  friend bool parallel_region(int64_t threads, const Body& body);

  explicit Team(bool alone) : alone_(alone) {}

  const bool alone_;  // without an OpenMP region
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::exception_ptr exception_;  // must not leave the region
};

// Calls body(team) on up to `threads` threads. Returns false if values were out of range. Rethrows
// the first exception.
template <typename Body>
bool parallel_region(int64_t threads, const Body& body) {
  struct Region {
    const Body& body;
    Team team;
  } region = {body, Team(threads <= 1)};
  const auto run = [](void* data) {
    auto* const region = static_cast<Region*>(data);
    region->body(region->team);
  };
  if (threads <= 1) {
    run(&region);
  } else {
    GOMP_parallel(run, &region, static_cast<unsigned>(threads), /*flags=*/0);
  }
  if (region.team.exception_) std::rethrow_exception(region.team.exception_);
  return !region.team.stopped_;
}

// Nearly equal parts of [0, n), on average at least `grain` long.
template <typename Body>
void parallel_for(int64_t n, int64_t grain, const Body& body) {
  const int64_t threads = n > grain ? std::min((n + grain - 1) / grain, available_threads()) : 1;
  if (threads <= 1) {
    if (n > 0) body(0, n);
    return;
  }
  parallel_region(threads, [&](Team& team) {
    team.for_each_slot(threads, [&](int64_t slot) {
      const Range part = share(n, threads, slot);
      body(part.begin, part.end);
      return true;
    });
  });
}

}  // namespace lltm::cpu
