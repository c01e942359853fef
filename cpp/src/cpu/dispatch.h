// The choice of instruction set and of dtype for the CPU kernels.
#pragma once

#include "cpu/pointwise.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <type_traits>

namespace lltm::cpu {

// The kernels for the instruction set that libtorch reports, so that
// ATEN_CPU_CAPABILITY selects them; chosen once.
const Kernels& kernels();

template <typename T, typename G>
const Pointwise<T, G>& pointwise() {
  return kernels().*kPointwise<T, G>;
}

// Elements of pointwise work below which a second thread does not pay.
constexpr int64_t kGrain = 2048;

// Calls body with a null pointer of the storage type that belongs to dtype.
template <typename Body>
decltype(auto) visit_dtype(at::ScalarType dtype, Body&& body) {
  switch (dtype) {
    case at::kDouble:
      return body(static_cast<double*>(nullptr));
    case at::kFloat:
      return body(static_cast<float*>(nullptr));
    case at::kHalf:
      return body(static_cast<Half*>(nullptr));
    case at::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

// The dtype of a product's operand type.
template <typename G>
constexpr at::ScalarType kOperandDtype = std::is_same_v<G, float> ? at::kFloat : at::kBFloat16;

// The dtype of compute_t<T>.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// A 2-d tensor as the kernels see it; absent where undefined.
template <typename T>
Matrix<const T> read(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

// The rows of a step in a tensor (T, B, .) or (N, .) of any strides; absent where
// the tensor is undefined.
template <typename T>
class StepRows {
 public:
  explicit StepRows(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool packed = tensor.dim() == 2;
    batch_ = packed ? 1 : tensor.size(1);
    step_stride_ = tensor.stride(0);
    rows_ = {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(-2), tensor.stride(-1)};
  }

  // `offset` is the number of the step's first row (steps.h).
  Matrix<const T> of(int64_t offset) const {
    if (rows_.data == nullptr) return {};
    return {rows_.data + offset / batch_ * step_stride_, rows_.row_stride, rows_.col_stride};
  }

 private:
  Matrix<const T> rows_;
  int64_t batch_ = 1;
  int64_t step_stride_ = 0;
};

// A 1-d tensor as the same row again and again.
template <typename T>
Matrix<const T> read_row(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<const T*>(tensor.const_data_ptr()), 0, tensor.stride(0)};
}

template <typename T>
Matrix<T> write(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

template <typename T>
Matrix<T> write_row(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<T*>(tensor.mutable_data_ptr()), 0, tensor.stride(0)};
}

}  // namespace lltm::cpu
