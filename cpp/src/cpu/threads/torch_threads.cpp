#include "cpu/threads/concurrent_callers.h"

#include <ATen/Parallel.h>

namespace lltm::cpu {

int64_t torch_threads() {
  return at::get_num_threads();
}

bool in_torch_region() {
  return at::in_parallel_region();
}

}  // namespace lltm::cpu
