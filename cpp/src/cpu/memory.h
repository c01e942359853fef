// Memory for large results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace lltm::cpu {

// at::empty, and for large tensors the kernel is asked for huge pages. Large
// blocks mostly go back to the operating system when they are freed, so each of
// their pages is zeroed anew at its first touch, which by 4 KiB pages can take
// longer than to compute what is written there.
inline at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = 2 << 20;
  constexpr std::uintptr_t kLarge = 8 * kHugePage;
  if (tensor.nbytes() >= kLarge) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
    const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const std::uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
    // Advice: where it is not taken, everything works as before.
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

}  // namespace lltm::cpu
