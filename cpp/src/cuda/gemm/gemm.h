// GEMM on a GPU with cuBLAS: C (M, N) = A (M, K) B (K, N).
//
// A step creates no tensors and a GEMM is one call: operands are raw pointers, the handle is
// fetched once per sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lltm::cuda {

// A or B (rows, cols), with row stride `ld` or, if transposed, contiguous columns with stride `ld`.
struct GemmOperand {
  const void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  bool transposed;
};

// C (rows, cols) with contiguous rows.
struct GemmResult {
  void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  at::ScalarType dtype;
};

// The tensor if cuBLAS can read it in place, otherwise a contiguous copy.
at::Tensor as_operand(const at::Tensor& tensor);

// `cols` rounded up to 16 bytes: cuBLAS's faster kernels require such starts, strides and lengths.
std::int64_t padded_cols(std::int64_t cols, at::ScalarType dtype);

// A 2-d tensor for many GEMMs, padded with zeros to (rows, cols): itself if it has this size and
// rows aligned to 16 bytes, otherwise an aligned copy. Weights with an odd H + I are not aligned.
at::Tensor as_padded_operand(const at::Tensor& tensor, std::int64_t rows, std::int64_t cols);

// An as_operand result, or its rows [begin, begin + count).
GemmOperand operand(const at::Tensor& tensor);
GemmOperand operand_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);
GemmOperand transposed(const GemmOperand& operand);

// A 2-d tensor with contiguous rows, or its rows [begin, begin + count).
GemmResult result(const at::Tensor& tensor);
GemmResult result_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

void zero(const GemmResult& c);

// Of the current device.
std::int64_t l2_cache_bytes();

// On the device and stream at construction, which must stay current. Accumulates in float64 for
// float64, otherwise in float32. float32 follows cuda_float32(), then PyTorch's allow_tf32.
class Gemm {
 public:
  explicit Gemm(at::ScalarType dtype);

  // TF32 keeps 10 mantissa bits per factor.
  bool uses_tf32() const;

  // A B is zero if K = 0. C can be float32 for 16-bit operands.
  void operator()(
      const GemmOperand& a, const GemmOperand& b, const GemmResult& c, bool accumulate) const;

 private:
  at::ScalarType dtype_;
  void* handle_ = nullptr;
};

}  // namespace lltm::cuda
