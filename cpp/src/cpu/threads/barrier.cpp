#include "cpu/threads/barrier.h"

#include "cpu/threads/usable_cpus.h"

#include <algorithm>
#include <cstdlib>

#include <strings.h>

namespace lltm::cpu {
namespace {

// libgomp's rules, up to fewer iterations.
int requested_spins() {
  constexpr int kMost = 20000;
  if (const char* const count = std::getenv("GOMP_SPINCOUNT"); count != nullptr) {
    // A number, also with a suffix such as k, or "infinite".
    char* end = nullptr;
    const unsigned long long spins = std::strtoull(count, &end, 10);
    if (end != count) return *end == '\0' && spins < kMost ? static_cast<int>(spins) : kMost;
  }
  const char* const policy = std::getenv("OMP_WAIT_POLICY");
  return policy != nullptr && strcasecmp(policy, "passive") == 0 ? 0 : kMost;
}

}  // namespace

bool spins_are_requested() {
  return std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr;
}

int spins_of(int64_t threads) {
  static const int requested = requested_spins();
  return threads > 1 && threads > usable_cpus() ? std::min(requested, kFewSpins) : requested;
}

}  // namespace lltm::cpu
