// Interval analysis of cell programs, for CellInfo::forgets (program_text.h).
#pragma once

#include "cell/program.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>

namespace lltm {

// Ignores NaN.
struct ValueRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();

  bool is(double x) const { return low == x && high == x; }
};

// NaN can be any value.
inline ValueRange range_with(std::initializer_list<double> values) {
  if (std::any_of(values.begin(), values.end(), [](double x) { return x != x; })) return {};
  return {std::min(values), std::max(values)};
}
inline ValueRange operator-(const ValueRange& a) {
  return {-a.high, -a.low};
}
inline ValueRange operator+(const ValueRange& a, const ValueRange& b) {
  return range_with({a.low + b.low, a.high + b.high});
}
inline ValueRange operator*(const ValueRange& a, const ValueRange& b) {
  if (a.is(0) || b.is(0)) return {0, 0};
  return range_with({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
}

inline ValueRange within(double low, double high) {
  return {low, high};
}
inline ValueRange at_least(double low) {
  return {low};
}
inline ValueRange exponential(const ValueRange& a) {
  return {std::exp(a.low), std::exp(a.high)};
}
inline ValueRange maximum(const ValueRange& a, const ValueRange& b) {
  return {std::max(a.low, b.low), std::max(a.high, b.high)};
}
inline ValueRange either(const ValueRange& a, const ValueRange& b) {
  return range_with({a.low, a.high, b.low, b.high});
}

inline ValueRange range_of(Op op, const ValueRange& a, const ValueRange& b, const ValueRange& c) {
  switch (op) {
#define LLTM_RANGE(op, function, operands, word, cost, range, aten) \
  case Op::op:                                                      \
    return range;
    LLTM_OPERATIONS(LLTM_RANGE)
#undef LLTM_RANGE
  }
  return {};
}

// Range of the factor in values factor * x + rest with a given x; empty for other values.
using Factor = std::optional<ValueRange>;
inline bool depends(const Factor& factor) {
  return !factor || !factor->is(0);
}
inline Factor factor_of(
    Op op, const std::array<Factor, 3>& of, const std::array<ValueRange, 3>& ranges) {
  const auto& [a, b, c] = of;
  if (std::none_of(of.begin(), of.end(), depends)) return ValueRange{0, 0};
  if (!a || !b || !c) return std::nullopt;
  switch (op) {
    case Op::kCopy:
    case Op::kDetach:
      return *a;
    case Op::kNegate:
      return -*a;
    case Op::kAdd:
      return *a + *b;
    case Op::kSubtract:
      return *a + -*b;
    case Op::kMultiply:
      if (depends(a) && depends(b)) return std::nullopt;
      return depends(a) ? *a * ranges[1] : ranges[0] * *b;
    case Op::kMaximum:  // of another value and x + rest; ranges are for x = 0
      if (a->is(1) && b->is(0) && ranges[0].high <= 0) return within(0, 1);
      if (b->is(1) && a->is(0) && ranges[1].high <= 0) return within(0, 1);
      return std::nullopt;
    case Op::kWhere:
      if (depends(a)) return std::nullopt;
      return either(*b, *c);
    default:
      return std::nullopt;
  }
}

}  // namespace lltm
