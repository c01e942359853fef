// 16 x 16 float tiles transposed in registers, and prefetching.
#pragma once

#include "cell/math.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

LLTM_CELL_INLINE std::int64_t at_most(std::int64_t n, std::int64_t most) {
  return n < most ? n : most;
}

using Vector = float __attribute__((vector_size(64)));
using Indices = std::int32_t __attribute__((vector_size(64)));
constexpr std::int64_t kTile = 16;

// result[j] = element from[j] in the 32 elements a, b; `from` is a constant.
LLTM_CELL_INLINE void shuffle(
    Vector& result, const Vector& a, const Vector& b, const Indices& from) {
#if defined(__clang__)
  for (std::int64_t j = 0; j < kTile; ++j) {
    result[j] = from[j] < kTile ? a[from[j]] : b[from[j] - kTile];
  }
#else
  result = __builtin_shuffle(a, b, from);
#endif
}

// Exchanges parts of rows that are kDistance apart.
template <std::int64_t kDistance>
LLTM_CELL_INLINE void exchange(Vector (&tile)[kTile]) {
  Indices low, high;
  for (std::int32_t j = 0; j < kTile; ++j) {
    const bool second = (j & kDistance) != 0;
    low[j] = second ? 16 + (j - kDistance) : j;
    high[j] = second ? 16 + j : j + kDistance;
  }
  for (std::int64_t i = 0; i < kTile; ++i) {
    if ((i & kDistance) != 0) continue;
    const Vector a = tile[i];
    const Vector b = tile[i + kDistance];
    shuffle(tile[i], a, b, low);
    shuffle(tile[i + kDistance], a, b, high);
  }
}

LLTM_CELL_INLINE void transpose_tile(Vector (&tile)[kTile]) {
  exchange<1>(tile);
  exchange<2>(tile);
  exchange<4>(tile);
  exchange<8>(tile);
}

// The hardware prefetcher does not follow large strides. Prefetching past a matrix is harmless.
template <typename T>
LLTM_CELL_INLINE void fetch_ahead(const T* x, std::int64_t n) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t j = 0; j < n; j += kLine) __builtin_prefetch(x + j);
}

}  // namespace
}  // namespace lltm::cpu
