// The activation functions of the cells (cell.h), for kernels on every device.
//
// Each function is straight-line code without branches: `?:` only selects
// between two values that are both already computed. That is what lets the
// compiler turn a loop over it into SSE2, AVX2 or AVX-512 code, and what keeps
// warps together on a GPU. Nothing here may call the C library.
//
// Largest errors against a correctly rounded result, over every finite input
// (checked by tests_cpp/test_cell_math.cpp for each instruction set):
//     exp_nonpositive 2 ULP, expm1_nonpositive 2 ULP, sigmoid 3 ULP,
//     tanh 3 ULP, elu 2 ULP.
// Where the true result is subnormal, the error is at most one subnormal step.
// NaN gives NaN; infinities give the limits.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LLTM_CELL_INLINE __host__ __device__ __forceinline__
#else
#define LLTM_CELL_INLINE inline __attribute__((always_inline))
#endif

// Before a loop whose iterations are independent of each other.
#if defined(__clang__)
#define LLTM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LLTM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace lltm {

// Anonymous on purpose: this header is compiled once per instruction set, and
// an out-of-line AVX-512 copy must never be merged into the baseline code.
namespace {
namespace math {

template <typename To, typename From>
LLTM_CELL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// What exp needs to know of a floating-point format.
template <typename T>
struct Format;

template <>
struct Format<float> {
  using Bits = std::int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Bits kExponentBias = 127;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  static constexpr float kRound = 12582912.0f;
  static constexpr Bits kRoundBits = 0x4B400000;
  // exp(kLowest) is below half the smallest subnormal.
  static constexpr float kLowest = -105.0f;
  // 2^(n + kShift) is normal for every n that occurs.
  static constexpr Bits kShift = 64;
  static constexpr float kLog2E = 1.44269504088896341f;
  // ln 2 in two parts; n * kLn2High is exact for every n that occurs.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;

  // (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2], Chebyshev approximation.
  static LLTM_CELL_INLINE float remainder(float r) {
    float p = 1.98909908e-4f;
    p = p * r + 1.39336500e-3f;
    p = p * r + 8.33331093e-3f;
    p = p * r + 4.16664649e-2f;
    p = p * r + 1.66666667e-1f;
    return p * r + 5.00000001e-1f;
  }
};

template <>
struct Format<double> {
  using Bits = std::int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Bits kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr Bits kRoundBits = 0x4338000000000000;
  static constexpr double kLowest = -746.0;
  static constexpr Bits kShift = 512;
  static constexpr double kLog2E = 1.4426950408889634074;
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;

  static LLTM_CELL_INLINE double remainder(double r) {
    double p = 2.09146869680868772e-9;
    p = p * r + 2.51052170047207452e-8;
    p = p * r + 2.75572736431102953e-7;
    p = p * r + 2.75572554002064244e-6;
    p = p * r + 2.48015873255477412e-5;
    p = p * r + 1.98412698748206253e-4;
    p = p * r + 1.38888888888837483e-3;
    p = p * r + 8.33333333332613513e-3;
    p = p * r + 4.16666666666666698e-2;
    p = p * r + 1.66666666666666710e-1;
    return p * r + 0.5;
  }
};

// x = n ln2 + r with |r| <= ln2/2; carries expm1(r) and n.
template <typename T>
struct Reduced {
  T expm1_r;
  typename Format<T>::Bits n;
};

// For x in [kLowest, 0] or NaN.
template <typename T>
LLTM_CELL_INLINE Reduced<T> reduce(T x) {
  using F = Format<T>;
  const T shifted = x * F::kLog2E + F::kRound;
  const T n = shifted - F::kRound;
  const T r = (x - n * F::kLn2High) - n * F::kLn2Low;
  return {r + r * r * F::remainder(r), bit_cast<typename F::Bits>(shifted) - F::kRoundBits};
}

// 2^n for n in the range of normal numbers.
template <typename T>
LLTM_CELL_INLINE T power_of_two(typename Format<T>::Bits n) {
  using F = Format<T>;
  return bit_cast<T>((n + F::kExponentBias) << F::kMantissaBits);
}

template <typename T>
LLTM_CELL_INLINE T clamp_low(T x) {  // keeps NaN
  return x < Format<T>::kLowest ? Format<T>::kLowest : x;
}

// The sign bit.
template <typename T>
inline constexpr typename Format<T>::Bits kSign =
    typename Format<T>::Bits{1} << (8 * sizeof(T) - 1);

template <typename T>
LLTM_CELL_INLINE T minus_abs(T x) {
  return bit_cast<T>(bit_cast<typename Format<T>::Bits>(x) | kSign<T>);
}

template <typename T>
LLTM_CELL_INLINE T with_sign_of(T magnitude, T x) {
  using Bits = typename Format<T>::Bits;
  return bit_cast<T>((bit_cast<Bits>(magnitude) & ~kSign<T>) | (bit_cast<Bits>(x) & kSign<T>));
}

// exp(x) for x <= 0. The power of two is applied in two parts, so that results
// below the smallest normal number are rounded, not lost.
template <typename T>
LLTM_CELL_INLINE T exp_nonpositive(T x) {
  using F = Format<T>;
  const Reduced<T> reduced = reduce(clamp_low(x));
  return (T(1) + reduced.expm1_r) * power_of_two<T>(reduced.n + F::kShift) *
         power_of_two<T>(-F::kShift);
}

// exp(x) - 1 for x <= 0, with full relative accuracy near 0. For other x the
// result means nothing.
template <typename T>
LLTM_CELL_INLINE T expm1_nonpositive(T x) {
  // Below -40 the result is -1 in both formats, and 2^n stays normal.
  const Reduced<T> reduced = reduce(x < T(-40) ? T(-40) : x);
  const T scale = power_of_two<T>(reduced.n);
  return scale * reduced.expm1_r + (scale - T(1));
}

// 1 / (1 + exp(-x)), from exp(-|x|) so that nothing overflows.
template <typename T>
LLTM_CELL_INLINE T sigmoid(T x) {
  const T e = exp_nonpositive(minus_abs(x));
  return (x < T(0) ? e : T(1)) / (T(1) + e);
}

// From q = exp(-2|x|) near 1 as (1 - q) / (1 + q), the difference being taken
// before it is rounded, and from there on as 1 - 2q / (1 + q), where what is
// subtracted is small and its error smaller.
template <typename T>
LLTM_CELL_INLINE T tanh(T x) {
  const T y = T(2) * minus_abs(x);
  const Reduced<T> reduced = reduce(y < T(-40) ? T(-40) : y);
  const T scale = power_of_two<T>(reduced.n);
  const T minus_difference = scale * reduced.expm1_r + (scale - T(1));
  const T q = scale * reduced.expm1_r + scale;
  const bool far = y < T(-1.1);  // beyond it, q < 1/3
  const T quotient = (far ? T(2) * q : -minus_difference) / (T(2) + minus_difference);
  return with_sign_of(far ? T(1) - quotient : quotient, x);
}

// x where x > 0, else exp(x) - 1: selected by `?:`, because multiplying by a mask turns an infinite
// exponential into NaN.
template <typename T>
LLTM_CELL_INLINE T elu(T x) {
  const T e = expm1_nonpositive(x);
  return x > T(0) ? x : e;
}

// As at::where, for numbers.
template <typename T>
LLTM_CELL_INLINE T where(bool condition, int a, T b) {
  return condition ? T(a) : b;
}

}  // namespace math
}  // namespace
}  // namespace lltm
