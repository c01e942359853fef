#include "cuda/engine/weight_gradients.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

namespace lltm::cuda {
namespace {

// A sum of K terms of random sign, rounded after each, has an error of about sqrt(K / 6) half
// epsilons of its own size, and one of terms of equal sign of sqrt(K) / 3: for 100,000 rows, some
// hundred half epsilons. cuBLAS may well add so, one row after another. The rule of accuracy
// (docs/accuracy.md) counts nothing below 4 epsilons, which is the error of products of 512 rows.
// Their sum is one of K / 512 terms: so that it adds little, it is a sum of sums of 32 products,
// which reaches the error of a product only after eight million rows.
constexpr int64_t kRowsPerProduct = 512, kProductsPerSum = 32;

// In 16 bits, and in TF32, the rounding of the factors is far above that of the sums, which are
// of float32.
bool is_sum_decisive(const Gemm& gemm, at::ScalarType dtype) {
  return dtype == at::kDouble || (dtype == at::kFloat && !gemm.uses_tf32());
}

}  // namespace

WeightGradientGemm::WeightGradientGemm(const Gemm& gemm, at::ScalarType dtype, const at::Tensor& c)
    : gemm_(gemm), c_(c) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  const bool in_pieces = is_sum_decisive(gemm, dtype);
  rows_per_product_ = in_pieces ? kRowsPerProduct : kAll;
  products_per_sum_ = in_pieces ? kProductsPerSum : kAll;
}

void WeightGradientGemm::add(
    const at::Tensor& a, int64_t a_row, const at::Tensor& b, int64_t b_row, int64_t rows) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = std::min(rows - done, rows_per_product_);
    add_product(operand_rows(a, a_row + done, count), operand_rows(b, b_row + done, count));
    done += count;
  }
}

// The first sum is C itself.
void WeightGradientGemm::add_product(const Operand& a, const Operand& b) {
  const bool is_first = products_ % products_per_sum_ == 0;
  if (is_first && products_ > 0) {
    if (sum_.defined()) {
      c_.add_(sum_);
    } else {
      sum_ = at::empty(c_.sizes(), c_.options());
    }
  }
  gemm_(transposed(a), b, result(sum_.defined() ? sum_ : c_), /*accumulate=*/!is_first);
  ++products_;
}

void WeightGradientGemm::finish() {
  if (products_ == 0) c_.zero_();
  if (sum_.defined()) c_.add_(sum_);
}

}  // namespace lltm::cuda
