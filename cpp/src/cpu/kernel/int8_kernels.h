#pragma once

#include "cpu/kernel/int8.h"
#include "cpu/kernel/tile.h"

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lltm::cpu {
namespace {

#if defined(__AVX512BW__)
constexpr int kInt8Lanes = 16;
#elif defined(__AVX2__)
constexpr int kInt8Lanes = 8;
#else
constexpr int kInt8Lanes = 4;
#endif
using Int8Sums = std::int32_t __attribute__((vector_size(4 * kInt8Lanes)));
using Int8Scales = float __attribute__((vector_size(4 * kInt8Lanes)));
constexpr int kInt8Vectors = kInt8Panel / kInt8Lanes;  // per panel

// Per lane: sums + the dot product of four unsigned bytes in a and four signed bytes in b.
#if defined(__AVX512VNNI__)
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Sums a, Int8Sums b) {
  return (Int8Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
}
#elif defined(__SSE2__)
// Without VNNI, the 8-bit instruction saturates: bytes 0 and 2, then 1 and 3, are multiplied in 16
// bits. The compiler hoists conversions from inner loops.
#if defined(__AVX512BW__)
#define LLTM_SIMD(name) _mm512_##name
using Int8Register = __m512i;
#elif defined(__AVX2__)
#define LLTM_SIMD(name) _mm256_##name
using Int8Register = __m256i;
#else
#define LLTM_SIMD(name) _mm_##name
using Int8Register = __m128i;
#endif
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Sums a, Int8Sums b) {
  const auto a_bytes = (Int8Register)a;
  const auto b_bytes = (Int8Register)b;
  const auto a_even = LLTM_SIMD(srli_epi16)(LLTM_SIMD(slli_epi16)(a_bytes, 8), 8);
  const auto a_odd = LLTM_SIMD(srli_epi16)(a_bytes, 8);
  const auto b_even = LLTM_SIMD(srai_epi16)(LLTM_SIMD(slli_epi16)(b_bytes, 8), 8);
  const auto b_odd = LLTM_SIMD(srai_epi16)(b_bytes, 8);
  return sums + (Int8Sums)LLTM_SIMD(madd_epi16)(a_even, b_even) +
         (Int8Sums)LLTM_SIMD(madd_epi16)(a_odd, b_odd);
}
#undef LLTM_SIMD
#elif defined(__aarch64__)
#if defined(__ARM_FEATURE_MATMUL_INT8)
using Int8Elements = uint8x8_t;
LLTM_CELL_INLINE Int8Elements elements_of(std::int32_t bytes) {
  return vreinterpret_u8_s32(int32x2_t{bytes});
}
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Elements a, Int8Sums b) {
  return vsudotq_lane_s32(sums, vreinterpretq_s8_s32(b), a, 0);
}
#elif defined(__ARM_FEATURE_DOTPROD)
using Int8Elements = int8x8_t;
LLTM_CELL_INLINE Int8Elements elements_of(std::int32_t bytes) {
  return veor_s8(vreinterpret_s8_s32(int32x2_t{bytes}), vdup_n_s8(-kInt8Offset));
}
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Elements a, Int8Sums b) {
  return vdotq_lane_s32(sums, vreinterpretq_s8_s32(b), a, 0);
}
#else
using Int8Elements = int8x16_t;
LLTM_CELL_INLINE Int8Elements elements_of(std::int32_t bytes) {
  return veorq_s8(vreinterpretq_s8_s32(vdupq_n_s32(bytes)), vdupq_n_s8(-kInt8Offset));
}
// Two products up to 127 * 127 fit in 16 bits.
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Elements a, Int8Sums b) {
  const int8x16_t bytes = vreinterpretq_s8_s32(b);
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(bytes));
  return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(a, bytes)));
}
#endif
#else
LLTM_CELL_INLINE Int8Sums dot(Int8Sums sums, Int8Sums a, Int8Sums b) {
  const Int8Sums low = {0xFF, 0xFF, 0xFF, 0xFF};
  for (int byte = 0; byte < 4; ++byte) {
    sums += ((a >> 8 * byte) & low) * ((b << (24 - 8 * byte)) >> 24);
  }
  return sums;
}
#endif

#if !defined(__aarch64__)
using Int8Elements = Int8Sums;
LLTM_CELL_INLINE Int8Elements elements_of(std::int32_t bytes) {
  return Int8Sums{} + bytes;
}
#endif
// A is used as stored, plus 128. If the instruction multiplies only signed bytes, 128 is subtracted
// from A instead of from the sums.
#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kInt8OffsetInSums = false;
#else
constexpr bool kInt8OffsetInSums = true;
#endif

// Sums, a weight vector and A elements fit in the registers.
#if defined(__AVX512VNNI__)
constexpr int kInt8Rows = 6;
constexpr int kInt8Panels = 4;
constexpr int kInt8PanelsOfOneRow = 8;
#elif defined(__AVX512BW__)
constexpr int kInt8Rows = 4;
constexpr int kInt8Panels = 4;
constexpr int kInt8PanelsOfOneRow = 8;
#else
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kInt8Rows = 6;
#else
constexpr int kInt8Rows = 4;
#endif
constexpr int kInt8Panels = 1;
constexpr int kInt8PanelsOfOneRow = 2;
#endif

struct Int8Gemm {
  Matrix<const Int8> a;
  const Int8* panels;
  std::int64_t panel_bytes, depth;
  Matrix<float> c;
  bool accumulate;
};

