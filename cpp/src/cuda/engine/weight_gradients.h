// The GEMM of the gradients of weights, over the rows of a step or of all steps.
#pragma once

#include "cuda/gemm/gemm.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm::cuda {

// C (M, N) = A^T B over the rows of all calls, with an error that hardly grows with their number.
class WeightGradientGemm {
 public:
  // C is of the dtype of A and B where that is float32 or float64, or a part of such a matrix.
  WeightGradientGemm(const Gemm& gemm, at::ScalarType dtype, const at::Tensor& c);

  // Adds the product of rows [a_row, a_row + rows) of A (., M) and rows [b_row, ...) of B (., N),
  // both as as_operand returns them.
  void add(
      const at::Tensor& a,
      std::int64_t a_row,
      const at::Tensor& b,
      std::int64_t b_row,
      std::int64_t rows);

  // C is complete. Nothing may be added after it.
  void finish();

 private:
  void add_product(const Operand& a, const Operand& b);

  const Gemm& gemm_;
  at::Tensor c_;
  std::int64_t rows_per_product_, products_per_sum_;
  at::Tensor sum_;             // of some products, where C is the sum of such sums
  std::int64_t products_ = 0;  // so far
};

}  // namespace lltm::cuda
