#pragma once

#include "cell/cell.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cpu {
namespace {

#if defined(__AVX512F__)
using Doubles = __m512d;
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}
LLTM_CELL_INLINE Floats narrow_halves(Doubles low, Doubles high) {
  const Floats first = _mm512_castps256_ps512(_mm512_cvtpd_ps(low));
  return _mm512_insertf32x8(first, _mm512_cvtpd_ps(high), 1);
}
#elif defined(__AVX__)
using Doubles = __m256d;
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}
LLTM_CELL_INLINE Floats narrow_halves(Doubles low, Doubles high) {
  return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
}
#elif defined(__aarch64__)
using Doubles = float64x2_t;
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return vcvt_f64_f32(vget_low_f32(x));
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return vcvt_high_f64_f32(x);
}
LLTM_CELL_INLINE Floats narrow_halves(Doubles low, Doubles high) {
  return vcvt_high_f32_f64(vcvt_f32_f64(low), high);
}
#else
using Doubles = double __attribute__((vector_size(16)));
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return Doubles{x[0], x[1]};
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return Doubles{x[2], x[3]};
}
LLTM_CELL_INLINE Floats narrow_halves(Doubles low, Doubles high) {
  return Floats{float(low[0]), float(low[1]), float(high[0]), float(high[1])};
}
#endif

struct SmallBatchGemm {
  Matrix<const float> a;
  PackedB<const float> b;
  Matrix<float> c;
  bool accumulate;
};

// Products are summed in float32, in kChains chains of kChain, whose sum is added to float64
// accumulators: rounding errors stay far below a float32 GEMM's, and widening takes little time.
constexpr std::int64_t kChain = 8, kChains = 4, kRowsOfB = kChain * kChains;
// Prefetch distance in B rows.
constexpr std::int64_t kFetchedAhead = 16;

// Columns from `column` on. The last vector begins at column + last_vector.
template <int kRows, int kVectors>
struct SmallBatchTile {
  using Sums = Floats[kRows][kVectors];

  const SmallBatchGemm& p;
  std::int64_t column, last_vector;

  // Adds the products of B rows [k, last).
  LLTM_CELL_INLINE void add_products(std::int64_t k, std::int64_t last, Sums& sums) const {
    const float* b = p.b.data + k * p.b.n + column;
#pragma GCC unroll 8
    for (; k < last; ++k, b += p.b.n) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const float* const from = b + (v + 1 < kVectors ? v * kLanes : last_vector);
        const Floats weights = load_lanes(from);
        // A single row is limited by loads and gains nothing from prefetching.
        if (kRows > 1 && v % kVectorsOfLine == 0) __builtin_prefetch(from + kFetchedAhead * p.b.n);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[r][v] += p.a.row(r)[k] * weights;
      }
    }
  }

  // Adds chains of at most `longest` products.
  LLTM_CELL_INLINE void add_chains(
      std::int64_t k, std::int64_t last, std::int64_t longest, Sums& sums) const {
    while (k < last) {
      Sums chain = {};
      const std::int64_t end = k + at_most(last - k, longest);
      add_products(k, end, chain);
      k = end;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] += chain[r][v];
      }
    }
  }
};

template <int kRows, int kVectors>
struct Float64Accumulators {
  Doubles low[kRows][kVectors] = {};
  Doubles high[kRows][kVectors] = {};

  LLTM_CELL_INLINE void add_all(const SmallBatchTile<kRows, kVectors>& tile) {
    for (std::int64_t k = 0; k < tile.p.b.k; k += kRowsOfB) {
      Floats sums[kRows][kVectors] = {};
      tile.add_chains(k, k + at_most(tile.p.b.k - k, kRowsOfB), kChain, sums);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          low[r][v] += widen_low(sums[r][v]);
          high[r][v] += widen_high(sums[r][v]);
        }
      }
    }
  }

  // Plus C, unless null.
  LLTM_CELL_INLINE Floats total(int r, int v, const float* c) const {
    Doubles first = low[r][v], second = high[r][v];
    if (c != nullptr) {
      first += widen_low(load_lanes(c));
      second += widen_high(load_lanes(c));
    }
    return narrow_halves(first, second);
  }
};

