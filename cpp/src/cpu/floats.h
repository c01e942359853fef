// A vector of floats of the instruction set that a file is compiled for.
#pragma once

#include "cell_math.h"

#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace lltm::cpu {
namespace {

#if defined(__AVX512F__)
using Floats = __m512;
#elif defined(__AVX__)
using Floats = __m256;
#else
using Floats = float __attribute__((vector_size(16)));
#endif
constexpr int kLanes = sizeof(Floats) / sizeof(float);

LLTM_CELL_INLINE Floats load_lanes(const float* x) {
  Floats floats;
  __builtin_memcpy(&floats, x, sizeof(floats));
  return floats;
}

LLTM_CELL_INLINE void store_lanes(Floats floats, float* x) {
  __builtin_memcpy(x, &floats, sizeof(floats));
}

LLTM_CELL_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX__)
  return _mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
LLTM_CELL_INLINE __m256i first_lanes(std::int64_t n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes);
}
#endif

// The first `n` elements of x, fewer than a vector; the others zero.
LLTM_CELL_INLINE Floats load_first(const float* x, std::int64_t n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(x, first_lanes(n));
#else
  Floats floats = {};
  for (std::int64_t j = 0; j < n; ++j) floats[j] = x[j];
  return floats;
#endif
}

// The other way round.
LLTM_CELL_INLINE void store_first(Floats floats, float* x, std::int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(x, static_cast<__mmask16>((1u << n) - 1), floats);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(x, first_lanes(n), floats);
#else
  for (std::int64_t j = 0; j < n; ++j) x[j] = floats[j];
#endif
}

}  // namespace
}  // namespace lltm::cpu
