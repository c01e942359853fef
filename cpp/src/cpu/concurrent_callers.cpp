#include "cpu/concurrent_callers.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>

#include <pthread.h>

extern "C" int omp_get_num_procs() noexcept;

namespace lltm::cpu {
namespace {

// The CPUs that a container's cgroup v2 or v1 allows, or the largest number.
int64_t quota_cpus() {
  double quota = 0, period = 0;
  if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> quota >> period) {  // not for "max"
  } else {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  if (!(quota > 0) || !(period > 0)) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(static_cast<int64_t>(quota / period + 0.5), 1);
}

using Clock = std::chrono::steady_clock;

// Between two readings: of affinity and schedstat, which take up to 4 microseconds, and of the
// quota, which takes 12.
constexpr std::chrono::milliseconds kShort(20), kLong(2000);

// How long this thread has waited for a CPU in its life, or 0 if the system does not say.
std::chrono::nanoseconds waited_for_cpu() {
  int64_t running = 0, waited = 0;
  std::ifstream("/proc/thread-self/schedstat") >> running >> waited;
  return std::chrono::nanoseconds(waited);
}

}  // namespace

bool other_processes_run() {
  struct State {
    bool found = true;  // so that the first call only reads how long the thread has waited
    Clock::duration pause = kShort;
    Clock::time_point since, until;
    std::chrono::nanoseconds waited;
  };
  thread_local State state;
  const auto now = Clock::now();
  if (now < state.until) return state.found;
  const auto waited = waited_for_cpu();
  if (state.found) {
    state.found = false;  // try all threads again
    if (now > state.until + kLong) state.pause = kShort;
  } else if ((waited - state.waited) * 4 > now - state.since) {
    // The first time may be due to the scheduler, which sometimes runs two threads of a team on one
    // CPU although another is idle.
    state.found = state.pause > kShort;
    state.pause = std::min<Clock::duration>(2 * state.pause, kLong);
  } else {
    state.pause = kShort;
  }
  state.until = now + (state.found ? state.pause : kShort);
  state.since = now;
  state.waited = waited;
  return state.found;
}

// A thread of the parent that was in a region does not exist in a forked process.
[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, Running::reset);

int64_t usable_cpus() {
  struct Reading {
    int64_t cpus;
    Clock::time_point until;
  };
  thread_local Reading affinity = {}, quota = {};
  const auto now = Clock::now();
  if (now >= affinity.until) affinity = {omp_get_num_procs(), now + kShort};
  if (now >= quota.until) quota = {quota_cpus(), now + kLong};
  return std::min(affinity.cpus, quota.cpus);
}

}  // namespace lltm::cpu