// The chains of a float32 GEMM (formats.h).
template <int kRows, int kVectors>
struct Float32Accumulators {
  Floats sums[kRows][kVectors] = {};

  LLTM_CELL_INLINE void add_all(const SmallBatchTile<kRows, kVectors>& tile) {
    tile.add_chains(0, tile.p.b.k, kRowsOfB, sums);
  }

  LLTM_CELL_INLINE Floats total(int r, int v, const float* c) const {
    return c != nullptr ? load_lanes(c) + sums[r][v] : sums[r][v];
  }
};

// The last vector ends at the last column if the tile is wider than the rest.
template <template <int, int> typename Accumulators, int kRows, int kVectors>
LLTM_CELL_INLINE void gemm_small_batch_tile(const SmallBatchGemm& p, std::int64_t column) {
  constexpr int kLast = kVectors - 1;
  const std::int64_t last_vector = at_most(kLast * kLanes, p.b.n - kLanes - column);
  Accumulators<kRows, kVectors> sums;
  sums.add_all({p, column, last_vector});
  const std::int64_t skip = kLast * kLanes - last_vector;  // columns of the vector before
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* const c = p.c.row(r) + column;
    const auto total = [&](int v, const float* to) __attribute__((always_inline)) {
      return sums.total(r, v, p.accumulate ? to : nullptr);
    };
#pragma GCC unroll 8
    for (int v = 0; v < kLast; ++v) store_lanes(total(v, c + v * kLanes), c + v * kLanes);
    const Floats last = total(kLast, c + last_vector);
    if (skip == 0) {
      store_lanes(last, c + last_vector);
    } else {
      float values[kLanes];
      store_lanes(last, values);
      for (std::int64_t j = skip; j < kLanes; ++j) c[last_vector + j] = values[j];
    }
  }
}

template <template <int, int> typename Accumulators, int kRows, int kVectors>
LLTM_CELL_INLINE void gemm_small_batch_rest(const SmallBatchGemm& p, std::int64_t column) {
  if (p.b.n - column > (kVectors - 1) * kLanes) {
    gemm_small_batch_tile<Accumulators, kRows, kVectors>(p, column);
  } else if constexpr (kVectors > 1) {
    gemm_small_batch_rest<Accumulators, kRows, kVectors - 1>(p, column);
  }
}

template <template <int, int> typename Accumulators, int kRows>
LLTM_CELL_INLINE void gemm_small_batch_band(const SmallBatchGemm& p) {
  // At least eight sums hide the multiply-add latency.
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : kRows == 3 ? 3 : 2;
  if (p.b.n >= kLanes) {
    std::int64_t column = 0;
    for (; p.b.n - column > kVectors * kLanes; column += kVectors * kLanes) {
      gemm_small_batch_tile<Accumulators, kRows, kVectors>(p, column);
    }
    return gemm_small_batch_rest<Accumulators, kRows, kVectors>(p, column);
  }
  double sums[kRows][kLanes] = {};
  for (std::int64_t k = 0; k < p.b.k; ++k) {
    for (int r = 0; r < kRows; ++r) {
      const double x = p.a.row(r)[k];
      for (std::int64_t j = 0; j < p.b.n; ++j) sums[r][j] += x * p.b.data[k * p.b.n + j];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* const c = p.c.row(r);
    for (std::int64_t j = 0; j < p.b.n; ++j) {
      c[j] = static_cast<float>(p.accumulate ? c[j] + sums[r][j] : sums[r][j]);
    }
  }
}

template <template <int, int> typename Accumulators>
void gemm_small_batch(
    std::int64_t m,
    Matrix<const float> a,
    PackedB<const float> b,
    Matrix<float> c,
    bool accumulate) {
  SmallBatchGemm p = {a, b, c, accumulate};
  for (; m >= 4; m -= 4) {
    gemm_small_batch_band<Accumulators, 4>(p);
    p.a = p.a.from(4);
    p.c = p.c.from(4);
  }
  if (m == 3) gemm_small_batch_band<Accumulators, 3>(p);
  if (m == 2) gemm_small_batch_band<Accumulators, 2>(p);
  if (m == 1) gemm_small_batch_band<Accumulators, 1>(p);
}

// Adds halves: rounding errors grow with the additions per element.
LLTM_CELL_INLINE float sum_of(Floats x) {
  float values[kLanes];
  __builtin_memcpy(values, &x, sizeof(x));
#pragma GCC unroll 8
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int j = 0; j < width; ++j) values[j] += values[j + width];
  }
  return values[0];
}