template <typename T>
LLTM_CELL_INLINE T load_as(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

struct Int8ColumnScales {
  Int8Scales scale;
  Int8Sums offset;
};
LLTM_CELL_INLINE Int8ColumnScales column_scales(const Int8Gemm& p, std::int64_t panel, int v) {
  const Int8* const scales =
      p.panels + panel * p.panel_bytes + p.depth * kInt8Panel + v * std::int64_t{sizeof(Int8Sums)};
  const Int8* const offsets = scales + kInt8Panel * std::int64_t{sizeof(float)};
  return {load_as<Int8Scales>(scales), load_as<Int8Sums>(offsets)};
}

// Stores row r from `column` on. All kernels share this expression, so that results do not depend
// on the row count.
LLTM_CELL_INLINE void store_scaled(
    const Int8Gemm& p,
    std::int64_t r,
    std::int64_t column,
    const Int8Sums& sums,
    const Int8ColumnScales& columns) {
  const auto scale_of_row = load_as<float>(p.a.row(r) + p.depth);
  float* const c = p.c.row(r) + column;
  const Int8Sums sum = kInt8OffsetInSums ? sums - columns.offset : sums;
  const Int8Scales before = p.accumulate ? load_as<Int8Scales>(c) : Int8Scales{};
  const Int8Scales y =
      __builtin_convertvector(sum, Int8Scales) * (scale_of_row * columns.scale) + before;
  __builtin_memcpy(c, &y, sizeof(y));
}

template <int kRows, int kPanels>
LLTM_CELL_INLINE void gemm_int8_tile(const Int8Gemm& p, std::int64_t panel) {
  constexpr int kVectors = kPanels * kInt8Vectors;
  constexpr std::int64_t kBytes = sizeof(Int8Sums);
  Int8Sums sums[kRows][kVectors] = {};
  const Int8* const b = p.panels + panel * p.panel_bytes;
  const auto vector_of = [&](int v, std::int64_t byte) {
    return b + v / kInt8Vectors * p.panel_bytes + byte + v % kInt8Vectors * kBytes;
  };
  for (std::int64_t k = 0; k < p.depth; k += kInt8Group) {
    Int8Elements elements[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      elements[r] = elements_of(load_as<std::int32_t>(p.a.row(r) + k));
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const auto weights = load_as<Int8Sums>(vector_of(v, k * kInt8Panel));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = dot(sums[r][v], elements[r], weights);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const auto columns = column_scales(p, panel + v / kInt8Vectors, v % kInt8Vectors);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      store_scaled(p, r, panel * kInt8Panel + v * kInt8Lanes, sums[r][v], columns);
    }
  }
}

template <int kRows, int kPanels>
LLTM_CELL_INLINE void gemm_int8_band(
    const Int8Gemm& p, std::int64_t panels, std::int64_t first = 0) {
  for (; first + kPanels <= panels; first += kPanels) gemm_int8_tile<kRows, kPanels>(p, first);
  if constexpr (kPanels > 1) {
    if (first < panels) gemm_int8_band<kRows, kPanels / 2>(p, panels, first);
  }
}

template <int kRows>
LLTM_CELL_INLINE void gemm_int8_rest(const Int8Gemm& p, std::int64_t m, std::int64_t panels) {
  if constexpr (kRows > 0) {
    if (m == kRows) {
      gemm_int8_band<kRows, kRows == 1 ? kInt8PanelsOfOneRow : kInt8Panels>(p, panels);
    } else {
      gemm_int8_rest<kRows - 1>(p, m, panels);
    }
  }
}

void gemm_int8(
    std::int64_t m, Matrix<const Int8> a, PackedB<const Int8> b, Matrix<float> c, bool accumulate) {
  Int8Gemm p = {a, b.data, b.k * kInt8Panel, b.k - kInt8ColumnBytes, c, accumulate};
  while (m > 0) {
    const std::int64_t rows = at_most(m, kInt8Rows);
    gemm_int8_rest<kInt8Rows>(p, rows, b.n / kInt8Panel);
    p.a = p.a.from(rows);
    p.c = p.c.from(rows);
    m -= rows;
  }
}

// Rounds ties to even and adds kInt8Offset, for |x| <= kInt8Largest.
LLTM_CELL_INLINE Int8 quantize(float x) {
  // With 1.5 * 2^23 added, the last place is 1, and the low byte is the integer.
  const float sum = x + (0x1.8p23f + static_cast<float>(kInt8Offset));
  return {static_cast<std::uint8_t>(math::bit_cast<std::uint32_t>(sum))};
}

bool pack_int8(std::int64_t m, std::int64_t k, Matrix<const float> x, Matrix<Int8> a, float least) {
  // Finite magnitudes compare as bits.
  constexpr std::uint32_t kInfinity = 0x7F800000u;
  // Smaller rows are zero: 1 / largest could overflow.
  constexpr float kSmallest = 0x1p-100f;
  for (std::int64_t r = 0; r < m; ++r) {
    const float* const from = x.row(r);
    std::uint32_t most = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const std::uint32_t magnitude = math::bit_cast<std::uint32_t>(from[j]) & 0x7FFFFFFFu;
      most = magnitude > most ? magnitude : most;
    }
    if (most >= kInfinity) return false;
    const float magnitude = math::bit_cast<float>(most);
    const float largest = magnitude < least ? least : magnitude;
    const bool zero = largest < kSmallest;
    const float factor = zero ? 0.0f : kInt8Largest / largest;
    const float scale = zero ? 0.0f : largest / kInt8Largest;
    Int8* const to = a.row(r);
    for (std::int64_t j = 0; j < k; ++j) {
      const float value = from[j] * factor;  // rounded upward, the largest can become 128
      to[j] = quantize(value < kInt8Largest ? value : kInt8Largest);
    }
    __builtin_memcpy(to + int8_depth(k), &scale, sizeof(scale));
  }
  return true;
}

constexpr Int8Kernels kInt8Kernels = {gemm_int8, pack_int8};

}  // namespace
}  // namespace lltm::cpu
