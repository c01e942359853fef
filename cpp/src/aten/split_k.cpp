#include "aten/split_k.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace lltm {

SplitKGemm::SplitKGemm(const DeviceGemm& gemm, const SumLimits& limits, at::Tensor c)
    : gemm_(gemm), limits_(limits), c_(std::move(c)) {}

void SplitKGemm::add(
    const at::Tensor& a, int64_t a_row, const at::Tensor& b, int64_t b_row, int64_t rows) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = std::min(rows - done, limits_.products_per_gemm);
    const GemmOperand left = operand_rows(a, a_row + done, count);
    if (b.scalar_type() == gemm_.dtype()) {
      add_product(left, operand_rows(b, b_row + done, count));
    } else {
      add_product(left, operand(b.narrow(0, b_row + done, count).to(gemm_.dtype())));
    }
    done += count;
  }
}

// The first partial sum is C itself.
void SplitKGemm::add_product(const GemmOperand& a, const GemmOperand& b) {
  const bool is_first = gemms_ % limits_.gemms_per_sum == 0;
  if (is_first && gemms_ > 0) {
    if (sum_.defined()) {
      c_.add_(sum_);
    } else {
      sum_ = at::empty(c_.sizes(), c_.options());
    }
  }
  gemm_(transposed(a), b, result(sum_.defined() ? sum_ : c_), /*accumulate=*/!is_first);
  ++gemms_;
}

void SplitKGemm::finish() {
  if (gemms_ == 0) c_.zero_();
  if (sum_.defined()) c_.add_(sum_);
}

}  // namespace lltm
