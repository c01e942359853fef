#include "cuda/products.h"

#include <algorithm>
#include <limits>

namespace lltm::cuda {
namespace {

// A stride that cuBLAS takes: rows do not overlap, and it fits 32 bits, which its
// kernels calculate with. That of a single row does not matter.
bool is_stride(int64_t stride, int64_t rows, int64_t cols) {
  return rows <= 1 ||
         (stride >= std::max<int64_t>(cols, 1) && stride <= std::numeric_limits<int32_t>::max());
}

bool has_contiguous_rows(const at::Tensor& t) {
  return (t.size(1) <= 1 || t.stride(1) == 1) && is_stride(t.stride(0), t.size(0), t.size(1));
}

bool has_contiguous_columns(const at::Tensor& t) {
  return (t.size(0) <= 1 || t.stride(0) == 1) && is_stride(t.stride(1), t.size(1), t.size(0));
}

// The stride of `rows` such rows as cuBLAS takes it, which looks at that of a
// single row too: there the tensor's may be any number, and the length serves.
int64_t leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  return std::max<int64_t>(rows > 1 ? stride : cols, 1);
}

char* element(void* data, const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(data) + index * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

at::Tensor as_operand(const at::Tensor& tensor) {
  return has_contiguous_rows(tensor) || has_contiguous_columns(tensor) ? tensor
                                                                       : tensor.contiguous();
}

Operand operand(const at::Tensor& tensor) {
  return rows_of(tensor, 0, tensor.size(0));
}

Operand transposed(const Operand& a) {
  return {a.data, a.cols, a.rows, a.stride, !a.transposed};
}

Operand rows_of(const at::Tensor& tensor, int64_t begin, int64_t count) {
  const bool by_rows = has_contiguous_rows(tensor);
  const int64_t stride = by_rows
                             ? leading_dimension(tensor.stride(0), tensor.size(0), tensor.size(1))
                             : leading_dimension(tensor.stride(1), tensor.size(1), tensor.size(0));
  const int64_t first = begin * (by_rows ? stride : 1);
  return {
      element(const_cast<void*>(tensor.const_data_ptr()), tensor, first),
      count,
      tensor.size(1),
      stride,
      !by_rows};
}

Result result(const at::Tensor& tensor) {
  return result_rows(tensor, 0, tensor.size(0));
}

Result result_rows(const at::Tensor& tensor, int64_t begin, int64_t count) {
  const int64_t stride = leading_dimension(tensor.stride(0), tensor.size(0), tensor.size(1));
  return {
      element(tensor.mutable_data_ptr(), tensor, begin * stride),
      count,
      tensor.size(1),
      stride,
      tensor.scalar_type()};
}

}  // namespace lltm::cuda
