#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <utility>

namespace lltm {

// Requests huge pages for a new, large tensor on the CPU. Such memory usually returns to the
// operating system when freed, so the first access to each page zeroes it again. With 4 KiB pages
// this can take longer than the computation.
inline at::Tensor with_huge_pages(at::Tensor tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = 2 << 20;
  constexpr std::uintptr_t kLarge = 2 * kHugePage;
  if (tensor.is_cpu() && tensor.nbytes() >= kLarge) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
    const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const std::uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
    // Only a hint: the result does not matter.
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

}  // namespace lltm
