// bf16x3: float32 GEMM on AMX, which multiplies only bfloat16.
//
// Each of three bfloat16 parts is nearest to the remainder: their 8-bit significands hold all 24
// bits. The six largest of nine partial products are accumulated in float32; the others add up to
// at most 2^-23 of the product. Above 2^-103, the result is at least as accurate as a float32 GEMM,
// in half the time (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype
// for Higher-Precision Computations, 2019).
//
// Packing reports infinities and values whose partial products could overflow (kBf16x3Limit), and
// the engine falls back to float32. Tiny numbers lose digits (docs/architecture.md).
//
// No torch header.
#pragma once

#include "common/matrix.h"

#include <cstdint>

namespace lltm::cpu {

// A float's parts. Groups of kBf16x3Group elements are stored together: all first, second, then
// third parts. A pointer to elements points to a group's first.
struct BFloat16x3 {
  std::uint16_t bits[3];
};
constexpr std::int64_t kBf16x3Group = 32;
constexpr float kBf16x3Limit = 0x1p60f;
// Columns per B panel: a tile's width.
constexpr std::int64_t kBf16x3Panel = 16;

// A (M, K) has rows of complete groups, padded with zeros. B (K, N) has panels of 16 columns, whose
// groups are 32 rows as row pairs: [column][row % 2]. A's row stride is an odd number of groups, so
// that a tile's rows do not compete for L1 cache sets.
constexpr std::int64_t bf16x3_row_stride(std::int64_t k) {
  return ((k + kBf16x3Group - 1) / kBf16x3Group | 1) * kBf16x3Group;
}

// Packs x (rows, columns), with contiguous rows. For panels, row_stride is 16 K for the complete B,
// even if x has only some rows. True if all values are NaN or below kBf16x3Limit.
using PackBf16x3 =
    bool (*)(std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y);

struct Bf16x3Kernels {
  Gemm<BFloat16x3>* gemm;        // b.k is a multiple of 32, b.n a multiple of 16
  PackBf16x3 pack_a;             // A = x
  PackBf16x3 pack_a_transposed;  // A = x^T
  PackBf16x3 pack_b;             // B = x
  PackBf16x3 pack_b_transposed;  // B = x^T
};

}  // namespace lltm::cpu
