// GEMM on a GPU with cuBLAS: C (M, N) = A (M, K) B (K, N).
//
// Operands are raw pointers, and the handle is fetched once per sequence. The loop over the steps
// therefore creates no tensors, and a GEMM costs one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lltm::cuda {

// A or B: a matrix (rows, cols) with contiguous rows and row stride `ld` in elements. If
// transposed, columns are contiguous and `ld` is the column stride.
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

// Returns the 2-d tensor if cuBLAS can read it in place, otherwise a contiguous copy.
at::Tensor as_operand(const at::Tensor& tensor);

// Returns `cols` rounded up to a multiple of 16 bytes. cuBLAS's faster kernels read 16 bytes per
// access. They require operands and results whose start, row stride and row length are multiples of
// 16 bytes.
std::int64_t padded_cols(std::int64_t cols, at::ScalarType dtype);

// Returns a 2-d tensor as an operand for many GEMMs, padded with zeros to (rows, cols). Returns the
// tensor itself if it has this size and its rows are aligned to 16 bytes, otherwise an aligned
// copy. Weights (G * H, H + I) with an odd H + I are not aligned.
at::Tensor as_padded_operand(const at::Tensor& tensor, std::int64_t rows, std::int64_t cols);

// Returns a tensor from as_operand, or its rows [begin, begin + count), as an Operand.
Operand operand(const at::Tensor& tensor);
Operand operand_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);
Operand transposed(const Operand& operand);

// Returns a 2-d tensor with contiguous rows, or its rows [begin, begin + count), as C.
Result result(const at::Tensor& tensor);
Result result_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

// Sets C to 0, on the current stream.
void zero(const Result& c);

// GEMM for operands of one dtype. Uses the device and stream that are current at construction,
// which must stay current. Accumulates in float64 for float64, otherwise in float32. float32
// follows PyTorch's allow_tf32.
class Gemm {
 public:
  explicit Gemm(at::ScalarType dtype);

  // True if float32 is multiplied in TF32, which keeps 10 mantissa bits per factor.
  bool uses_tf32() const;

  // C = A B, or C += A B. With K = 0, A B is zero. C has the dtype of the operands; for 16-bit
  // operands it can also be float32.
  void operator()(const Operand& a, const Operand& b, const Result& c, bool accumulate) const;

 private:
  at::ScalarType dtype_;
  void* handle_;
};

}  // namespace lltm::cuda
