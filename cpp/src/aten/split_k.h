#pragma once

#include "aten/device_gemm.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm {

// C (M, N) = A^T B over the rows from all calls. The error hardly grows with their number, K.
class SplitKGemm {
 public:
  // C has the compute dtype, or the 16-bit dtype of A and B if add is called once and the limits
  // allow a single GEMM. C can be part of a matrix.
  SplitKGemm(const DeviceGemm& gemm, const SumLimits& limits, at::Tensor c);

  // Adds rows from a_row in A (., M), in the GEMM's dtype, and b_row in B (., N), as_operand
  // results.
  void add(
      const at::Tensor& a,
      std::int64_t a_row,
      const at::Tensor& b,
      std::int64_t b_row,
      std::int64_t rows);

  void finish();

 private:
  void add_product(const GemmOperand& a, const GemmOperand& b);

  const DeviceGemm& gemm_;
  const SumLimits limits_;
  at::Tensor c_;
  at::Tensor sum_;  // partial sum, if C adds up partial sums
  std::int64_t gemms_ = 0;
};

}  // namespace lltm
