#include "cpu/threads/usable_cpus.h"

#include "cpu/threads/openmp.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>

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

int64_t usable_cpus() {
  using std::chrono::steady_clock;
  struct Reading {
    int64_t cpus;
    steady_clock::time_point until;
  };
  thread_local Reading affinity = {}, quota = {};
  const auto now = steady_clock::now();
  // Reading takes 4 and 12 microseconds.
  if (now >= affinity.until) affinity = {omp_get_num_procs(), now + std::chrono::milliseconds(20)};
  if (now >= quota.until) quota = {quota_cpus(), now + std::chrono::seconds(2)};
  return std::min(affinity.cpus, quota.cpus);
}

}  // namespace lltm::cpu
