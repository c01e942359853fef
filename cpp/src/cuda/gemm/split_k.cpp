#include "cuda/gemm/split_k.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

namespace lltm::cuda {
namespace {

// If a sum of K terms is rounded after each addition, as cuBLAS may do, its relative error in half
// epsilons is about sqrt(K / 6) for random signs and sqrt(K) / 3 for equal signs: more than a
// hundred for 100,000 rows. The accuracy criterion (docs/accuracy.md) counts errors below 4
// epsilons as 4, the error of a GEMM over 512 rows. With two levels of sums, 32 GEMMs per partial
// sum, adding exceeds that error only after eight million rows.
constexpr int64_t kRowsPerProduct = 512, kProductsPerSum = 32;

// In 16 bits and TF32, rounding the factors causes far larger errors than float32 sums.
bool is_sum_decisive(const Gemm& gemm, at::ScalarType dtype) {
  return dtype == at::kDouble || (dtype == at::kFloat && !gemm.uses_tf32());
}

}  // namespace

SplitKGemm::SplitKGemm(const Gemm& gemm, at::ScalarType dtype, const at::Tensor& c)
    : gemm_(gemm), c_(c) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  const bool in_pieces = is_sum_decisive(gemm, dtype);
  rows_per_product_ = in_pieces ? kRowsPerProduct : kAll;
  products_per_sum_ = in_pieces ? kProductsPerSum : kAll;
}

void SplitKGemm::add(
    const at::Tensor& a, int64_t a_row, const at::Tensor& b, int64_t b_row, int64_t rows) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = std::min(rows - done, rows_per_product_);
    add_product(operand_rows(a, a_row + done, count), operand_rows(b, b_row + done, count));
    done += count;
  }
}

// The first partial sum is C itself.
void SplitKGemm::add_product(const GemmOperand& a, const GemmOperand& b) {
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

void SplitKGemm::finish() {
  if (products_ == 0) c_.zero_();
  if (sum_.defined()) c_.add_(sum_);
}

}  // namespace lltm::cuda
