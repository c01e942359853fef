// For every instruction set of this CPU. Links only the kernels.
#include "cell/math.h"
#include "cell/program_compiler.h"
#include "kernel_test.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace lltm::cpu {
namespace {

class CellMath : public KernelTest {};
LLTM_EACH_ISA(CellMath, "default", "avx2", "avx512", "amx");

template <typename T>
struct Traits;

template <>
struct Traits<float> {
  using Bits = std::uint32_t;
  using Wide = double;
};

template <>
struct Traits<double> {
  using Bits = std::uint64_t;
  using Wide = long double;
};

constexpr Op kOperations[] = {
#define LLTM_OPERATION(op, ...) Op::op,
    LLTM_OPERATIONS(LLTM_OPERATION)
#undef LLTM_OPERATION
};

Port port(Place place, int index) {
  return {place, static_cast<unsigned char>(index)};
}

// Inputs are the program's parameters; outputs are h' and the saved values.
template <typename T>
std::vector<T> run(
    const Kernels& kernels, const Program& program, const std::vector<T>& inputs, std::size_t n) {
  std::vector<Port> ports;
  for (int k = 0; k < program.inputs; ++k) ports.push_back(port(Place::kParameter, k));
  ports.push_back(port(Place::kH, 0));
  for (int k = 1; k < program.outputs; ++k) ports.push_back(port(Place::kSaved, k - 1));
  const Stage stage = {program, ports.data(), 0, {}};
  CellPrograms programs = {};
  programs.forward = {&stage, 1, 0, 0};
  CellInfo cell = {};
  cell.parameters = program.inputs;
  cell.saved = program.outputs - 1;
  cell.programs = &programs;
  const auto size = static_cast<std::int64_t>(n);
  std::vector<T> outputs(program.outputs * n);
  ForwardArgs<T, T> args;
  args.cell = &cell;
  args.hidden = args.layer_hidden = size;
  args.parameters = {inputs.data(), 0};
  args.h_next = {outputs.data(), size};
  args.saved = {outputs.data() + n, cell.saved * size};
  elementwise_of<T, T>(kernels.cells[0]).forward(args, 0, size);
  return outputs;
}

template <typename T>
std::vector<T> apply(const Kernels& kernels, Op op, const std::vector<std::vector<T>>& operands) {
  std::vector<T> inputs;
  for (const std::vector<T>& operand : operands) {
    inputs.insert(inputs.end(), operand.begin(), operand.end());
  }
  const int count = static_cast<int>(operands.size());
  const Instruction instruction = {op, static_cast<unsigned char>(count), 0, 1, 2};
  const Program program = {&instruction, 1, nullptr, 0, count, 1, count + 1};
  return run(kernels, program, inputs, operands[0].size());
}

// Numbers all values in order; both zeros are 0.
template <typename T>
std::int64_t ordinal(T x) {
  using Bits = typename Traits<T>::Bits;
  constexpr Bits sign = Bits{1} << (std::numeric_limits<Bits>::digits - 1);
  const auto bits = std::bit_cast<Bits>(x);
  const auto magnitude = static_cast<std::int64_t>(bits & ~sign);
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

template <typename T>
struct MathFunction {
  const char* name;
  Op op;
  typename Traits<T>::Wide (*reference)(typename Traits<T>::Wide);
  std::int64_t largest_error;  // bound stated in cell/math.h, in ULP
};

template <typename T>
std::vector<MathFunction<T>> math_functions() {
  using Wide = typename Traits<T>::Wide;
  return {
      {"exp", Op::kExp, [](Wide x) { return std::exp(x); }, 2},
      {"exp2", Op::kExp2, [](Wide x) { return std::exp2(x); }, 2},
      {"expm1", Op::kExpm1, [](Wide x) { return std::expm1(x); }, 2},
      {"log", Op::kLog, [](Wide x) { return std::log(x); }, 1},
      {"log1p", Op::kLog1p, [](Wide x) { return std::log1p(x); }, 2},
      {"sin", Op::kSin, [](Wide x) { return std::sin(x); }, 2},
      {"cos", Op::kCos, [](Wide x) { return std::cos(x); }, 2},
      {"erf", Op::kErf, [](Wide x) { return std::erf(x); }, 2},
      {"sigmoid", Op::kSigmoid, [](Wide x) { return 1 / (1 + std::exp(-x)); }, 3},
      {"tanh", Op::kTanh, [](Wide x) { return std::tanh(x); }, 3},
      {"elu", Op::kElu, [](Wide x) { return x > 0 ? x : std::expm1(x); }, 2},
      {"softplus",
       Op::kSoftplus,
       [](Wide x) { return std::max(x, Wide(0)) + std::log1p(std::exp(-std::abs(x))); },
       2},
  };
}

template <typename T>
struct Worst {
  std::int64_t error = 0;
  T x = 0;
};

// Infinite between NaN and a number.
template <typename T>
std::int64_t steps_between(T a, T b) {
  constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : kFar;
  std::int64_t steps;
  return __builtin_sub_overflow(ordinal(a), ordinal(b), &steps) ? kFar : std::abs(steps);
}

// Distinguishes signs of zero; NaN equals NaN.
template <typename T>
bool same(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// A subnormal result may differ by one step.
template <typename T>
void compare(
    const MathFunction<T>& function,
    const Kernels& kernels,
    const std::vector<T>& x,
    Worst<T>& worst,
    Worst<T>& worst_subnormal) {
  const std::vector<T> y = apply<T>(kernels, function.op, {x});
  for (std::size_t k = 0; k < x.size(); ++k) {
    const T expected = static_cast<T>(function.reference(x[k]));
    const std::int64_t error = steps_between(y[k], expected);
    Worst<T>& target = std::abs(expected) < std::numeric_limits<T>::min() ? worst_subnormal : worst;
    if (error > target.error) {
      target = {error, x[k]};
    }
  }
}

constexpr std::size_t kChunk = 1 << 14;

template <typename T, typename Visit>
void for_each_chunk(
    typename Traits<T>::Bits first,
    typename Traits<T>::Bits last,
    typename Traits<T>::Bits stride,
    Visit visit) {
  using Bits = typename Traits<T>::Bits;
  std::vector<T> chunk;
  for (Bits bits = first;; bits += stride) {
    chunk.push_back(std::bit_cast<T>(bits));
    const bool end = last - bits < stride;
    if (chunk.size() == kChunk || end) {
      visit(chunk);
      chunk.clear();
    }
    if (end) {
      return;
    }
  }
}

template <typename T>
class Errors {
 public:
  explicit Errors(const Kernels& kernels) : kernels_(kernels), functions_(math_functions<T>()) {
    worst_.resize(functions_.size());
    worst_subnormal_.resize(functions_.size());
  }

  void add(const std::vector<T>& x) {
    for (std::size_t k = 0; k < functions_.size(); ++k) {
      compare(functions_[k], kernels_, x, worst_[k], worst_subnormal_[k]);
    }
  }

  void add_range(T first, T last, typename Traits<T>::Bits count) {
    using Bits = typename Traits<T>::Bits;
    const auto low = std::bit_cast<Bits>(first);
    const auto high = std::bit_cast<Bits>(last);
    // An odd stride varies the low bits.
    const Bits stride = (high - low) / count | 1;
    for_each_chunk<T>(low, high, stride, [&](std::vector<T>& x) {
      add(x);
      for (T& value : x) {
        value = -value;
      }
      add(x);
    });
  }

  void expect_as_stated() const {
    for (std::size_t k = 0; k < functions_.size(); ++k) {
      EXPECT_LE(worst_[k].error, functions_[k].largest_error)
          << functions_[k].name << " at " << worst_[k].x;
      EXPECT_LE(worst_subnormal_[k].error, 1)
          << functions_[k].name << " at " << worst_subnormal_[k].x;
      testing::Test::RecordProperty(functions_[k].name, std::to_string(worst_[k].error));
    }
  }

 private:
  const Kernels& kernels_;
  std::vector<MathFunction<T>> functions_;
  std::vector<Worst<T>> worst_, worst_subnormal_;
};

template <typename T>
std::vector<T> special_values() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> values;
  for (const T value :
       {T(0),
        Limits::denorm_min(),
        3 * Limits::denorm_min(),
        Limits::min() - Limits::denorm_min(),
        Limits::min(),
        Limits::epsilon(),
        T(0.5),
        T(1),
        T(40),
        T(87.336544750553),
        T(88.722839),
        T(103.972),
        T(104),
        T(105),
        T(106),
        T(708.396418532264),
        T(709.782712893384),
        T(744.4400719213812),
        T(745.1332191019411),
        T(746),
        T(126),
        T(128),
        T(149.5),
        T(150),
        T(1022),
        T(1024),
        T(1074.5),
        T(1075),
        T(1e4),
        T(0x1.f37c8ap95),  // close to a multiple of pi / 2
        Limits::max(),
        Limits::infinity(),
        Limits::quiet_NaN()}) {
    values.push_back(value);
    values.push_back(-value);
  }
  return values;
}

TEST_P(CellMath, Float32ErrorsAreAtMostThoseStated) {
  Errors<float> errors(*kernels_);
  errors.add(special_values<float>());
  errors.add_range(0.0f, 0x1p-26f, 125'000);  // results are 1/2, or x itself
  errors.add_range(0x1p-26f, 128.0f, 1'250'000);
  errors.add_range(0.5f, 2.0f, 125'000);
  errors.add_range(128.0f, std::bit_cast<float>(0x7FFFFFFFu), 125'000);  // includes NaNs
  errors.expect_as_stated();
}

TEST_P(CellMath, Float64ErrorsAreAtMostThoseStated) {
  if constexpr (std::numeric_limits<long double>::digits <= 53) {
    GTEST_SKIP() << "long double is no wider than double here: no reference";
  }
  Errors<double> errors(*kernels_);
  errors.add(special_values<double>());
  errors.add_range(0.0, 0x1p-55, 12'500);
  errors.add_range(0x1p-55, 1024.0, 62'500);
  errors.add_range(0x1p-6, 64.0, 125'000);
  errors.add_range(0.5, 2.0, 62'500);
  errors.add_range(700.0, 750.0, 62'500);
  errors.add_range(1024.0, std::bit_cast<double>(0x7FFFFFFFFFFFFFFFu), 12'500);
  errors.expect_as_stated();
}

// Results of 0, ±1, infinity and NaN are exact, with the sign of a zero.
template <typename T>
void check_limits(const Kernels& kernels) {
  using Limits = std::numeric_limits<T>;
  const T largest_power = Limits::max_exponent;
  for (const MathFunction<T>& function : math_functions<T>()) {
    int checked = 0;
    for (const T size :
         {T(0),
          Limits::denorm_min(),
          T(1),
          std::nextafter(T(1), T(2)),
          largest_power,
          Limits::infinity(),
          Limits::quiet_NaN()}) {
      for (const T x : {size, -size}) {
        const T expected = static_cast<T>(function.reference(x));
        if (std::isfinite(expected) && expected != 0 && std::abs(expected) != 1) continue;
        if (function.op == Op::kElu && x == 0) continue;  // elu of -0 is 0
        const T y = apply<T>(kernels, function.op, {{x}})[0];
        EXPECT_TRUE(same(y, expected))
            << function.name << " of " << x << ": expected " << expected << ", got " << y;
        ++checked;
      }
    }
    EXPECT_GE(checked, 4) << function.name;
  }
}

// An approximate reciprocal is off by at most one unit, as on a GPU.
TEST(CellQuotient, ErrorsAreAtMostOneUlp) {
  using math::quotient_by;
  const float infinity = std::numeric_limits<float>::infinity();
  std::int64_t worst = 0, worst_subnormal = 0;
  for_each_chunk<float>(
      std::bit_cast<std::uint32_t>(1.0F),
      std::bit_cast<std::uint32_t>(2.0F),
      997,
      [&](const std::vector<float>& divisors) {
        for (std::size_t k = 0; k < divisors.size(); ++k) {
          const float b = divisors[k], exact = 1 / b;
          // Numerators of sigmoid and tanh: all of (0, 1], and some in [-1, 0).
          const auto any = static_cast<std::uint32_t>(k * 2654435761U % 0x3F800000U);
          for (const float a : {1.0F, std::bit_cast<float>(any + 1), b - 2, -0.75F * b + 0.5F}) {
            for (const float r :
                 {exact, std::nextafter(exact, 0.0F), std::nextafter(exact, 2.0F)}) {
              const auto expected = static_cast<float>(double{a} / b);
              std::int64_t& of_kind =
                  std::abs(expected) < std::numeric_limits<float>::min() ? worst_subnormal : worst;
              of_kind = std::max(of_kind, steps_between(quotient_by(a, b, r), expected));
            }
          }
        }
      });
  EXPECT_LE(worst, 1);
  EXPECT_LE(worst_subnormal, 1);
  EXPECT_TRUE(std::isnan(quotient_by(std::nanf(""), 1.5F, 1 / 1.5F)));
  EXPECT_TRUE(std::isnan(quotient_by(1, std::nanf(""), std::nanf(""))));
  EXPECT_TRUE(std::isnan(quotient_by(infinity, 1, 1))) << "which sigmoid and tanh never divide";
}

TEST_P(CellMath, InfinitiesAndZerosGiveTheLimits) {
  check_limits<float>(*kernels_);
  check_limits<double>(*kernels_);
}

// Exact or rounded once. Multiply-add may also round the product.
template <typename T>
bool is_exact(Op op, T y, T a, T b, T c) {
  const auto condition = [](bool x) { return x ? T(1) : T(0); };
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (op) {
    case Op::kCopy:
    case Op::kDetach:
      return same(y, a);
    case Op::kNegate:
      return same(y, -a);
    case Op::kAbs:
      return same(y, std::abs(a));
    case Op::kSign:
      return same(y, condition(a > 0) - condition(a < 0));
    case Op::kFloor:
      return same(y, std::floor(a));
    case Op::kSqrt:
      return same(y, std::sqrt(a));
    case Op::kNot:
      return same(y, condition(a == 0));
    case Op::kAdd:
      return same(y, a + b);
    case Op::kSubtract:
      return same(y, a - b);
    case Op::kMultiply:
      return same(y, a * b);
    case Op::kDivide:
      return same(y, a / b);
    case Op::kFmod:
      return same(y, std::fmod(a, b));
    case Op::kMaximum:
      return unordered ? std::isnan(y) : y == std::max(a, b);
    case Op::kMinimum:
      return unordered ? std::isnan(y) : y == std::min(a, b);
    case Op::kGreater:
      return same(y, condition(a > b));
    case Op::kGreaterEqual:
      return same(y, condition(a >= b));
    case Op::kEqual:
      return same(y, condition(a == b));
    case Op::kNotEqual:
      return same(y, condition(a != b));
    case Op::kAnd:
      return same(y, condition(a != 0 && b != 0));
    case Op::kOr:
      return same(y, condition(a != 0 || b != 0));
    case Op::kWhere:
      return same(y, a != 0 ? b : c);
    case Op::kMultiplyAdd:
      return same(y, std::fma(a, b, c)) || same(y, a * b + c);
    case Op::kMultiplySubtract:
      return same(y, std::fma(a, b, -c)) || same(y, a * b - c);
    case Op::kSubtractProduct:
      return same(y, std::fma(-a, b, c)) || same(y, c - a * b);
    case Op::kSigmoidGradient:
      return same(y, std::fma(-a * b, b, a * b)) || same(y, a * b - a * b * b);
    case Op::kTanhGradient:
      return same(y, a * std::fma(-b, b, T(1))) || same(y, a * (1 - b * b));
    case Op::kEluGradient:
      return same(y, a * (b > 0 ? T(1) : b + 1));
    case Op::kAddTanhGradient:
      return same(y, std::fma(a, std::fma(-b, b, T(1)), c)) || same(y, a * (1 - b * b) + c);
    default:
      return false;
  }
}

template <typename T>
void check_exact_operations(const Kernels& kernels) {
  // All pairs of values and every third triple.
  std::vector<T> values = special_values<T>();
  for (const T value : {T(1) / 3, T(3), T(1e-3), T(12345.678)}) {
    values.push_back(value);
    values.push_back(-value);
  }
  std::vector<T> a, b, c;
  for (const T x : values) {
    for (const T y : values) {
      for (std::size_t k = a.size() % 3; k < values.size(); k += 3) {
        a.push_back(x);
        b.push_back(y);
        c.push_back(values[k]);
      }
    }
  }
  const auto approximated = math_functions<T>();
  for (const Op op : kOperations) {
    const auto is_this = [&](const MathFunction<T>& f) { return f.op == op; };
    if (std::any_of(approximated.begin(), approximated.end(), is_this)) continue;
    std::vector<std::vector<T>> operands = {a, b, c};
    operands.resize(static_cast<std::size_t>(info_of(op).operands));
    const std::vector<T> y = apply<T>(kernels, op, operands);
    for (std::size_t k = 0; k < y.size(); ++k) {
      ASSERT_TRUE(is_exact(op, y[k], a[k], b[k], c[k]))
          << info_of(op).function << " of " << a[k] << ", " << b[k] << ", " << c[k] << " is "
          << y[k];
    }
  }
}

TEST_P(CellMath, OtherOperationsAreExact) {
  check_exact_operations<float>(*kernels_);
  check_exact_operations<double>(*kernels_);
}

template <typename T>
void check_rounding_modes(const Kernels& kernels, T error) {
  std::vector<T> x, b;
  for (int k = -5000; k < 5000; ++k) {
    x.push_back(T(0.0123) * static_cast<T>(k));
    b.push_back(std::ldexp(T(1) + T(0.1) * static_cast<T>(k % 7), k % 40));
  }
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    const auto in_this_mode = [&](Op op, const std::vector<std::vector<T>>& operands) {
      std::fesetround(mode);
      std::vector<T> y = apply<T>(kernels, op, operands);
      std::fesetround(FE_TONEAREST);
      return y;
    };
    for (const MathFunction<T>& function : math_functions<T>()) {
      const std::vector<T> y = in_this_mode(function.op, {x});
      for (std::size_t k = 0; k < x.size(); ++k) {
        const auto expected = static_cast<T>(function.reference(x[k]));
        if (!std::isfinite(expected)) continue;
        ASSERT_LE(std::abs(y[k] - expected), error * std::max(std::abs(expected), T(1)))
            << function.name << " of " << x[k] << " in rounding mode " << mode;
      }
    }
    const std::vector<T> y = in_this_mode(Op::kFmod, {x, b});
    for (std::size_t k = 0; k < x.size(); ++k) {
      ASSERT_TRUE(same(y[k], std::fmod(x[k], b[k]))) << x[k] << ", " << b[k] << ", mode " << mode;
    }
  }
}

TEST_P(CellMath, OtherRoundingModesHaveTheErrorsStated) {
  check_rounding_modes<float>(*kernels_, 30 * std::numeric_limits<float>::epsilon());
  check_rounding_modes<double>(*kernels_, 1e4 * std::numeric_limits<double>::epsilon());
}

TEST_P(CellMath, ResultsDoNotDependOnThePositionInTheArray) {
  std::vector<float> x;
  for (int k = 0; k < 144; ++k) x.push_back(std::sin(static_cast<float>(k)) * 20);
  for (const Op op : kOperations) {
    const auto count = static_cast<std::size_t>(info_of(op).operands);
    const std::vector<float> together =
        apply<float>(*kernels_, op, std::vector<std::vector<float>>(count, x));
    for (std::size_t k = 0; k < x.size(); ++k) {
      const std::vector<std::vector<float>> operands(count, {x[k]});
      const float alone = apply<float>(*kernels_, op, operands)[0];
      EXPECT_TRUE(same(alone, together[k])) << info_of(op).function << " at " << x[k];
    }
  }
}

struct Format {
  int exponent_bits, mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int smallest_exponent() const { return 1 - bias(); }
  unsigned infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
};
constexpr Format kHalf = {5, 10};
constexpr Format kBFloat16 = {8, 7};

double decode(std::uint16_t bits, Format format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7FFF) >> format.mantissa_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0
             ? sign * std::ldexp(mantissa, format.smallest_exponent() - format.mantissa_bits)
             : sign * std::ldexp(
                          mantissa + (1 << format.mantissa_bits),
                          exponent - format.bias() - format.mantissa_bits);
}

// Rounds to nearest, ties to even. x must not be NaN.
std::uint16_t encode(float x, Format format) {
  const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
  const double magnitude = std::abs(static_cast<double>(x));
  if (std::isinf(x)) {
    return static_cast<std::uint16_t>(sign | format.infinity());
  }
  const int exponent = magnitude == 0 ? format.smallest_exponent()
                                      : std::max(std::ilogb(magnitude), format.smallest_exponent());
  // In units of the last place; nearbyint rounds ties to even.
  const auto units =
      static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  const unsigned biased = static_cast<unsigned>(exponent - format.smallest_exponent())
                          << format.mantissa_bits;
  return static_cast<std::uint16_t>(sign | std::min(biased + units, format.infinity()));
}

template <typename T>
void check_load(const ArrayConvert<T>& convert, Format format) {
  std::vector<T> patterns(1 << 16);
  for (std::size_t k = 0; k < patterns.size(); ++k) {
    patterns[k].bits = static_cast<std::uint16_t>(k);
  }
  std::vector<float> values(patterns.size());
  convert.load(patterns.data(), values.data(), static_cast<std::int64_t>(patterns.size()));
  for (std::size_t k = 0; k < patterns.size(); ++k) {
    const double expected = decode(patterns[k].bits, format);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(values[k])) << "pattern " << k;
    } else {
      ASSERT_EQ(values[k], expected) << "pattern " << k;
      ASSERT_EQ(std::signbit(values[k]), std::signbit(expected)) << "pattern " << k;
    }
  }
}

template <typename T>
void check_store(const ArrayConvert<T>& convert, Format format, std::vector<float>& values) {
  std::vector<T> stored(values.size());
  convert.store(values.data(), stored.data(), static_cast<std::int64_t>(values.size()));
  for (std::size_t k = 0; k < values.size(); ++k) {
    if (std::isnan(values[k])) {
      ASSERT_TRUE(std::isnan(decode(stored[k].bits, format))) << values[k];
    } else {
      ASSERT_EQ(stored[k].bits, encode(values[k], format))
          << std::hexfloat << values[k] << " stored as " << stored[k].bits;
    }
  }
}

template <typename T>
void check_store_everywhere(const ArrayConvert<T>& convert, Format format) {
  for_each_chunk<float>(0u, 0xFFFFFFFFu, 251, [&](std::vector<float>& values) {
    check_store(convert, format, values);
  });
  // Every number, every tie, and the adjacent floats.
  std::vector<float> values;
  for (unsigned bits = 0; bits < format.infinity(); ++bits) {
    const double low = decode(static_cast<std::uint16_t>(bits), format);
    const int exponent =
        std::max(static_cast<int>(bits >> format.mantissa_bits), 1) - format.bias();
    const double tie = low + std::ldexp(0.5, exponent - format.mantissa_bits);
    for (const double value : {low, tie}) {
      const auto x = static_cast<float>(value);
      for (const float near : {std::nextafter(x, 0.0f), x, std::nextafter(x, INFINITY)}) {
        values.push_back(near);
        values.push_back(-near);
      }
    }
  }
  check_store(convert, format, values);
}

TEST_P(CellMath, EveryFloat16PatternLoadsAsItsValue) {
  check_load(kernels_->convert_f16, kHalf);
}

TEST_P(CellMath, EveryBFloat16PatternLoadsAsItsValue) {
  check_load(kernels_->convert_bf16, kBFloat16);
}

TEST_P(CellMath, Float16StoresRoundToNearestEven) {
  check_store_everywhere(kernels_->convert_f16, kHalf);
}

TEST_P(CellMath, BFloat16StoresRoundToNearestEven) {
  check_store_everywhere(kernels_->convert_bf16, kBFloat16);
}

}  // namespace
}  // namespace lltm::cpu
