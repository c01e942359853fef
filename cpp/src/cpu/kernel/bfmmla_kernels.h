// The bfloat16 GEMM for NEON with BF16. An instruction (BFMMLA) adds to 2 x 2 sums the products of
// two A rows and two B columns, four K elements each.
//
// A is packed in row pairs: with 64 columns or more, this costs at most 6 % of the instructions. B
// has the layout of all bfloat16 kernels (GemmBf16), so that prepacked weights fit every CPU: two
// zips per four columns produce the operands.
#pragma once

#include "common/matrix.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <cstdint>

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
namespace lltm::cpu {
namespace {

// A tile's 24 sums, four A and three B vectors fit in the registers.
constexpr int kBfmmlaPairs = 4, kBfmmlaVectors = 3;
// Rows and depth of A that are packed at a time (32 kB). A K pair has the bits of a float.
constexpr std::int64_t kBfmmlaRows = 32, kBfmmlaDepth = 256;

// C (rows, n) = A B, or +=, with k pairs.
struct BfmmlaTile {
  const float* a;  // vectors [pair of K pairs][row pair]
  const BFloat16* b;
  std::int64_t b_stride, k, n;
  Matrix<float> c;
  std::int64_t rows;
  bool accumulate;
};

LLTM_CELL_INLINE Floats load_pairs(const BFloat16* x, std::int64_t n) {
  Floats pairs = {};
  __builtin_memcpy(&pairs, x, n * sizeof(float));
  return pairs;
}

// [a0 a1, b0 b1] and [a2 a3, b2 b3].
LLTM_CELL_INLINE Floats low_halves(Floats a, Floats b) {
  return (Floats)vzip1q_f64((float64x2_t)a, (float64x2_t)b);
}
LLTM_CELL_INLINE Floats high_halves(Floats a, Floats b) {
  return (Floats)vzip2q_f64((float64x2_t)a, (float64x2_t)b);
}

// If kPartial, a vector of n < 4 columns.
template <int kPairs, int kVectors, bool kPartial>
__attribute__((noinline)) void bfmmla_tile(const BfmmlaTile& p) {
  static constexpr BFloat16 kZeros[kVectors * kLanes * 2] = {};
  Floats sums[kPairs][2 * kVectors] = {};
  const float* a = p.a;
  const BFloat16* b = p.b;
  for (int odd = 0; odd < 2; ++odd) {  // an odd last K pair is multiplied with a zero pair
    for (std::int64_t step = odd == 0 ? p.k / 2 : p.k % 2; step > 0; --step) {
      const BFloat16* const next = odd == 0 ? b + p.b_stride : kZeros;
      bfloat16x8_t rows[kPairs];
#pragma GCC unroll 4
      for (int r = 0; r < kPairs; ++r) rows[r] = (bfloat16x8_t)load_lanes(a + r * kLanes);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        const auto load = [&](const BFloat16* x) __attribute__((always_inline)) {
          return load_pairs(x + v * kLanes * 2, kPartial ? p.n : kLanes);
        };
        const Floats first = load(b), second = load(next);
        const auto low = (bfloat16x8_t)vzip1q_f32(first, second);
        const auto high = (bfloat16x8_t)vzip2q_f32(first, second);
#pragma GCC unroll 4
        for (int r = 0; r < kPairs; ++r) {
          sums[r][2 * v] = vbfmmlaq_f32(sums[r][2 * v], rows[r], low);
          sums[r][2 * v + 1] = vbfmmlaq_f32(sums[r][2 * v + 1], rows[r], high);
        }
      }
      a += kPairs * kLanes;
      b += 2 * p.b_stride;
    }
  }
  const Matrix<float> to = p.c;  // not changed by the stores
  const bool even = p.rows == 2 * kPairs;
  const auto store = [&]<bool kAccumulate>() __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < 2 * kPairs; ++r) {
      if (r + 1 == 2 * kPairs && !even) return;
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        const Floats left = sums[r / 2][2 * v], right = sums[r / 2][2 * v + 1];
        Floats row = r % 2 == 0 ? low_halves(left, right) : high_halves(left, right);
        float* const c = to.row(r) + v * kLanes;
        if constexpr (kPartial) {
          if (kAccumulate) row += load_first(c, p.n);
          store_first(row, c, p.n);
        } else {
          if (kAccumulate) row += load_lanes(c);
          store_lanes(row, c);
        }
      }
    }
  };
  p.accumulate ? store.template operator()<true>() : store.template operator()<false>();
}

