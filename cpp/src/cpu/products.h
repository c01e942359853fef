// Large matrix products of float32 or bfloat16 rows: by the micro-kernel where
// that is the faster way, else by public ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lltm::cpu {

// Of float matrices, products with `split` are those of split.h: they may throw
// Unsplittable, and need a matrix unit.

// A matrix (K, N) as the right operand of several products.
class RightOperand {
 public:
  RightOperand(const at::Tensor& b, bool split);

  // out (rows, N) = a b for a (rows, K); all of one dtype.
  void multiply(at::Tensor out, const at::Tensor& a) const;

 private:
  at::Tensor matrix_;
  template <typename G>
  void pack();
  template <typename G>
  void multiply_blocks(const at::Tensor& out, const at::Tensor& a) const;

  bool split_;
  at::Tensor packed_;  // for the micro-kernel, where that will do the work
};

// Matrices one below the other, all of one width.
using Pieces = std::vector<at::Tensor>;

// out (M, N) += a^T b for b (rows, N) and a (rows, M), which is given in parts
// side by side, each of them in pieces. For bfloat16 arguments, out is float32.
void add_transposed_product(at::Tensor out, const std::vector<Pieces>& a, const at::Tensor& b);

// a^T b again, summed up over several calls, by the products of split.h.
class TransposedSum {
 public:
  // The result (height, columns) is of float32, as everything here.
  TransposedSum(int64_t height, int64_t columns, const at::TensorOptions& options);

  // a^T b for b (rows, columns) and a (rows, height), in parts side by side.
  void add(const std::vector<at::Tensor>& a, const at::Tensor& b);

  at::Tensor result() const;

 private:
  int64_t columns_;
  at::Tensor sums_;  // each over some of the rows: (sums, bands of columns, height, columns)
};

// x^T as a contiguous tensor.
at::Tensor transposed(const at::Tensor& x);

}  // namespace lltm::cpu
