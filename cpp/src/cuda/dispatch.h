// The choice of dtype, and tensors as the kernels see them.
#pragma once

#include "matrix.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

namespace lltm::cuda {

// Calls body with a null pointer of the storage type that belongs to dtype.
template <typename Body>
void visit_dtype(at::ScalarType dtype, const Body& body) {
  switch (dtype) {
    case at::kDouble:
      return body(static_cast<double*>(nullptr));
    case at::kFloat:
      return body(static_cast<float*>(nullptr));
    case at::kHalf:
      return body(static_cast<c10::Half*>(nullptr));
    case at::kBFloat16:
      return body(static_cast<c10::BFloat16*>(nullptr));
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

// The dtype of compute_t<T>.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// A 2-d tensor as the kernels see it; absent where undefined.
template <typename T>
Matrix<const T> read(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<T>(), tensor.stride(0), tensor.stride(1)};
}

// A 1-d tensor as the same row again and again.
template <typename T>
Matrix<const T> read_row(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<T>(), 0, tensor.stride(0)};
}

template <typename T>
Matrix<T> write(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.mutable_data_ptr<T>(), tensor.stride(0), tensor.stride(1)};
}

}  // namespace lltm::cuda
