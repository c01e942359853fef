// The matrix products on a GPU. Everything that is asked of cuBLAS stands in
// products.cpp.
//
// A product costs one call: operands are pointers, so that the loop over the
// steps makes no tensor, and the handle is fetched once per sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lltm::cuda {

// A matrix (rows, cols) whose rows lie `stride` elements apart, each contiguous;
// or, transposed, whose columns do.
struct Operand {
  const void* data;
  std::int64_t rows, cols;
  std::int64_t stride;
  bool transposed;
};

// A matrix (rows, cols) that is written; its rows are contiguous.
struct Result {
  void* data;
  std::int64_t rows, cols;
  std::int64_t stride;
  at::ScalarType dtype;
};

// The 2-d tensor itself if it is an operand as it lies, else a contiguous copy.
at::Tensor as_operand(const at::Tensor& tensor);

// All of a tensor that as_operand gave.
Operand operand(const at::Tensor& tensor);
Operand transposed(const Operand& operand);
// Rows [begin, begin + count) of a tensor that as_operand gave.
Operand rows_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

// Of a 2-d tensor with contiguous rows: all of it, or some rows.
Result result(const at::Tensor& tensor);
Result result_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

// The products of operands of one dtype, on the device and the stream that were
// current when it was made, both of which must stay so. Sums are taken in
// float64 for float64, else in float32; float32 follows PyTorch's allow_tf32.
class Products {
 public:
  explicit Products(at::ScalarType dtype);

  // c = a b, or c += a b. A product over nothing is zero. c is of the operands'
  // dtype or, for the 16-bit ones, of float32.
  void multiply(const Operand& a, const Operand& b, const Result& c, bool accumulate) const;

 private:
  at::ScalarType dtype_;
  void* handle_;
};

}  // namespace lltm::cuda
