#pragma once

#include "common/huge_pages.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lltm {

// at::empty on the CPU without dispatcher overhead, noticeable in short calls.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::typeMetaToScalarType(options.dtype())));
}

// On any device.
inline at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  return with_huge_pages(new_tensor(sizes, options));
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

}  // namespace lltm
