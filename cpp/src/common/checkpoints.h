#pragma once

#include "common/tensor_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lltm {

// checkpoint_steps is any positive number. The bound exceeds every sequence's length and prevents
// overflow.
template <typename Size>  // int64_t or SymInt
Size checkpoint_count(const Size& steps, int64_t checkpoint_steps) {
  const int64_t apart = std::min(checkpoint_steps, int64_t{1} << 62);
  return (steps + (apart - 1)) / apart;
}

// False if `every` is 0.
inline bool has_checkpoint(size_t k, int64_t every) {
  return every > 0 && k % static_cast<size_t>(every) == 0;
}

class Checkpoints {
 public:
  // Allocates for states like c (B, H).
  Checkpoints(int64_t every, size_t steps, const at::Tensor& c) : every_(every) {
    if (every == 0) return;
    const int64_t count = checkpoint_count(static_cast<int64_t>(steps), every);
    tensor_ = at::empty({count, c.size(0), c.size(1)}, c.options());
  }

  // (ceil(steps / every), B, H); undefined without checkpoints.
  const at::Tensor& tensor() const { return tensor_; }

  bool has(size_t k) const { return has_checkpoint(k, every_); }

  void save(size_t k, const at::Tensor& c) const { at(k).copy_(c); }

  // Rows [row, row + rows) and hidden units [unit, unit + units) of tensors with elements T.
  template <typename T, typename C>
  void save(
      size_t k, Matrix<const C> c, int64_t row, int64_t rows, int64_t unit, int64_t units) const {
    const auto from = c.from(row, unit);
    const auto to = write<T>(at(k)).from(row, unit);
    for (int64_t r = 0; r < rows; ++r) {
      std::transform(
          from.row(r), from.row(r) + units, to.row(r), [](C x) { return static_cast<T>(x); });
    }
  }

 private:
  at::Tensor at(size_t k) const { return tensor_.select(0, static_cast<int64_t>(k) / every_); }

  int64_t every_;
  at::Tensor tensor_;
};

}  // namespace lltm