// Four vectors share the last additions.
#if defined(__AVX__)
LLTM_CELL_INLINE __m128 sum_to_quarter(Floats x) {
#if defined(__AVX512F__)
  const __m256 half = _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
#else
  const __m256 half = x;
#endif
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}
LLTM_CELL_INLINE void sums_of_four(const Floats (&x)[4], float* sums) {
  __m128 q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) q[i] = sum_to_quarter(x[i]);
  const __m128 first = _mm_movelh_ps(q[0], q[1]) + _mm_movehl_ps(q[1], q[0]);
  const __m128 second = _mm_movelh_ps(q[2], q[3]) + _mm_movehl_ps(q[3], q[2]);
  const __m128 even = _mm_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0));
  const __m128 odd = _mm_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1));
  _mm_storeu_ps(sums, even + odd);
}
#elif defined(__aarch64__)
LLTM_CELL_INLINE Floats sums_of_halves(Floats x, Floats y) {
  const auto a = vreinterpretq_f64_f32(x), b = vreinterpretq_f64_f32(y);
  return vreinterpretq_f32_f64(vzip1q_f64(a, b)) + vreinterpretq_f32_f64(vzip2q_f64(a, b));
}
LLTM_CELL_INLINE void sums_of_four(const Floats (&x)[4], float* sums) {
  store_lanes(vpaddq_f32(sums_of_halves(x[0], x[1]), sums_of_halves(x[2], x[3])), sums);
}
#else
LLTM_CELL_INLINE void sums_of_four(const Floats (&x)[4], float* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = sum_of(x[i]);
}
#endif

// Limit per lane and chain; rounding errors grow with it.
constexpr std::int64_t kLaneChain = 16;

// Dot products between kRows rows in A and kColumns rows in B from row n on, along B's rows.
template <int kRows, int kColumns, typename B>
LLTM_CELL_INLINE void gemm_in_place_tile(const InPlaceGemm<B>& p, std::int64_t n) {
  constexpr int kSums = kRows * kColumns;
  Floats sums[kSums] = {};
  Floats chain[kSums] = {};
  const auto end_chain = [&] {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      sums[i] += chain[i];
      chain[i] = Floats{};
    }
  };
  for (const auto& term : p.terms) {
    const auto add = [&](const auto& load, std::int64_t k) {
      Floats a[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) a[r] = load(term.a.row(r) + k);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) {
        const Floats b = load(term.b.row(n + j) + k);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) chain[r * kColumns + j] += a[r] * b;
      }
    };
    const std::int64_t whole = term.k / kLanes * kLanes;
    for (std::int64_t k = 0; k < whole;) {
      const std::int64_t end = k + at_most(whole - k, kLaneChain * kLanes);
      for (; k < end; k += kLanes) add([](const auto* x) { return load_lanes(x); }, k);
      if (k < whole) end_chain();
    }
    const std::int64_t rest = term.k - whole;
    if (rest > 0) add([&](const auto* x) { return load_first(x, rest); }, whole);
  }
  end_chain();
  float totals[kSums];
#pragma GCC unroll 8
  for (int i = 0; i + 4 <= kSums; i += 4) {
    sums_of_four({sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}, totals + i);
  }
#pragma GCC unroll 4
  for (int i = kSums / 4 * 4; i < kSums; ++i) totals[i] = sum_of(sums[i]);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* const c = p.c.row(r) + n;
    const float* const total = totals + r * kColumns;
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) c[j] = p.accumulate ? c[j] + total[j] : total[j];
  }
}

