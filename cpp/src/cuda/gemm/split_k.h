#pragma once

#include "cuda/gemm/gemm.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm::cuda {

// C (M, N) = A^T B over the rows from all calls. The error hardly grows with their number, K.
class SplitKGemm {
 public:
  // C has the compute dtype, or the 16-bit dtype of A and B if add is called once. C can be part of
  // a matrix.
  SplitKGemm(const Gemm& gemm, at::ScalarType dtype, const at::Tensor& c);

  // Adds rows from a_row in A (., M) and b_row in B (., N), as_operand results.
  void add(
      const at::Tensor& a,
      std::int64_t a_row,
      const at::Tensor& b,
      std::int64_t b_row,
      std::int64_t rows);

  void finish();

 private:
  void add_product(const GemmOperand& a, const GemmOperand& b);

  const Gemm& gemm_;
  at::Tensor c_;
  std::int64_t rows_per_product_, products_per_sum_;
  at::Tensor sum_;  // partial sum, if C adds up partial sums
  std::int64_t products_ = 0;
};

}  // namespace lltm::cuda
