#include "cpu/threads/concurrent_callers.h"

#include <pthread.h>

namespace lltm::cpu {

// A thread of the parent that was in a region does not exist in a forked process.
[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, Running::reset);

}  // namespace lltm::cpu
