// Activation functions and cell program operations, for every device: straight-line code without C
// library calls, in which `?:` only selects between computed values, so that loops vectorize and
// the threads of a GPU warp do not diverge. Exceptions are sin, cos and fmod, in float64 and on a
// GPU.
//
// Maximum errors over all finite inputs, from the correctly rounded result (test_cell_math.cpp,
// each instruction set):
//     exp 2 ULP, exp2 2 ULP, expm1 2 ULP, log 1 ULP, log1p 2 ULP, sigmoid 3 ULP, tanh 3 ULP,
//     elu 2 ULP, softplus 2 ULP, sin 2 ULP, cos 2 ULP, erf 2 ULP; the others are exact or correctly
//     rounded.
// Subnormal results are at most one subnormal step off. In other rounding modes than to nearest,
// errors of results up to 1 are at most 30 eps in float32 and 10,000 eps in float64, of others that
// part of the result. On a GPU, the float32 divisions of sigmoid and tanh have an error up to 1 ULP
// instead of 0.5 (`quotient`). NaN gives NaN, infinities give the limits.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LLTM_CELL_INLINE __host__ __device__ __forceinline__
#else
#define LLTM_CELL_INLINE inline __attribute__((always_inline))
#endif

// For loops with independent iterations.
#if defined(__clang__)
#define LLTM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LLTM_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Constant indices keep arrays in registers.
#if defined(__CUDACC__)
#define LLTM_UNROLL _Pragma("unroll")
#else
#define LLTM_UNROLL _Pragma("GCC unroll 8")
#endif

namespace lltm {

// Compiled once per instruction set: the linker must not replace a baseline function with an
// out-of-line AVX-512 copy.
namespace {
namespace math {

template <typename To, typename From>
LLTM_CELL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

template <typename T>
struct FloatFormat;

template <>
struct FloatFormat<float> {
  using Bits = std::int32_t;
  using UnsignedBits = std::uint32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Bits kExponentBias = 127;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  static constexpr float kRound = 12582912.0f;
  static constexpr Bits kRoundBits = 0x4B400000;
  // exp(kLowest) is below half the smallest subnormal.
  static constexpr float kLowest = -105.0f;
  // exp(kHighest) overflows.
  static constexpr float kHighest = 89.0f;
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

  // (2 atanh(s) / s - 2) / s^2 for z = s^2 and 1 + s <= sqrt(2) (1 - s), Chebyshev approximation.
  static LLTM_CELL_INLINE float atanh_remainder(float z) {
    float p = 2.95803983e-1f;
    p = p * z + 3.99887707e-1f;
    return p * z + 6.66666851e-1f;
  }

  // erf(x) / x - 1 for z = x^2 and |x| <= 0.8125, and log(1 - erf(t)) / t for t in [0.8125, 4]
  // (float64: 6). Lawson approximations.
  static LLTM_CELL_INLINE float erf_near(float z) {
    float p = -6.48071000e-04f;
    p = p * z + 5.07708499e-03f;
    p = p * z - 2.68166941e-02f;
    p = p * z + 1.12830281e-01f;
    p = p * z - 3.76125962e-01f;
    return p * z + 1.28379166e-01f;
  }

  static LLTM_CELL_INLINE float erf_far(float t) {
    float p = -6.32901720e-06f;
    p = p * t + 2.75037164e-04f;
    p = p * t - 3.45378462e-03f;
    p = p * t + 2.33752225e-02f;
    p = p * t - 1.05802409e-01f;
    p = p * t - 6.35404944e-01f;
    return p * t - 1.12858832e+00f;
  }
};

template <>
struct FloatFormat<double> {
  using Bits = std::int64_t;
  using UnsignedBits = std::uint64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Bits kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr Bits kRoundBits = 0x4338000000000000;
  static constexpr double kLowest = -746.0;
  static constexpr double kHighest = 710.0;
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

  static LLTM_CELL_INLINE double atanh_remainder(double z) {
    double p = 1.46170375487916501e-1;
    p = p * z + 1.53316740301678619e-1;
    p = p * z + 1.81828905566956035e-1;
    p = p * z + 2.22222111151441615e-1;
    p = p * z + 2.85714286260958915e-1;
    p = p * z + 3.99999999998992390e-1;
    return p * z + 6.66666666666666970e-1;
  }

