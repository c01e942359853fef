#pragma once

#include <cstdint>

namespace lltm::cpu {

// CPUs that this thread may use: its affinity, and the quota of its container. Both may change, so
// that they are read again every 20 milliseconds and 2 seconds.
int64_t usable_cpus();

}  // namespace lltm::cpu
