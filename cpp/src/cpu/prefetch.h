// Prefetching of strided memory or other threads' writes. No torch header.
#pragma once

#include "common/matrix.h"
#include "cpu/range.h"

#include <cstdint>

namespace lltm::cpu {

// Prefetches into L2, ahead of the GEMM.
template <typename Operand>
void prefetch_rows(Matrix<const Operand> operand, Range rows, int64_t k) {
  constexpr int64_t kLine = 64;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const auto* const row = reinterpret_cast<const char*>(operand.row(r));
    for (int64_t byte = 0; byte < k * static_cast<int64_t>(sizeof(Operand)); byte += kLine) {
      __builtin_prefetch(row + byte, /*write=*/0, /*locality=*/2);
    }
  }
}

}  // namespace lltm::cpu