  static LLTM_CELL_INLINE double erf_near(double z) {
    double p = 1.0967126179260064e-08;
    p = p * z - 1.5792828536441344e-07;
    p = p * z + 1.6412454496296634e-06;
    p = p * z - 1.4922947137302265e-05;
    p = p * z + 1.2055237871350372e-04;
    p = p * z - 8.5483248658568378e-04;
    p = p * z + 5.2239775948378685e-03;
    p = p * z - 2.6866170642592242e-02;
    p = p * z + 1.1283791670944295e-01;
    p = p * z - 3.7612638903183571e-01;
    return p * z + 1.2837916709551256e-01;
  }

  static LLTM_CELL_INLINE double erf_far(double t) {
    double p = 1.9325247834257347e-12;
    p = p * t - 8.3562082279028177e-11;
    p = p * t + 1.6933273184092306e-09;
    p = p * t - 2.1362650100649062e-08;
    p = p * t + 1.8777076866332857e-07;
    p = p * t - 1.2167128145517336e-06;
    p = p * t + 5.9729767491123738e-06;
    p = p * t - 2.2279429042737174e-05;
    p = p * t + 6.0991871140067505e-05;
    p = p * t - 1.0550972919480416e-04;
    p = p * t + 1.6951098995649522e-05;
    p = p * t + 5.5471170821040931e-04;
    p = p * t - 1.6733362587969028e-03;
    p = p * t + 1.9792852959200612e-04;
    p = p * t + 1.9132523232152317e-02;
    p = p * t - 1.0277362051068310e-01;
    p = p * t - 6.3661961668864897e-01;
    return p * t - 1.1283791780407231e+00;
  }
};

// x = n ln2 + r with |r| <= ln2/2.
template <typename T>
struct Reduced {
  T expm1_r;
  typename FloatFormat<T>::Bits n;
};

template <typename T>
LLTM_CELL_INLINE Reduced<T> reduce(T x) {
  using F = FloatFormat<T>;
  const T shifted = x * F::kLog2E + F::kRound;
  const T n = shifted - F::kRound;
  const T r = (x - n * F::kLn2High) - n * F::kLn2Low;
  return {r + r * r * F::remainder(r), bit_cast<typename F::Bits>(shifted) - F::kRoundBits};
}

// 2^n for n in the range of normal numbers.
template <typename T>
LLTM_CELL_INLINE T power_of_two(typename FloatFormat<T>::Bits n) {
  using F = FloatFormat<T>;
  return bit_cast<T>((n + F::kExponentBias) << F::kMantissaBits);
}

template <typename T>
LLTM_CELL_INLINE T clamp_low(T x) {  // keeps NaN
  return x < FloatFormat<T>::kLowest ? FloatFormat<T>::kLowest : x;
}

template <typename T>
inline constexpr typename FloatFormat<T>::Bits kSign =
    typename FloatFormat<T>::Bits{1} << (8 * sizeof(T) - 1);

template <typename T>
LLTM_CELL_INLINE T minus_abs(T x) {
  return bit_cast<T>(bit_cast<typename FloatFormat<T>::Bits>(x) | kSign<T>);
}

template <typename T>
LLTM_CELL_INLINE T with_sign_of(T magnitude, T x) {
  using Bits = typename FloatFormat<T>::Bits;
  return bit_cast<T>((bit_cast<Bits>(magnitude) & ~kSign<T>) | (bit_cast<Bits>(x) & kSign<T>));
}

// For x <= 0. Scaling by two factors rounds subnormal results correctly.
template <typename T>
LLTM_CELL_INLINE T exp_nonpositive(T x) {
  using F = FloatFormat<T>;
  const Reduced<T> reduced = reduce(clamp_low(x));
  return (T(1) + reduced.expm1_r) * power_of_two<T>(reduced.n + F::kShift) *
         power_of_two<T>(-F::kShift);
}

// Full relative accuracy near 0; for x <= 0 only.
template <typename T>
LLTM_CELL_INLINE T expm1_nonpositive(T x) {
  // Below -40 the result is -1 in both formats, and 2^n stays normal.
  const Reduced<T> reduced = reduce(x < T(-40) ? T(-40) : x);
  const T scale = power_of_two<T>(reduced.n);
  return scale * reduced.expm1_r + (scale - T(1));
}

// a / b for b in [1, 2]; the reciprocal's error is 1 ULP. The remainder corrects the quotient to at
// most 1 ULP.
LLTM_CELL_INLINE float quotient_by(float a, float b, float reciprocal) {
  const float q = a * reciprocal;
  return __builtin_fmaf(__builtin_fmaf(-b, q, a), reciprocal, q);
}

// A GPU division calls about twenty instructions and branches for b that does not occur here.
template <typename T>
LLTM_CELL_INLINE T quotient(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 4) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    return quotient_by(a, b, reciprocal);
  } else {
    return a / b;
  }
#else
  return a / b;
#endif
}

// Nothing overflows in exp(-|x|).
template <typename T>
LLTM_CELL_INLINE T sigmoid(T x) {
  const T e = exp_nonpositive(minus_abs(x));
  return quotient(x < T(0) ? e : T(1), T(1) + e);
}

// -d / (2 + d) with d = exp(-2|x|) - 1 is accurate near 0.
LLTM_CELL_INLINE float tanh(float x) {
  const float d = expm1_nonpositive(2 * minus_abs(x));
  return with_sign_of(quotient(d, 2 + d), x);
}

// With the formula above, float64 gradients of layers with few hidden units would have 1.3 times
// the error of eager PyTorch. For q = exp(-2|x|) < 1/3, 1 - 2q / (1 + q) subtracts a small term
// with a small error.
LLTM_CELL_INLINE double tanh(double x) {
  const double y = 2 * minus_abs(x);
  const Reduced<double> reduced = reduce(y < -40 ? -40 : y);
  const double scale = power_of_two<double>(reduced.n);
  const double d = scale * reduced.expm1_r + (scale - 1);
  const double q = scale * reduced.expm1_r + scale;
  const bool far = y < -1.1;
  const double part = (far ? 2 * q : -d) / (2 + d);
  return with_sign_of(far ? 1 - part : part, x);
}

// An infinite exponential times a mask would be NaN.
template <typename T>
LLTM_CELL_INLINE T elu(T x) {
  const T e = expm1_nonpositive(x);
  return x > T(0) ? x : e;
}

// 2^n (1 + expm1_r), by two factors for results near overflow and subnormals.
template <typename T>
LLTM_CELL_INLINE T scaled(const Reduced<T>& reduced) {
  using F = FloatFormat<T>;
  using Bits = typename F::Bits;
  using Unsigned = typename F::UnsignedBits;
  // Some instruction sets cannot shift negative 64-bit numbers.
  const auto twice_biased = static_cast<Unsigned>(reduced.n + 2 * F::kExponentBias);
  const Bits half = static_cast<Bits>(twice_biased >> 1) - F::kExponentBias;
  // Unsigned, because n is arbitrary if x is NaN.
  const auto rest = static_cast<Unsigned>(reduced.n) - static_cast<Unsigned>(half);
  return (T(1) + reduced.expm1_r) * power_of_two<T>(half) *
         power_of_two<T>(static_cast<Bits>(rest));
}

template <typename T>
LLTM_CELL_INLINE T exp(T x) {
  const T y = clamp_low(x);
  return scaled(reduce(y > FloatFormat<T>::kHighest ? FloatFormat<T>::kHighest : y));
}

template <typename T>
LLTM_CELL_INLINE T exp2(T x) {
  using F = FloatFormat<T>;
  constexpr T kOverflow = F::kExponentBias + 1, kZero = -(F::kExponentBias + F::kMantissaBits + 2);
  const T above = x < kZero ? kZero : x;
  const T y = above > kOverflow ? kOverflow : above;
  const T shifted = y + F::kRound;
  const T r = (y - (shifted - F::kRound)) * T(0.69314718055994530942);
  return scaled<T>(
      {r + r * r * F::remainder(r), bit_cast<typename F::Bits>(shifted) - F::kRoundBits});
}

// Full relative accuracy near 0.
template <typename T>
LLTM_CELL_INLINE T expm1(T x) {
  using F = FloatFormat<T>;
  const T y = x < T(-40) ? T(-40) : x;
  const Reduced<T> reduced = reduce(y > F::kHighest ? F::kHighest : y);
  const T half = power_of_two<T>(reduced.n - 1);  // 2^n may overflow although the result does not
  const T result = T(2) * (half * reduced.expm1_r + (half - T(0.5)));
  return minus_abs(x) > T(-1e-30) ? x : result;  // halving would round subnormal numbers
}

// y = 2^n m with m in [sqrt(1/2), sqrt(2)), for a normal number y > 0.
template <typename T>
struct Parts {
  T n, m;
};

template <typename T>
LLTM_CELL_INLINE Parts<T> split(T y) {
  using F = FloatFormat<T>;
  using Unsigned = typename F::UnsignedBits;
  constexpr Unsigned kOne = static_cast<Unsigned>(F::kExponentBias) << F::kMantissaBits;
  constexpr Unsigned kMantissa = (Unsigned{1} << F::kMantissaBits) - 1;
  constexpr Unsigned kRoot = __builtin_bit_cast(Unsigned, T(0.70710678118654752440));
  const Unsigned bits = bit_cast<Unsigned>(y) + (kOne - kRoot);
  const Unsigned n_bits = (bits >> F::kMantissaBits) + static_cast<Unsigned>(F::kRoundBits);
  return {
      bit_cast<T>(n_bits) - (F::kRound + T(F::kExponentBias)),
      bit_cast<T>((bits & kMantissa) + kRoot)};
}

// n ln2 + log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)): with s = f / (2 + f), log(1 + f) is
// 2 atanh(s), and 2 s is f - s f.
template <typename T>
LLTM_CELL_INLINE T log_of_parts(T n, T f) {
  using F = FloatFormat<T>;
  const T s = f / (T(2) + f);
  const T z = s * s;
  return n * F::kLn2High + (f + (n * F::kLn2Low - s * (f - z * F::atanh_remainder(z))));
}

template <typename T>
LLTM_CELL_INLINE T log_at_edges(T x, T result) {
  constexpr T kInfinity = T(__builtin_inf());
  result = x < kInfinity ? result : x;
  result = x == T(0) ? -kInfinity : result;
  return x < T(0) ? T(__builtin_nan("")) : result;
}

template <typename T>
LLTM_CELL_INLINE T log(T x) {
  using F = FloatFormat<T>;
  constexpr int kUp = F::kMantissaBits + 2;
  const bool subnormal = x < power_of_two<T>(1 - F::kExponentBias);
  const Parts<T> parts = split(subnormal ? x * power_of_two<T>(kUp) : x);
  const T n = parts.n - (subnormal ? T(kUp) : T(0));
  return log_at_edges(x, log_of_parts(n, parts.m - T(1)));
}

// Adds the rounding error of 1 + x to m, for accuracy near 0.
template <typename T>
LLTM_CELL_INLINE T log1p(T x) {
  using F = FloatFormat<T>;
  const T y = T(1) + x;
  const Parts<T> parts = split(y);
  // 2^-n; subnormal for the largest n, where the rounding error does not matter.
  const T scale = power_of_two<T>(F::kRoundBits - bit_cast<typename F::Bits>(parts.n + F::kRound));
  const T lost = x < power_of_two<T>(F::kMantissaBits + 2) ? (x - (y - T(1))) * scale : T(0);
  return with_sign_of(log_at_edges(y, log_of_parts(parts.n, (parts.m - T(1)) + lost)), x);
}

// max(x, 0) + log1p(exp(-|x|))
template <typename T>
LLTM_CELL_INLINE T softplus(T x) {
  const T e = exp_nonpositive(minus_abs(x));
  const bool half = e > T(0.41421356237309504880);  // 1 + e = 2 (1 + (e - 1) / 2)
  const T log1p_e = log_of_parts(half ? T(1) : T(0), half ? T(0.5) * (e - T(1)) : e);
  return (x > T(0) ? x : T(0)) + log1p_e;
}

#if defined(__CUDACC__)
#define LLTM_LIBRARY(function) ::function
#else
#define LLTM_LIBRARY(function) __builtin_##function
#endif

// On the CPU an instruction, because LLTM_KERNEL_FLAGS disable errno.
LLTM_CELL_INLINE float sqrt(float x) {
  return LLTM_LIBRARY(sqrtf)(x);
}
LLTM_CELL_INLINE double sqrt(double x) {
  return LLTM_LIBRARY(sqrt)(x);
}

template <typename T>
LLTM_CELL_INLINE T abs(T x) {
  return with_sign_of(x, T(0));
}

// x86-64 without SSE4.1 has no instruction for it.
template <typename T>
LLTM_CELL_INLINE T floor(T x) {
  constexpr T kIntegers =
      sizeof(T) == 4 ? T(0x1p23) : T(0x1p52);  // larger numbers have no fraction
  const T size = abs(x);
  const T nearest = with_sign_of((size + kIntegers) - kIntegers, x);
  const T below = nearest > x ? nearest - T(1) : nearest;
  return size < kIntegers ? below : x;
}

// The C library's functions of double are not vectorized. CUDA's branch only for large x.
LLTM_CELL_INLINE double sin(double x) {
  return LLTM_LIBRARY(sin)(x);
}
LLTM_CELL_INLINE double cos(double x) {
  return LLTM_LIBRARY(cos)(x);
}
LLTM_CELL_INLINE double fmod(double a, double b) {
  return LLTM_LIBRARY(fmod)(a, b);
}

#if defined(__CUDACC__)
LLTM_CELL_INLINE float sin(float x) {
  return ::sinf(x);
}
LLTM_CELL_INLINE float cos(float x) {
  return ::cosf(x);
}
LLTM_CELL_INLINE float fmod(float a, float b) {
  return ::fmodf(a, b);
}
#else
// x without the nearest multiple of 4, for |x| < 2^53.
LLTM_CELL_INLINE double modulo_4(double x) {
  return x - ((x + 0x1.8p54) - 0x1.8p54);
}

// sin(x + quarters pi/2). x = (n + f) pi/2 with |f| <= 1/2, for every float: the first 26 bits of
// 2/pi that matter for this size of x, and the next 26, have exact products with x. The products of
// earlier bits are multiples of 4.
LLTM_CELL_INLINE float sin_of_quarters(float x, std::uint32_t quarters) {
  const double y = x, size = minus_abs(y);
  const bool bits_27 = size <= -0x1p51, bits_53 = size <= -0x1p77, bits_79 = size <= -0x1p103;
  const double high = bits_79   ? 0x1.abe8fa8p-79
                      : bits_53 ? 0x1.4a7f09p-54
                      : bits_27 ? 0x1.7272208p-27
                                : 0x1.45f3068p-1;
  const double middle = bits_79   ? 0x1.a6ee06p-107
                        : bits_53 ? 0x1.abe8fa8p-79
                        : bits_27 ? 0x1.4a7f09p-54
                                  : 0x1.7272208p-27;
  const double low = bits_79   ? 0x1.b6295993c439p-132
                     : bits_53 ? 0x1.a6ee06db14acdp-107
                     : bits_27 ? 0x1.abe8fa9a6ee07p-79
                               : 0x1.4a7f09d5f47d5p-54;
  const double turns = modulo_4(y * high) + modulo_4(y * middle);
  const double shifted = (turns + y * low) + FloatFormat<double>::kRound;
  const double rounded = (turns - (shifted - FloatFormat<double>::kRound)) + y * low;
  // Of the nearest integer in every rounding mode.
  const double up = rounded > 0.5 ? 1 : 0, change = rounded < -0.5 ? -1 : up, f = rounded - change;
  const auto n = static_cast<std::uint32_t>(bit_cast<std::uint64_t>(shifted + change)) + quarters;

  const auto r = static_cast<float>(f * 1.57079632679489661923);
  const float s = r * r;
  const float sine = r + r * s * ((-1.95172353e-4f * s + 8.332178e-3f) * s - 1.66666552e-1f);
  const float cosine =
      1 - 0.5f * s + s * s * ((2.44330822e-5f * s - 1.38873153e-3f) * s + 4.16666456e-2f);
  const auto bits = bit_cast<std::uint32_t>((n & 1) != 0 ? cosine : sine);
  return bit_cast<float>(bits ^ ((n & 2) << 30));
}

LLTM_CELL_INLINE float sin(float x) {
  const float y = sin_of_quarters(x, 0);
  return minus_abs(x) > -0x1p-12f ? x : y;  // keeps the sign of zero
}
LLTM_CELL_INLINE float cos(float x) {
  return sin_of_quarters(x, 1);
}

// Each step subtracts the first 29 bits of a quotient of at least 2^28, times the 24 bits of b:
// this is exact.
template <int kSteps>
LLTM_CELL_INLINE double without_multiples(double rest, double b, double inverse) {
  if constexpr (kSteps == 0) {
    return rest;
  } else {
    const double quotient = rest * inverse;
    const auto high = bit_cast<std::int64_t>(quotient) & -(std::int64_t{1} << 24);
    rest -= (quotient < 0x1p28 ? 0.0 : bit_cast<double>(high)) * b;
    return without_multiples<kSteps - 1>(rest, b, inverse);
  }
}

// Exact in every rounding mode: the inverse is below 1 / b, so that nothing becomes negative.
LLTM_CELL_INLINE float fmod(float a, float b) {
  const double size = abs(double{a}), divisor = abs(double{b});
  const double inverse = (1 - 0x1p-50) / divisor;
  double rest = without_multiples<9>(size, divisor, inverse);  // the quotient is below 2^277
  constexpr double kIntegers = 0x1p52;
  rest -= ((rest * inverse + kIntegers) - kIntegers) * divisor;
  rest = rest < 0 ? rest + divisor : rest;
  rest = rest >= divisor ? rest - divisor : rest;
  return static_cast<float>(with_sign_of(size < divisor ? size : rest, double{a}));
}
#endif

template <typename T>
LLTM_CELL_INLINE T erf(T x) {
  constexpr T kLargest = sizeof(T) == 4 ? 4 : 6;  // where erf rounds to 1
  const T size = abs(x), t = size > kLargest ? kLargest : size;
  const T far = with_sign_of(T(1) - exp_nonpositive(t * FloatFormat<T>::erf_far(t)), x);
  return size > T(0.8125) ? far : x + x * FloatFormat<T>::erf_near(x * x);
}

// 0 for either zero and NaN, as in PyTorch's derivative of |x|.
template <typename T>
LLTM_CELL_INLINE T sign(T x) {
  const T negative = x < T(0) ? T(-1) : T(0);
  return x > T(0) ? T(1) : negative;
}

// NaN if either operand is.
template <typename T>
LLTM_CELL_INLINE T maximum(T a, T b) {
  const T larger = a > b ? a : b;  // b if either is NaN
  return a != a ? a : larger;
}
template <typename T>
LLTM_CELL_INLINE T minimum(T a, T b) {
  const T smaller = a < b ? a : b;
  return a != a ? a : smaller;
}

template <typename T>
LLTM_CELL_INLINE T copy(T a) {
  return a;
}
template <typename T>
LLTM_CELL_INLINE T detach(T a) {
  return a;
}
template <typename T>
LLTM_CELL_INLINE T negate(T a) {
  return -a;
}
template <typename T>
LLTM_CELL_INLINE T add(T a, T b) {
  return a + b;
}
template <typename T>
LLTM_CELL_INLINE T subtract(T a, T b) {
  return a - b;
}
template <typename T>
LLTM_CELL_INLINE T multiply(T a, T b) {
  return a * b;
}
template <typename T>
LLTM_CELL_INLINE T divide(T a, T b) {
  return a / b;
}
template <typename T>
LLTM_CELL_INLINE T multiply_add(T a, T b, T c) {
  return a * b + c;
}
template <typename T>
LLTM_CELL_INLINE T multiply_subtract(T a, T b, T c) {
  return a * b - c;
}
template <typename T>
LLTM_CELL_INLINE T subtract_product(T a, T b, T c) {
  return c - a * b;
}
// x times a function's derivative, given the function's result.
template <typename T>
LLTM_CELL_INLINE T sigmoid_gradient(T x, T sigmoid) {
  const T product = x * sigmoid;
  return product - product * sigmoid;
}
template <typename T>
LLTM_CELL_INLINE T tanh_gradient(T x, T tanh) {
  return x * (T(1) - tanh * tanh);
}
template <typename T>
LLTM_CELL_INLINE T elu_gradient(T x, T elu) {
  return x * (elu > T(0) ? T(1) : elu + T(1));
}
template <typename T>
LLTM_CELL_INLINE T add_tanh_gradient(T x, T tanh, T c) {
  return x * (T(1) - tanh * tanh) + c;
}
// Comparisons and logical operations return 0 or 1. Nonzero operands are true.
template <typename T>
LLTM_CELL_INLINE T greater(T a, T b) {
  return a > b ? T(1) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T greater_equal(T a, T b) {
  return a >= b ? T(1) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T equal(T a, T b) {
  return a == b ? T(1) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T not_equal(T a, T b) {
  return a != b ? T(1) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T logical_not(T a) {
  return a == T(0) ? T(1) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T logical_and(T a, T b) {
  return a != T(0) ? not_equal(b, T(0)) : T(0);
}
template <typename T>
LLTM_CELL_INLINE T logical_or(T a, T b) {
  return a != T(0) ? T(1) : not_equal(b, T(0));
}
template <typename T>
LLTM_CELL_INLINE T where(T condition, T a, T b) {
  return condition != T(0) ? a : b;
}

template <typename T>
LLTM_CELL_INLINE T where(bool condition, int a, T b) {
  return condition ? T(a) : b;
}

}  // namespace math
}  // namespace
}  // namespace lltm
