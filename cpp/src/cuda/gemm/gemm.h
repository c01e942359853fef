// GEMM on a GPU, by cuBLAS: C (M, N) = A (M, K) B (K, N).
//
// Operands are raw pointers, so that the loop over the steps makes no tensor, and the
// handle is fetched once per sequence: a GEMM costs one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lltm::cuda {

// A or B: a matrix (rows, cols) with contiguous rows that begin `ld` elements apart; or,
// transposed, with contiguous columns that do.
struct Operand {
  const void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  bool transposed;
};

// C: a matrix (rows, cols) with contiguous rows.
struct Result {
  void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  at::ScalarType dtype;
};

// The 2-d tensor itself where cuBLAS can read it in place, else a contiguous copy.
at::Tensor as_operand(const at::Tensor& tensor);

// cuBLAS's faster kernels read 16 bytes at a time. They need operands and results that begin at a
// multiple of them, rows that do, and rows of that length. This is `cols` rounded up to it.
std::int64_t padded_cols(std::int64_t cols, at::ScalarType dtype);

// A 2-d tensor as an operand of many GEMMs, filled up with zeros to (rows, cols): the tensor itself
// where that changes nothing and rows begin at multiples of 16 bytes, else a copy whose rows do.
// Those of weights (G * H, H + I) do not where H + I is odd.
at::Tensor as_padded_operand(const at::Tensor& tensor, std::int64_t rows, std::int64_t cols);

// All of a tensor that as_operand returned, or rows [begin, begin + count) of it.
Operand operand(const at::Tensor& tensor);
Operand operand_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);
Operand transposed(const Operand& operand);

// A 2-d tensor with contiguous rows as C, or rows [begin, begin + count) of it.
Result result(const at::Tensor& tensor);
Result result_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

// C = 0, on the current stream.
void zero(const Result& c);

// For operands of one dtype, on the device and stream that are current when it is made;
// both must stay current. Accumulates in float64 for float64, else in float32; float32
// follows PyTorch's allow_tf32.
class Gemm {
 public:
  explicit Gemm(at::ScalarType dtype);

  // Whether it multiplies float32 in TF32, ten bits after the first of each factor.
  bool uses_tf32() const;

  // C = A B, or C += A B. With K = 0, A B is zero. C is of the operands' dtype or, for the
  // 16-bit ones, of float32.
  void operator()(const Operand& a, const Operand& b, const Result& c, bool accumulate) const;

 private:
  at::ScalarType dtype_;
  void* handle_;
};

}  // namespace lltm::cuda
