#include "cpu/parallel.h"

#include <algorithm>
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

}  // namespace

// A thread of the parent that was in a region does not exist in a forked process.
[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, Running::reset);

int64_t usable_cpus() {
  static const int64_t quota = quota_cpus();
  thread_local const int64_t cpus = omp_get_num_procs();
  return std::min(cpus, quota);
}

}  // namespace lltm::cpu
