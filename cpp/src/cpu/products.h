// Large matrix products of float32 or bfloat16 rows: by the micro-kernel where
// that is the faster way, else by public ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lltm::cpu {

// Whether the micro-kernel for G reads the rows of this 2-d tensor as they lie.
template <typename G>
bool is_operand(const at::Tensor& x);

// A matrix (K, N) as the right operand of several products.
class RightOperand {
 public:
  explicit RightOperand(const at::Tensor& b);

  // out (rows, N) = a b for a (rows, K); all of one dtype.
  void multiply(at::Tensor out, const at::Tensor& a) const;

 private:
  at::Tensor matrix_;
  at::Tensor packed_;  // for the micro-kernel, where that will do the work
};

// Matrices one below the other, all of one width.
using Pieces = std::vector<at::Tensor>;

// out (M, N) += a^T b for b (rows, N) and a (rows, M), which is given in parts
// side by side, each of them in pieces. For bfloat16 arguments, out is float32.
void add_transposed_product(at::Tensor out, const std::vector<Pieces>& a, const at::Tensor& b);

// x^T as a contiguous tensor.
at::Tensor transposed(const at::Tensor& x);

}  // namespace lltm::cpu
