// The kernels of engine_few_rows.cpp, included by the files per instruction set:
// float32 weights, float64 state and sums.
#pragma once

#include "cell_math.h"
#include "cpu/pointwise.h"

#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace lltm::cpu {
namespace {

// A vector of floats, and its two halves as doubles.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
using Floats = __m512;
using Doubles = __m512d;
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}
#elif defined(__AVX__)
constexpr int kLanes = 8;
using Floats = __m256;
using Doubles = __m256d;
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}
#else
constexpr int kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(16)));
LLTM_CELL_INLINE Doubles widen_low(Floats x) {
  return Doubles{x[0], x[1]};
}
LLTM_CELL_INLINE Doubles widen_high(Floats x) {
  return Doubles{x[2], x[3]};
}
#endif
constexpr int kHalf = kLanes / 2;

LLTM_CELL_INLINE Floats load_floats_of(const float* x) {
  Floats floats;
  __builtin_memcpy(&floats, x, sizeof(floats));
  return floats;
}

template <typename A>
struct FewRowsProduct {
  std::int64_t columns, depth;
  const A* a;
  std::int64_t lda;
  const float* b;
  double* c;
  bool accumulate;
};

// Products of float operands that are added up in float32 before they go to the
// sum in float64: so few that their rounding errors stay far below those of a sum
// in float32, so many that widening them takes less time than reading the weights.
// Of more rows widening is more of the work.
template <int kRows>
constexpr std::int64_t kChain = kRows <= 2 ? 4 : 8;

// The sums of kRows rows and kVectors vectors of columns, as pairs of halves.
template <int kRows, int kVectors>
struct FewRowsSums {
  Doubles low[kRows][kVectors] = {};
  Doubles high[kRows][kVectors] = {};

  LLTM_CELL_INLINE void add(const FewRowsProduct<double>& p, const float* b, std::int64_t k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats weights = load_floats_of(b + v * kLanes);
      const Doubles weights_low = widen_low(weights);
      const Doubles weights_high = widen_high(weights);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        low[r][v] += p.a[r * p.lda + k] * weights_low;
        high[r][v] += p.a[r * p.lda + k] * weights_high;
      }
    }
  }

  // As many rows of b as a chain has, or fewer.
  LLTM_CELL_INLINE void add_chain(
      const FewRowsProduct<float>& p, const float* b, std::int64_t k, std::int64_t count) {
    Floats chain[kRows][kVectors] = {};
    for (std::int64_t j = 0; j < count; ++j, b += p.columns) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Floats weights = load_floats_of(b + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) chain[r][v] += p.a[r * p.lda + k + j] * weights;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        low[r][v] += widen_low(chain[r][v]);
        high[r][v] += widen_high(chain[r][v]);
      }
    }
  }

  LLTM_CELL_INLINE void add_all(const FewRowsProduct<double>& p, std::int64_t column) {
    const float* b = p.b + column;
    for (std::int64_t k = 0; k < p.depth; ++k, b += p.columns) add(p, b, k);
  }
  LLTM_CELL_INLINE void add_all(const FewRowsProduct<float>& p, std::int64_t column) {
    const float* b = p.b + column;
    std::int64_t k = 0;
    constexpr std::int64_t kCount = kChain<kRows>;
    for (; k + kCount <= p.depth; k += kCount, b += kCount * p.columns) add_chain(p, b, k, kCount);
    if (k < p.depth) add_chain(p, b, k, p.depth - k);
  }
};

// Columns from number `column` on; the first `skip` of them are left as they are.
template <int kRows, int kVectors, typename A>
LLTM_CELL_INLINE void multiply_few_rows_tile(
    const FewRowsProduct<A>& p, std::int64_t column, std::int64_t skip = 0) {
  FewRowsSums<kRows, kVectors> sums;
  sums.add_all(p, column);
  const auto store = [&](Doubles sum, double* c, std::int64_t first)
                         __attribute__((always_inline)) {
                           if (first <= 0) {
                             Doubles before = {};
                             if (p.accumulate) __builtin_memcpy(&before, c, sizeof(before));
                             sum += before;
                             __builtin_memcpy(c, &sum, sizeof(sum));
                             return;
                           }
                           double values[kHalf];
                           __builtin_memcpy(values, &sum, sizeof(sum));
                           for (std::int64_t j = first; j < kHalf; ++j)
                             c[j] = p.accumulate ? c[j] + values[j] : values[j];
                         };
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      double* const c = p.c + r * p.columns + column + v * kLanes;
      store(sums.low[r][v], c, skip);
      store(sums.high[r][v], c + kHalf, skip - kHalf);
    }
  }
}

