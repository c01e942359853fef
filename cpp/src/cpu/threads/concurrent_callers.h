// The CPUs of a call: threads of the application share them (Running), and the two directions of a
// layer share the call's (Crew).
#pragma once

#include "cpu/threads/barrier.h"
#include "cpu/threads/other_processes.h"
#include "cpu/threads/usable_cpus.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

namespace lltm::cpu {

// torch_threads.cpp, the only file here with a header of PyTorch: torch.get_num_threads(), and if
// this thread is in a region of any library with the same OpenMP runtime.
int64_t torch_threads();
bool in_torch_region();

// Exists while a thread of the application is in a region. Concurrent regions share the CPUs. Their
// number is the recent maximum, because calls do other work between their regions.
class Running {
 public:
  Running() {
    inside = true;
    const int64_t before = recent.load(std::memory_order_relaxed);
    recent_ = std::max(++count * kMemory, before - before / 32);
    recent.store(recent_, std::memory_order_relaxed);
  }
  // If the callers need all CPUs, they take turns: none waits for the time slices of the others.
  ~Running() {
    inside = false;
    --count;
    const int64_t regions = recent_regions();
    if (regions > 1 && regions >= usable_cpus()) std::this_thread::yield();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  static bool is_outermost() { return !inside && !in_torch_region(); }
  static void reset() { count = recent = 0; }  // in a forked process

  // The threads for a region. Those of crews do not change while other processes run: there, ATen's
  // operations run on one thread each, on which their rounding depends.
  int64_t share_of(int64_t threads, bool of_crews) const {
    if (threads == 1) return 1;
    const int64_t regions = recent_regions(), cpus = usable_cpus();
    if (regions > 1) return std::clamp<int64_t>(cpus / regions, 1, threads);
    const bool few = threads <= std::min(kFewThreads, cpus);
    return few && !of_crews && other_processes_run() ? 1 : threads;
  }

 private:
  static constexpr int64_t kMemory = 64;  // units per region; the maximum falls by 1/32 per region
  // With more threads, a single one is not faster. libgomp's idle threads spin, so that half of
  // them would not be faster either.
  static constexpr int64_t kFewThreads = 4;
  static inline std::atomic<int64_t> count{0}, recent{0};
  static inline thread_local bool inside = false;
  int64_t recent_regions() const { return (recent_ + kMemory - 1) / kMemory; }

  int64_t recent_;
};

// Threads of a region of run_crews that run the regions of a single call: member 0 leads, `active`
// - 1 others serve. The call is divided as for `threads`, so that results do not depend on
// `active`.
class Crew {
 public:
  explicit Crew(int64_t threads)
      : threads_(threads), barriers_(threads, threads, spins_of(threads)) {}

  static Crew*& current() {
    thread_local Crew* crew = nullptr;
    return crew;
  }
  int64_t threads() const { return threads_; }

  // Calls body(), whose regions the crew runs.
  template <typename Body>
  void lead(int64_t active, const Body& body) {
    struct Leading {
      explicit Leading(Crew* crew) { current() = crew; }
      ~Leading() {
        Crew* const crew = std::exchange(current(), nullptr);
        crew->task_ = nullptr;
        crew->meet();
      }
    } leading(this);
    active_ = active;
    body();
  }

  // Runs regions until the leader has finished.
  void serve(int64_t member, int64_t active) {
    for (uint32_t round = 1;; round += 2) {
      wait(member, round);
      if (task_ == nullptr) return;
      task_(data_, member, active);
      wait(member, round + 1);
    }
  }

  using Task = void (*)(void* data, int64_t thread, int64_t threads);
  void run(Task task, void* data) {
    task_ = task;
    data_ = data;
    meet();
    task(data, 0, active_);
    meet();
  }

 private:
  void wait(int64_t member, uint32_t round) {
    barriers_.arrive(member, round);
    barriers_.wait(member, round);
  }
  void meet() {
    if (active_ == 1) return;
    ++round_;
    for (int64_t absent = active_; absent < threads_; ++absent) barriers_.arrive(absent, round_);
    wait(0, round_);
  }

  const int64_t threads_;
  int64_t active_ = 1;
  Barriers barriers_;
  uint32_t round_ = 0;
  Task task_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace lltm::cpu