template <int kRows, typename B>
LLTM_CELL_INLINE void gemm_in_place_rows(const InPlaceGemm<B>& p) {
  // As many sums as fit in registers, with a vector per A row and a B vector.
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int kRegisters = 32;
#else
  constexpr int kRegisters = 16;
#endif
  constexpr int kColumns = kRows == 1 ? 8 : 5 * kRows < kRegisters ? 4 : 2;
  std::int64_t n = 0;
  for (; n + kColumns <= p.n; n += kColumns) gemm_in_place_tile<kRows, kColumns>(p, n);
  for (; n < p.n; ++n) gemm_in_place_tile<kRows, 1>(p, n);
}

template <typename B>
void gemm_in_place(std::int64_t m, const InPlaceGemm<B>& p) {
  switch (m) {
    case 1:
      return gemm_in_place_rows<1>(p);
    case 2:
      return gemm_in_place_rows<2>(p);
    case 3:
      return gemm_in_place_rows<3>(p);
    default:
      return gemm_in_place_rows<4>(p);
  }
}

template <typename Definition>
using SmallBatchNumber = std::conditional_t<Definition::kCell.forgets, float, double>;

// n values of kTile, in place or in `buffer`, which is zero.
LLTM_CELL_INLINE const float* tile_of(const float* x, std::int64_t n, float (&buffer)[kTile]) {
  if (n == kTile) return x;
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < kTile; j += kLanes) {
    const std::int64_t rest = n - j;
    if (rest >= kLanes) store_lanes(load_lanes(x + j), buffer + j);
    if (rest > 0 && rest < kLanes) store_lanes(load_first(x + j, rest), buffer + j);
  }
  return buffer;
}

// Units [first, first + n) of a row, at most kTile.
template <typename Definition>
LLTM_CELL_INLINE void forward_small_batch_tile(
    const SmallBatchArgs& a, std::int64_t row, std::int64_t first, std::int64_t n) {
  using Number = SmallBatchNumber<Definition>;
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  const bool save = a.saved.data != nullptr;
  float in_z[kSlots][kTile] = {}, in_bias[kSlots][kTile] = {}, out_saved[kSaved][kTile],
        out_h[kTile];
  double tail_c[kTile] = {};
  const float *z[kSlots], *bias[kSlots];
  float* saved[kSaved];
  LLTM_UNROLL
  for (int k = 0; k < kSlots; ++k) {
    z[k] = tile_of(a.z.row(row) + first + k * a.z_stride, n, in_z[k]);
    bias[k] = a.bias == nullptr ? in_bias[k]
                                : tile_of(a.bias + first + k * a.layer_hidden, n, in_bias[k]);
  }
  double* const c = a.c.row(row) + first;
  float* const h_next = a.h_next.row(row) + first;
  const bool whole = n == kTile;
  double* const c_next = whole ? c : tail_c;
  if (!whole) __builtin_memcpy(tail_c, c, n * sizeof(double));
  float* const h = whole ? h_next : out_h;
  LLTM_UNROLL
  for (int k = 0; k < kSaved; ++k) {
    saved[k] = whole && save ? a.saved.row(row) + first + k * a.layer_hidden : out_saved[k];
  }
  LLTM_INDEPENDENT
#pragma GCC unroll 1
  for (std::int64_t j = 0; j < kTile; ++j) {
    Number z_j[kSlots];
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) z_j[k] = Number{z[k][j]} + bias[k][j];
    const auto y = Definition::forward(z_j, static_cast<Number>(c_next[j]));
    c_next[j] = y.c;
    h[j] = static_cast<float>(y.h);
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) saved[k][j] = static_cast<float>(y.saved[k]);
  }
  if (whole) return;
  __builtin_memcpy(c, tail_c, n * sizeof(double));
  __builtin_memcpy(h_next, out_h, n * sizeof(float));
  for (int k = 0; save && k < kSaved; ++k) {
    float* const to = a.saved.row(row) + first + k * a.layer_hidden;
    __builtin_memcpy(to, out_saved[k], n * sizeof(float));
  }
}

template <typename Definition>
void forward_small_batch(const SmallBatchArgs& a, std::int64_t rows) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t first = 0; first < a.hidden; first += kTile) {
      forward_small_batch_tile<Definition>(a, row, first, at_most(a.hidden - first, kTile));
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
