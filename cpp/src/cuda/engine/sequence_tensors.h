// What the engines of a sequence make of its tensors.
#pragma once

#include "common/tensor_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace lltm::cuda {

// A contiguous copy of a state; zero where undefined.
inline at::Tensor state(
    const at::Tensor& tensor, at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensor.defined() ? at::empty(sizes, options).copy_(tensor) : at::zeros(sizes, options);
}

// The same with rows of `cols` columns, filled up with zeros.
inline at::Tensor padded_state(
    const at::Tensor& tensor,
    at::IntArrayRef sizes,
    int64_t cols,
    const at::TensorOptions& options) {
  if (cols == sizes[1]) return state(tensor, sizes, options);
  const at::Tensor padded = at::zeros({sizes[0], cols}, options);
  if (tensor.defined()) padded.slice(1, 0, sizes[1]).copy_(tensor);
  return padded;
}

// The first `cols` columns, contiguous.
inline at::Tensor unpadded(const at::Tensor& tensor, int64_t cols) {
  return tensor.size(1) == cols ? tensor : tensor.slice(1, 0, cols).contiguous();
}

inline at::TensorOptions compute_options(const at::Tensor& tensor) {
  return tensor.options().dtype(compute_dtype(tensor.scalar_type()));
}

// The columns of the weights that multiply h, and those that multiply the input.
inline at::Tensor h_columns(const at::Tensor& weights, int64_t hidden) {
  return weights.slice(1, 0, hidden);
}
inline at::Tensor x_columns(const at::Tensor& weights, int64_t hidden) {
  return weights.slice(1, hidden);
}

}  // namespace lltm::cuda
