// Memory for large results and for workspaces.
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

// at::empty in a kernel: the dispatcher has nothing to do for it, and in a short call is felt.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::Tensor(at::detail::empty_cpu(sizes, options));
}

// A new tensor, and for large ones the operating system is asked for huge pages. Large
// blocks mostly go back to it when they are freed, so each page is zeroed anew at its first
// touch, which with pages of 4 KiB can take longer than computing what is written there.
inline at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = new_tensor(sizes, options);
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

// Memory for the length of a call, aligned to cache lines. malloc alone keeps small blocks at hand,
// and aligned allocation does not take them.
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
