// GEMMs on any device: C (M, N) = A (M, K) B (K, N).
//
// Operands are raw pointers: a step creates no tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>

namespace lltm {

// A or B (rows, cols), with row stride `ld` or, if transposed, contiguous columns with stride `ld`.
struct GemmOperand {
  const void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  bool transposed;
  at::ScalarType dtype;
};

// C (rows, cols) with contiguous rows.
struct GemmResult {
  void* data;
  std::int64_t rows, cols;
  std::int64_t ld;
  at::ScalarType dtype;
};

// How to sum K products: GEMMs of this many, and this many GEMMs before a partial sum is added.
struct SumLimits {
  std::int64_t products_per_gemm = std::numeric_limits<std::int64_t>::max();
  std::int64_t gemms_per_sum = std::numeric_limits<std::int64_t>::max();
};

class DeviceGemm {
 public:
  DeviceGemm() = default;
  DeviceGemm(const DeviceGemm&) = delete;
  DeviceGemm& operator=(const DeviceGemm&) = delete;
  virtual ~DeviceGemm() = default;

  // C = A B or, if `accumulate`, C += A B. C has the operands' dtype or its compute dtype.
  virtual void operator()(
      const GemmOperand& a, const GemmOperand& b, const GemmResult& c, bool accumulate) const = 0;

  virtual at::ScalarType dtype() const = 0;  // of A and B
  // In bytes, of the rows of matrices for many GEMMs.
  virtual std::int64_t alignment() const { return 1; }
  // For sums over the rows of a sequence, and over the gates.
  virtual SumLimits over_rows() const { return {}; }
  virtual SumLimits over_gates() const { return {}; }
};

// The tensor if a GEMM can read it in place, otherwise a contiguous copy.
at::Tensor as_operand(const at::Tensor& tensor);

// `cols` rounded up to `alignment` bytes.
std::int64_t padded_cols(std::int64_t cols, at::ScalarType dtype, std::int64_t alignment);

// A 2-d tensor for many GEMMs, padded with zeros to (rows, cols): itself if it has this size and
// aligned rows, otherwise an aligned copy. Weights with an odd H + I are not aligned.
at::Tensor as_padded_operand(
    const at::Tensor& tensor, std::int64_t rows, std::int64_t cols, std::int64_t alignment);

// An as_operand result, or its rows [begin, begin + count).
GemmOperand operand(const at::Tensor& tensor);
GemmOperand operand_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);
GemmOperand transposed(const GemmOperand& operand);

// A 2-d tensor with contiguous rows, or its rows [begin, begin + count).
GemmResult result(const at::Tensor& tensor);
GemmResult result_rows(const at::Tensor& tensor, std::int64_t begin, std::int64_t count);

// Columns [begin, begin + count).
GemmOperand columns(GemmOperand operand, std::int64_t begin, std::int64_t count);
GemmResult columns(GemmResult result, std::int64_t begin, std::int64_t count);

}  // namespace lltm