template <int kRows, typename A>
LLTM_CELL_INLINE void multiply_few_rows_band(const FewRowsProduct<A>& p) {
  constexpr int kVectors = kRows == 1 ? 4 : 2;
  std::int64_t column = 0;
  for (; column + kVectors * kLanes <= p.columns; column += kVectors * kLanes) {
    multiply_few_rows_tile<kRows, kVectors>(p, column);
  }
  if (kVectors > 2 && column + 2 * kLanes <= p.columns) {
    multiply_few_rows_tile<kRows, 2>(p, column);
    column += 2 * kLanes;
  }
  if (column + kLanes <= p.columns) {
    multiply_few_rows_tile<kRows, 1>(p, column);
    column += kLanes;
  }
  const std::int64_t rest = p.columns - column;
  if (rest == 0) return;
  if (p.columns >= kLanes) {  // a whole vector that ends where the columns do
    multiply_few_rows_tile<kRows, 1>(p, p.columns - kLanes, kLanes - rest);
    return;
  }
  double sums[kRows][kLanes] = {};
  for (std::int64_t k = 0; k < p.depth; ++k) {
    for (int r = 0; r < kRows; ++r) {
      const double x = p.a[r * p.lda + k];
      for (std::int64_t j = 0; j < rest; ++j) sums[r][j] += x * p.b[k * p.columns + j];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    double* const c = p.c + r * p.columns;
    for (std::int64_t j = 0; j < rest; ++j) c[j] = p.accumulate ? c[j] + sums[r][j] : sums[r][j];
  }
}

template <typename A>
void multiply_few_rows(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const A* a,
    std::int64_t lda,
    const float* b,
    double* c,
    bool accumulate) {
  FewRowsProduct<A> p = {columns, depth, a, lda, b, c, accumulate};
  for (; rows >= 4; rows -= 4) {
    multiply_few_rows_band<4>(p);
    p.a += 4 * lda;
    p.c += 4 * columns;
  }
  if (rows == 3) multiply_few_rows_band<3>(p);
  if (rows == 2) multiply_few_rows_band<2>(p);
  if (rows == 1) multiply_few_rows_band<1>(p);
}

void forward_few_rows(const FewRowsArgs& a, std::int64_t rows) {
  constexpr std::int64_t kSome = 64;  // units at a time
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t first = 0; first < a.hidden; first += kSome) {
      const std::int64_t n = a.hidden - first < kSome ? a.hidden - first : kSome;
      const double* const z = a.gates.row(row) + first;
      double* const c = a.c.row(row) + first;
      double ignored[kSome];
      double* const h = a.h.data == nullptr ? ignored : a.h.row(row) + first;
      float* const h_next = a.h_next.row(row) + first;
      float zeros[3 * kSome] = {};
      const float* const bias = a.bias == nullptr ? zeros : a.bias + first;
      const std::int64_t bias_step = a.bias == nullptr ? kSome : a.bias_step;
      float unused[4 * kSome];
      const bool save = a.activations.data != nullptr;
      float* const saved = save ? a.activations.row(row) + first : unused;
      const std::int64_t step = save ? a.activations_step : kSome;
#pragma GCC ivdep
      for (std::int64_t j = 0; j < n; ++j) {
        const CellForward<double> y = cell_forward(
            z[j] + bias[j],
            z[j + a.gates_step] + bias[j + bias_step],
            z[j + 2 * a.gates_step] + bias[j + 2 * bias_step],
            c[j]);
        c[j] = y.c;
        h[j] = y.h;
        h_next[j] = static_cast<float>(y.h);
        saved[j] = static_cast<float>(y.i);
        saved[j + step] = static_cast<float>(y.o);
        saved[j + 2 * step] = static_cast<float>(y.g);
        saved[j + 3 * step] = static_cast<float>(y.tanh_c);
      }
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
