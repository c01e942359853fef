#pragma once

#include "cell/math.h"
#include "cpu/kernel/elementwise.h"

#include <cstdint>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lltm::cpu {
namespace {

template <typename To, typename From>
LLTM_CELL_INLINE To bits(From from) {
  return math::bit_cast<To>(from);
}

LLTM_CELL_INLINE double widen(double x) {
  return x;
}
LLTM_CELL_INLINE float widen(float x) {
  return x;
}
LLTM_CELL_INLINE float widen(BFloat16 x) {
  return bits<float>(std::uint32_t{x.bits} << 16);
}

LLTM_CELL_INLINE float widen(Half x) {
#if defined(__aarch64__)
  return __builtin_bit_cast(__fp16, x.bits);
#else
  const std::uint32_t sign = std::uint32_t{x.bits} >> 15 << 31;
  const std::uint32_t magnitude = (x.bits & std::uint32_t{0x7FFF}) << 13;
  // As a float, the magnitude is 2^112 too small, also if subnormal.
  const std::uint32_t finite = bits<std::uint32_t>(bits<float>(magnitude) * 0x1p112f);
  const std::uint32_t special = magnitude | 0x7F800000u;  // infinity and NaN
  return bits<float>(sign | (magnitude >= 0x0F800000u ? special : finite));
#endif
}

template <typename T>
LLTM_CELL_INLINE T narrow(compute_t<T> x);

template <>
LLTM_CELL_INLINE double narrow<double>(double x) {
  return x;
}
template <>
LLTM_CELL_INLINE float narrow<float>(float x) {
  return x;
}

// Round to nearest, ties to even; NaN becomes the quiet NaN.
template <>
LLTM_CELL_INLINE BFloat16 narrow<BFloat16>(float x) {
  const std::uint32_t u = bits<std::uint32_t>(x);
  const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>(x != x ? 0x7FC0u : rounded)};
}

template <>
LLTM_CELL_INLINE Half narrow<Half>(float x) {
  const std::uint32_t u = bits<std::uint32_t>(x);
  const std::uint32_t sign = u >> 31 << 15;
  const std::uint32_t magnitude = u & 0x7FFFFFFFu;
  // The exponent bias becomes 15 instead of 127. A mantissa carry increments the exponent, up to
  // infinity.
  const std::uint32_t rounded =
      (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const std::uint32_t normal = rounded < 0x7C00u ? rounded : 0x7C00u;
  // Adding 0.5 aligns the float's last place with half subnormals.
  const std::uint32_t subnormal = bits<std::uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3F000000u;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<std::uint16_t>(sign | (x != x ? 0x7E00u : finite))};
}

#if defined(__AVX512F__)
using Floats = __m512;
#elif defined(__AVX__)
using Floats = __m256;
#elif defined(__aarch64__)
using Floats = float32x4_t;
#else
using Floats = float __attribute__((vector_size(16)));
#endif
constexpr int kLanes = sizeof(Floats) / sizeof(float);
// A NEON vector is a quarter of a cache line.
#if defined(__aarch64__)
constexpr int kVectorsOfLine = 4;
#else
constexpr int kVectorsOfLine = 1;
#endif

LLTM_CELL_INLINE Floats load_lanes(const float* x) {
  Floats floats;
  __builtin_memcpy(&floats, x, sizeof(floats));
  return floats;
}

#if defined(__AVX512F__)
using HalfBits = __m256i;
#elif defined(__AVX__)
using HalfBits = __m128i;
#elif defined(__aarch64__)
using HalfBits = uint16x4_t;
#endif
#if defined(__AVX512F__)
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, Half) {
  return _mm512_cvtph_ps(x);
}
#elif defined(__AVX2__)
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, Half) {
  return _mm256_cvtph_ps(x);
}
#elif defined(__aarch64__)
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, BFloat16) {
#if defined(__clang__)  // Clang combines both into one instruction.
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(x), 16));
#else
  return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
#endif
}
LLTM_CELL_INLINE Floats widen_lanes(HalfBits x, Half) {
  return vcvt_f32_f16(vreinterpret_f16_u16(x));
}
#endif
template <typename T>
LLTM_CELL_INLINE Floats load_lanes(const T* x) {
#if defined(__AVX2__) || defined(__aarch64__)
  HalfBits bits;
  __builtin_memcpy(&bits, x, sizeof(bits));
  return widen_lanes(bits, T{});
#else
  Floats floats;
  for (int j = 0; j < kLanes; ++j) floats[j] = widen(x[j]);
  return floats;
#endif
}

LLTM_CELL_INLINE void store_lanes(Floats floats, float* x) {
  __builtin_memcpy(x, &floats, sizeof(floats));
}

#if defined(__AVX2__) || defined(__aarch64__)
LLTM_CELL_INLINE void store_lanes(Floats floats, Half* x) {
#if defined(__AVX512F__)
  // GCC 12 warns about the header of the form without a mask.
  const HalfBits bits = _mm512_maskz_cvtps_ph(0xFFFF, floats, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  const HalfBits bits = _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT);
#else
  const HalfBits bits = vreinterpret_u16_f16(vcvt_f16_f32(floats));
#endif
  __builtin_memcpy(x, &bits, sizeof(bits));
}
#endif

LLTM_CELL_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX__)
  return _mm256_set1_ps(x);
#elif defined(__aarch64__)
  return vdupq_n_f32(x);
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

// n < kLanes; the rest is zero.
LLTM_CELL_INLINE Floats load_first(const float* x, std::int64_t n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(x, first_lanes(n));
#elif defined(__aarch64__)
  if (n == 1) return Floats{x[0]};
  return vcombine_f32(vld1_f32(x), n == 2 ? float32x2_t{} : float32x2_t{x[2]});
#else
  Floats floats = {};
  for (std::int64_t j = 0; j < n; ++j) floats[j] = x[j];
  return floats;
#endif
}

template <typename T>
LLTM_CELL_INLINE Floats load_first(const T* x, std::int64_t n) {
#if defined(__AVX512F__)
  return widen_lanes(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), x), T{});
#elif defined(__aarch64__)
  std::uint64_t first = x[0].bits;
  if (n > 1) first |= std::uint64_t{x[1].bits} << 16;
  if (n > 2) first |= std::uint64_t{x[2].bits} << 32;
  return widen_lanes(vcreate_u16(first), T{});
#else
  T first[kLanes] = {};
  for (std::int64_t j = 0; j < n; ++j) first[j] = x[j];
  return load_lanes(first);
#endif
}

LLTM_CELL_INLINE void store_first(Floats floats, float* x, std::int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(x, static_cast<__mmask16>((1u << n) - 1), floats);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(x, first_lanes(n), floats);
#elif defined(__aarch64__)
  x[0] = floats[0];
  if (n > 1) x[1] = floats[1];
  if (n > 2) x[2] = floats[2];
#else
  for (std::int64_t j = 0; j < n; ++j) x[j] = floats[j];
#endif
}

}  // namespace
}  // namespace lltm::cpu
