// Tensors as raw pointers, and new ones.
#pragma once

#include "common/matrix.h"
#include "common/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <type_traits>

namespace lltm {

// Calls body with a null pointer to the storage type. 16-bit types are the backend's.
template <typename Half, typename BFloat16, typename Body>
decltype(auto) visit_dtype(at::ScalarType dtype, const Body& body) {
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

// Dtype of computation and accumulation.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}
inline at::TensorOptions compute_options(const at::Tensor& tensor) {
  return tensor.options().dtype(compute_dtype(tensor.scalar_type()));
}

inline at::Tensor with_huge_pages(at::Tensor tensor) {
  if (tensor.is_cpu() && tensor.nbytes() >= kLarge) {
    request_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  }
  return tensor;
}

// at::empty on the CPU without dispatcher overhead, noticeable in short calls.
inline at::Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::Tensor(at::detail::empty_cpu(sizes, at::typeMetaToScalarType(options.dtype())));
}

// On any device.
inline at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  return with_huge_pages(new_tensor(sizes, options));
}

// The copy is contiguous.
inline at::Tensor copy_or_zeros(
    const at::Tensor& tensor, at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensor.defined() ? at::empty(sizes, options).copy_(tensor) : at::zeros(sizes, options);
}

// Null if the 2-d tensor is undefined.
template <typename T>
Matrix<const T> read(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::IntArrayRef strides = tensor.strides();
  return {static_cast<const T*>(tensor.const_data_ptr()), strides[0], strides[1]};
}
template <typename T>
Matrix<T> write(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::IntArrayRef strides = tensor.strides();
  return {static_cast<T*>(tensor.mutable_data_ptr()), strides[0], strides[1]};
}

// Null if undefined.
template <typename T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

// A 1-d tensor as equal rows; null if undefined.
template <typename T>
Matrix<const T> read_row(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<const T*>(tensor.const_data_ptr()), 0, tensor.stride(0)};
}

// The rows from `row` on of a 2-d tensor. Null if undefined.
inline View view_at(const void* data, const at::Tensor& tensor, int64_t row) {
  const at::IntArrayRef strides = tensor.strides();  // faster than stride()
  const int64_t offset = row * strides[0] * static_cast<int64_t>(tensor.element_size());
  auto* const first = static_cast<char*>(const_cast<void*>(data));
  const size_t dims = strides.size();
  return {row == 0 ? first : first + offset, strides[dims - 2], strides[dims - 1]};
}
inline View view(const at::Tensor& tensor, int64_t row = 0) {
  return tensor.defined() ? view_at(tensor.mutable_data_ptr(), tensor, row) : View();
}
inline View read_view(const at::Tensor& tensor, int64_t row = 0) {
  return tensor.defined() ? view_at(tensor.const_data_ptr(), tensor, row) : View();
}

// Null if undefined.
inline StepsView steps_view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const int64_t rows = tensor.dim() == 3 ? std::max<int64_t>(tensor.sizes()[1], 1) : 1;
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  return {read_view(tensor), tensor.strides()[0] * bytes, rows};
}

}  // namespace lltm
