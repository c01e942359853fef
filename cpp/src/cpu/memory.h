#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lltm::cpu {

// at::empty without dispatcher overhead, noticeable in short calls.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::Tensor(at::detail::empty_cpu(sizes, options));
}

// Requests huge pages for large tensors. Freed memory usually returns to the operating system, so
// the first access zeroes each page again. With 4 KiB pages this can take longer than the
// computation.
inline at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = new_tensor(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = 2 << 20;
  constexpr std::uintptr_t kLarge = 8 * kHugePage;
  if (tensor.nbytes() >= kLarge) {
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.mutable_data_ptr());
    const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const std::uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
    // A hint: the result does not matter.
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

// Aligned to cache lines by hand: malloc caches small blocks, but aligned allocation does not reuse
// them.
template <typename T>
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(int64_t count) : bytes_(new std::byte[count * sizeof(T) + kLine]) {}
  T* data() const {
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes_.get());
    return reinterpret_cast<T*>((begin + kLine - 1) / kLine * kLine);
  }

 private:
  static constexpr std::size_t kLine = 64;
  std::unique_ptr<std::byte[]> bytes_;
};

}  // namespace lltm::cpu
