// bf16x3: float32 GEMM on AMX, which multiplies only bfloat16.
//
// A float32 is decomposed into the sum of three bfloat16. Each part is the bfloat16 nearest to the
// remainder, so the three 8-bit significands hold all 24 bits. Two factors have nine partial
// products. The six largest are accumulated in float32, the other three add up to at most 2^-23 of
// the product. For numbers above 2^-103, the result is therefore at least as accurate as a float32
// GEMM, in half the time (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence
// Datatype for Higher-Precision Computations, 2019).
//
// Limits:
// - Infinity cannot be decomposed, and if a product overflows, its partial products can cancel to
//   NaN. Packing therefore reports values from kBf16x3Limit on as out of range, and the engine
//   falls back to float32.
// - AMX flushes parts and partial products below 2^-126 to zero. Numbers below 2^-103 and products
//   below 2^-102 lose digits.
//
// Included by the files per instruction set: no torch header.
#pragma once

#include "common/matrix.h"

#include <cstdint>

namespace lltm::cpu {

// Storage for a float's three parts. In memory, kBf16x3Group elements are stored together: all
// first parts, then all second parts, then all third parts. A pointer to elements points to a
// group's first element.
struct BFloat16x3 {
  std::uint16_t bits[3];
};
constexpr std::int64_t kBf16x3Group = 32;
constexpr float kBf16x3Limit = 0x1p60f;
// Columns per B panel: a tile's width.
constexpr std::int64_t kBf16x3Panel = 16;

// A (M, K) is packed row by row, in complete groups, padded with zeros. B (K, N) is packed in
// panels with 16 columns. A panel consists of groups with 32 rows, each stored as row pairs:
// [column][row % 2].
//
// Returns A's row stride in elements: an odd number of groups, so that the rows in a tile do not
// compete for the same L1 cache sets.
constexpr std::int64_t bf16x3_row_stride(std::int64_t k) {
  return ((k + kBf16x3Group - 1) / kBf16x3Group | 1) * kBf16x3Group;
}

// Packs x (rows, columns), floats with contiguous rows, into y: A rows or B panels. For panels,
// row_stride is 16 K for the complete B, even if x has only some of its rows. Returns true if all
// values are in range: NaN or below kBf16x3Limit.
using PackBf16x3 =
    bool (*)(std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y);

struct Bf16x3Kernels {
  Gemm<BFloat16x3>* gemm;        // b.k is a multiple of 32, b.n a multiple of 16
  PackBf16x3 pack_a;             // x as A
  PackBf16x3 pack_a_transposed;  // x^T as A
  PackBf16x3 pack_b;             // x as B
  PackBf16x3 pack_b_transposed;  // x^T as B
};

}  // namespace lltm::cpu