template <int kVectors, bool kPartial = false>
constexpr void (*kBfmmlaTiles[kBfmmlaPairs])(const BfmmlaTile&) = {
    bfmmla_tile<1, kVectors, kPartial>,
    bfmmla_tile<2, kVectors, kPartial>,
    bfmmla_tile<3, kVectors, kPartial>,
    bfmmla_tile<4, kVectors, kPartial>};

// Two rows of k pairs, padded with zeros to a multiple of 4, to every `stride` elements in y.
LLTM_CELL_INLINE void pack_row_pair(
    const BFloat16* first, const BFloat16* second, std::int64_t k, std::int64_t stride, float* y) {
  for (std::int64_t j = 0; j < k; j += kLanes, y += 2 * stride) {
    const auto load = [&](const BFloat16* x) __attribute__((always_inline)) {
      return k - j < kLanes ? load_pairs(x + 2 * j, k - j) : load_pairs(x + 2 * j, kLanes);
    };
    const Floats a = load(first), b = load(second);
    store_lanes(low_halves(a, b), y);
    store_lanes(high_halves(a, b), y + stride);
  }
}

void gemm_bfmmla(
    std::int64_t m,
    Matrix<const BFloat16> a,
    PackedB<const BFloat16> b,
    Matrix<float> c,
    bool accumulate) {
  constexpr std::int64_t kRows = 2 * kBfmmlaPairs;
  alignas(64) float packed[kBfmmlaRows * kBfmmlaDepth];
  BfmmlaTile p;
  p.b_stride = 2 * b.ld;
  for (std::int64_t first = 0; first < m; first += kBfmmlaRows) {
    const std::int64_t rows = at_most(m - first, kBfmmlaRows);
    for (std::int64_t k = 0; k < b.k / 2; k += kBfmmlaDepth) {
      p.k = at_most(b.k / 2 - k, kBfmmlaDepth);
      p.accumulate = accumulate || k > 0;
      const auto row = [&](std::int64_t r) { return a.row(first + at_most(r, rows - 1)) + 2 * k; };
      for (std::int64_t r = 0; r < rows; r += 2) {
        const std::int64_t tile = r / kRows * kRows;
        const std::int64_t stride = at_most((rows - tile + 1) / 2, kBfmmlaPairs) * kLanes;
        float* const y = packed + tile * kBfmmlaDepth + (r - tile) / 2 * kLanes;
        pack_row_pair(row(r), row(r + 1), p.k, stride, y);
      }
      for (std::int64_t column = 0; column < b.n; column += p.n) {
        const std::int64_t vectors = at_most((b.n - column) / kLanes, kBfmmlaVectors);
        p.n = vectors > 0 ? vectors * kLanes : b.n - column;
        p.b = b.data + 2 * (k * b.ld + column);
        const auto* const tiles = vectors == 0   ? kBfmmlaTiles<1, true>
                                  : vectors == 1 ? kBfmmlaTiles<1>
                                  : vectors == 2 ? kBfmmlaTiles<2>
                                                 : kBfmmlaTiles<3>;
        for (std::int64_t r = 0; r < rows; r += kRows) {
          p.rows = at_most(rows - r, kRows);
          p.a = packed + r * kBfmmlaDepth;
          p.c = c.from(first + r, column);
          tiles[(p.rows - 1) / 2](p);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
#endif
