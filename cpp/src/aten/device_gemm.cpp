#include "aten/device_gemm.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace lltm {
namespace {

// cuBLAS requires rows that do not overlap, and 32-bit indices. A single row's stride is
// irrelevant.
bool is_leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  return rows <= 1 ||
         (stride >= std::max<int64_t>(cols, 1) && stride <= std::numeric_limits<int32_t>::max());
}

// cuBLAS checks also a single row's stride, which can be anything in a tensor: returns the row
// length instead.
int64_t leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  return std::max<int64_t>(rows > 1 ? stride : cols, 1);
}

bool has_contiguous_rows(const at::Tensor& t) {
  return (t.size(1) <= 1 || t.stride(1) == 1) &&
         is_leading_dimension(t.stride(0), t.size(0), t.size(1));
}

bool has_contiguous_columns(const at::Tensor& t) {
  return (t.size(0) <= 1 || t.stride(0) == 1) &&
         is_leading_dimension(t.stride(1), t.size(1), t.size(0));
}

int64_t bytes_of(int64_t elements, at::ScalarType dtype) {
  return elements * static_cast<int64_t>(c10::elementSize(dtype));
}

// An empty tensor may have a null data pointer.
int64_t byte_offset(const at::Tensor& tensor, int64_t elements) {
  return tensor.numel() == 0 ? 0 : bytes_of(elements, tensor.scalar_type());
}

}  // namespace

at::Tensor as_operand(const at::Tensor& tensor) {
  return has_contiguous_rows(tensor) || has_contiguous_columns(tensor) ? tensor
                                                                       : tensor.contiguous();
}

int64_t padded_cols(int64_t cols, at::ScalarType dtype, int64_t alignment) {
  const int64_t unit = std::max<int64_t>(alignment / bytes_of(1, dtype), 1);
  return (cols + unit - 1) / unit * unit;
}

at::Tensor as_padded_operand(
    const at::Tensor& tensor, int64_t rows, int64_t cols, int64_t alignment) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const int64_t row_bytes = bytes_of(tensor.stride(0), tensor.scalar_type());
  if (tensor.size(0) == rows && tensor.size(1) == cols && has_contiguous_rows(tensor) &&
      address % alignment == 0 && row_bytes % alignment == 0) {
    return tensor;
  }
  const at::Tensor memory =
      at::zeros({rows, padded_cols(cols, tensor.scalar_type(), alignment)}, tensor.options());
  memory.slice(0, 0, tensor.size(0)).slice(1, 0, tensor.size(1)).copy_(tensor);
  return memory.slice(1, 0, cols);
}

GemmOperand operand(const at::Tensor& tensor) {
  return operand_rows(tensor, 0, tensor.size(0));
}

GemmOperand operand_rows(const at::Tensor& t, int64_t begin, int64_t count) {
  const auto* const data = static_cast<const char*>(t.const_data_ptr());
  const at::ScalarType dtype = t.scalar_type();
  if (has_contiguous_rows(t)) {
    const int64_t ld = leading_dimension(t.stride(0), t.size(0), t.size(1));
    return {data + byte_offset(t, begin * ld), count, t.size(1), ld, /*transposed=*/false, dtype};
  }
  const int64_t ld = leading_dimension(t.stride(1), t.size(1), t.size(0));
  return {data + byte_offset(t, begin), count, t.size(1), ld, /*transposed=*/true, dtype};
}

GemmOperand transposed(const GemmOperand& a) {
  return {a.data, a.cols, a.rows, a.ld, !a.transposed, a.dtype};
}

GemmResult result(const at::Tensor& tensor) {
  return result_rows(tensor, 0, tensor.size(0));
}

GemmResult result_rows(const at::Tensor& t, int64_t begin, int64_t count) {
  const int64_t ld = leading_dimension(t.stride(0), t.size(0), t.size(1));
  auto* const data = static_cast<char*>(t.mutable_data_ptr());
  return {data + byte_offset(t, begin * ld), count, t.size(1), ld, t.scalar_type()};
}

GemmOperand columns(GemmOperand a, int64_t begin, int64_t count) {
  const int64_t offset = bytes_of(a.transposed ? begin * a.ld : begin, a.dtype);
  if (begin > 0 && a.data != nullptr) a.data = static_cast<const char*>(a.data) + offset;
  a.cols = count;
  return a;
}

GemmResult columns(GemmResult c, int64_t begin, int64_t count) {
  if (begin > 0 && c.data != nullptr) {
    c.data = static_cast<char*>(c.data) + bytes_of(begin, c.dtype);
  }
  c.cols = count;
  return c;
}

}  // namespace lltm
