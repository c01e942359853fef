// float32 GEMM on a matrix unit that multiplies bfloat16 only (AMX): decomposition to
// bf16x3.
//
// A float is the sum of three bfloat16, each the bfloat16 nearest to what the ones before leave:
// three significands of 8 bits hold all 24 of a float's. Of the nine products of the parts of two
// factors, the six largest are accumulated in float32. The other three add up to at most 2^-23 of
// the product, so the result of numbers above 2^-103 is at least as accurate as that of a float32
// GEMM, in half the time (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence
// Datatype for Higher-Precision Computations, 2019).
//
// Two limits. An infinity cannot be decomposed, and where a product overflows, those of its
// parts may cancel to NaN: packing reports values from kBf16x3Limit on as out of range, and
// the engine falls back to float32. And AMX flushes what is below 2^-126, parts and products
// of parts, to zero: numbers below 2^-103 and products below 2^-102 lose digits.
//
// Part of the files per instruction set: no header of torch.
#pragma once

#include "common/matrix.h"

#include <cstdint>

namespace lltm::cpu {

// Storage of the three parts of one float. In memory, the parts of kBf16x3Group elements
// stand together, all first parts, then all second, then all third: a pointer to elements
// points to the first one of a group.
struct BFloat16x3 {
  std::uint16_t bits[3];
};
constexpr std::int64_t kBf16x3Group = 32;
constexpr float kBf16x3Limit = 0x1p60f;
// Columns of a panel of B: the width of a tile.
constexpr std::int64_t kBf16x3Panel = 16;

// A (M, K) is packed row by row, in whole groups, padded with zeros. B (K, N) is packed in
// panels of 16 columns, each in groups of 32 rows, those in pairs of rows:
// [column][row % 2].
//
// Elements from one row of A to the next: an odd number of groups, so that the rows of a
// tile do not compete for the same sets of the L1 cache.
constexpr std::int64_t bf16x3_row_stride(std::int64_t k) {
  return ((k + kBf16x3Group - 1) / kBf16x3Group | 1) * kBf16x3Group;
}

// Packs x (rows, columns), floats with contiguous rows, into y. y is rows of A, or panels of
// B: then row_stride is 16 K of all of B, even where x is a part of its rows. Returns whether
// all of x are in range: NaN or below kBf16x3Limit.
using PackBf16x3 =
    bool (*)(std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y);

struct Bf16x3Kernels {
  Gemm<BFloat16x3>* gemm;        // b.k is a multiple of 32, b.n of 16
  PackBf16x3 pack_a;             // x as A
  PackBf16x3 pack_a_transposed;  // x^T as A
  PackBf16x3 pack_b;             // x as B
  PackBf16x3 pack_b_transposed;  // x^T as B
};

}  // namespace lltm::cpu
