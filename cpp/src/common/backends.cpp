#include <lltm/backends.h>

#include <torch/library.h>

#include <atomic>

namespace lltm {
namespace {

std::atomic<bool> persistent_setting = true;

}  // namespace

bool cuda_persistent() {
  return persistent_setting.load(std::memory_order_relaxed);
}

void set_cuda_persistent(bool enabled) {
  persistent_setting.store(enabled, std::memory_order_relaxed);
}

}  // namespace lltm

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_cuda_persistent", lltm::cuda_persistent);
  m.impl("_set_cuda_persistent", lltm::set_cuda_persistent);
}
