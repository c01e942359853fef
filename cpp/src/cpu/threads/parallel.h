#pragma once

#include "cpu/range.h"
#include "cpu/threads/barrier.h"
#include "cpu/threads/concurrent_callers.h"
#include "cpu/threads/openmp.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <type_traits>

namespace lltm::cpu {

// 1 inside another region.
inline int64_t available_threads() {
  if (const Crew* const crew = Crew::current()) return crew->threads();
  return in_torch_region() ? 1 : torch_threads();
}

// The threads of a region share `workers` grid positions, of which groups of `sharing` have
// barriers.
struct Region {
  Region(int64_t count, int64_t sharing)
      : workers(count), barriers(count, sharing, spins_of(count)) {}

  const int64_t workers;
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

  int64_t thread() const { return thread_; }
  int64_t threads() const { return threads_; }

  // Calls work(worker) for this thread's grid positions. `work` returns false if values are out of
  // range.
  //
  // After the first failure (an exception or values out of range), work is skipped, but every
  // thread still reaches every barrier.
  template <typename Work>
  void for_each_worker(const Work& work) {
    visit([&](int64_t worker) {
      if (!region_.stopped.load(std::memory_order_relaxed)) try_worker(worker, work);
    });
  }

  template <typename Work>
  void try_worker(int64_t worker, const Work& work) {
    try {
      if (!work(worker)) region_.stopped.store(true, std::memory_order_relaxed);
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
    visit([&](int64_t worker) { region_.barriers.arrive(worker, round_); });
    visit([&](int64_t worker) { region_.barriers.wait(worker, round_); });
  }

 private:
  template <typename Visit>
  void visit(const Visit& visit) const {
    for (int64_t worker = thread_; worker < region_.workers; worker += threads_) visit(worker);
  }

  Region& region_;
  const int64_t thread_, threads_;
  uint32_t round_ = 0;
};

// Calls body(team) on each thread, or only on this thread for a single grid position. Returns false
// if values were out of range. Rethrows the first exception.
template <typename Body>
bool parallel_region(
    int64_t workers, const Body& body, int64_t sharing = 1, bool of_crews = false) {
  struct Call {
    const Body& body;
    Region region;
    int64_t threads;  // that have work

    static void run(void* data, int64_t thread, int64_t threads) {
      auto* const call = static_cast<Call*>(data);
      Team team(call->region, thread, threads);
      call->body(team);
    }
    static void run_by_openmp(void* data) {
      const int64_t thread = omp_get_thread_num();
      const int64_t threads =
          std::min<int64_t>(static_cast<Call*>(data)->threads, omp_get_num_threads());
      if (thread < threads) run(data, thread, threads);
    }
  };
  Crew* const crew = Crew::current();
  const int64_t all = workers > 1 ? available_threads() : 1;
  std::optional<Running> running;
  if (Running::is_outermost()) running.emplace();
  Call call = {body, Region(workers, sharing), running ? running->share_of(all, of_crews) : all};
  if (call.threads == 1) {
    Call::run(&call, 0, 1);
  } else if (crew != nullptr) {
    crew->run(Call::run, &call);
  } else {
    // Always all threads, as in ATen's regions: libgomp ends threads that a smaller region does
    // not need, and the next larger region creates them again.
    GOMP_parallel(Call::run_by_openmp, &call, static_cast<unsigned>(all), /*flags=*/0);
  }
  if (call.region.exception) std::rethrow_exception(call.region.exception);
  return !call.region.stopped;
}

// Calls body(k) for k in [0, count) concurrently, each divided as for `each` threads.
template <typename Body>
void run_crews(int64_t count, int64_t each, const Body& body) {
  std::deque<Crew> crews;
  for (int64_t k = 0; k < count; ++k) crews.emplace_back(each);
  const auto run = [&](Team& team) {
    const int64_t active = std::clamp<int64_t>(team.threads() / count, 1, each);
    for (int64_t at = team.thread(); at < count * active; at += team.threads()) {
      const int64_t k = at / active, member = at % active;
      if (member > 0) {
        crews[k].serve(member, active);
      } else {
        team.try_worker(at, [&](int64_t) {
          crews[k].lead(active, [&] { body(k); });
          return true;
        });
      }
    }
  };
  parallel_region(count * each, run, /*sharing=*/1, /*of_crews=*/true);
}

// Calls body(begin, end) for nearly equal parts of [0, n), at most one per `grain` begun. Returns
// false if a call returned false.
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
    team.for_each_worker([&](int64_t worker) { return run(share(n, parts, worker)); });
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
