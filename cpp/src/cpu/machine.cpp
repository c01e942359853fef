#include "cpu/machine.h"

#include "cpu/gemm/formats.h"
#include "cpu/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include <strings.h>
#if defined(__linux__)
#include <unistd.h>
#endif

extern "C" int omp_get_num_procs() noexcept;

namespace lltm::cpu {
namespace {

int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long answer = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (answer > 0) return answer;
#endif
  return Machine{}.l2;
}

// sysconf reports the L3 caches of several CPUs as one.
std::ifstream l3_file(const char* name) {
  return std::ifstream(std::string("/sys/devices/system/cpu/cpu0/cache/index3/") + name);
}

int64_t l3_bytes() {
  int64_t kilobytes = 0;
  l3_file("size") >> kilobytes;  // "32768K"
  return kilobytes > 0 ? kilobytes << 10 : Machine{}.l3;
}

// From "0-7,64-71": hyperthreads count as cores.
int64_t l3_cores() {
  std::ifstream file = l3_file("shared_cpu_list");
  int64_t cores = 0, first = 0;
  while (file >> first) {
    int64_t last = first;
    if (file.peek() == '-') file.ignore() >> last;
    cores += last - first + 1;
    file.ignore();
  }
  return cores > 0 ? cores : Machine{}.l3_cores;
}

// The CPUs that cgroup v2 or v1 allows, or the largest number.
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

// libgomp's rules.
int requested_spins() {
  constexpr int kMost = 300000;
  if (const char* const count = std::getenv("GOMP_SPINCOUNT"); count != nullptr) {
    // A number, or "infinite".
    char* end = nullptr;
    const double spins = std::strtod(count, &end);
    if (end != count) return static_cast<int>(std::clamp(spins, 0.0, double{kMost}));
  }
  const char* const policy = std::getenv("OMP_WAIT_POLICY");
  return policy != nullptr && strcasecmp(policy, "passive") == 0 ? 0 : kMost;
}

}  // namespace

int64_t usable_cpus() {
  static const int64_t quota = quota_cpus();
  thread_local const int64_t cpus = omp_get_num_procs();
  return std::min(cpus, quota);
}

int spins_of(int64_t running_threads) {
  constexpr int kFew = 100;
  static const int requested = requested_spins();
  return running_threads > usable_cpus() ? std::min(requested, kFew) : requested;
}

Machine current_machine() {
  static const int64_t l2 = l2_bytes(), l3 = l3_bytes(), cores = l3_cores();
  return {
      l2,
      std::min(available_threads(), usable_cpus()),
      F32Format::available(),
      Bf16Format::available(),
      Bf16x3Format::available(),
      /*matrix_unit=*/Bf16x3Format::available(),
      l3,
      cores};
}

}  // namespace lltm::cpu
