// Instruction sets and matrices, for tests that link only the kernels.
#pragma once

#include "cpu/kernel/floats.h"
#include "cpu/kernel/table.h"
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace lltm::cpu {

const Kernels* kernels_emulated_amx();

// Of an ATEN_CPU_CAPABILITY, amx or emulated_amx. Null if this CPU or this compiler has none.
inline const Kernels* find_kernels(const std::string& isa) {
  if (isa == "emulated_amx") {
#if defined(LLTM_EMULATED_AMX)
    if (lltm_test::cpu_has("avx512")) return kernels_emulated_amx();
#endif
    return nullptr;
  }
  if (!lltm_test::cpu_has(isa)) return nullptr;
  return isa == "amx"      ? kernels_amx()
         : isa == "avx512" ? kernels_avx512()
         : isa == "avx2"   ? kernels_avx2()
                           : kernels_default();
}

class KernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    kernels_ = find_kernels(GetParam());
    expect_any(kernels_);
  }
  static void expect_any(const void* kernels) {
    if (kernels == nullptr) GTEST_SKIP() << "this CPU or this compiler has none";
  }

  const Kernels* kernels_ = nullptr;
};

#define LLTM_EACH_ISA(Suite, ...)                                               \
  INSTANTIATE_TEST_SUITE_P(                                                     \
      Kernels, Suite, testing::Values(__VA_ARGS__), [](const auto& parameter) { \
        return parameter.param;                                                 \
      })

// NaN gaps between rows detect reads. Nothing follows the last row: sanitizers detect reads.
template <typename T = float>
struct TestMatrix {
  TestMatrix(std::int64_t n_rows, std::int64_t n_columns, std::int64_t gap)
      : rows(n_rows), columns(n_columns), stride(n_columns + gap) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    data.assign(rows > 0 ? (rows - 1) * stride + columns : 0, narrow<T>(nan));
  }
  TestMatrix(std::int64_t n_rows, std::int64_t n_columns, std::int64_t gap, unsigned seed)
      : TestMatrix(n_rows, n_columns, gap) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    fill([&] { return narrow<T>(normal(generator)); });
  }
  template <typename Value>
  TestMatrix& fill(const Value& value) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) (*this)(r, c) = value();
    }
    return *this;
  }

  T& operator()(std::int64_t r, std::int64_t c) { return data[r * stride + c]; }
  double at(std::int64_t r, std::int64_t c) const { return widen(data[r * stride + c]); }
  Matrix<const T> matrix() const { return {data.data(), stride}; }
  Matrix<T> output() { return {data.data(), stride}; }
  TestMatrix transposed() const {
    TestMatrix result(columns, rows, stride - columns);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) result(c, r) = data[r * stride + c];
    }
    return result;
  }

  std::int64_t rows, columns, stride;
  std::vector<T> data;
};

// An element of a product in float64. The magnitude of its terms determines the error bound.
struct Sum {
  explicit Sum(double before) : value(before), magnitude(std::abs(before)) {}
  template <typename A, typename B>
  Sum(const TestMatrix<A>& a, const TestMatrix<B>& b, std::int64_t r, std::int64_t c, double before)
      : Sum(before) {
    for (std::int64_t k = 0; k < a.columns; ++k) add(a.at(r, k), b.at(k, c));
  }
  void add(double x, double y) {
    value += x * y;
    magnitude += std::abs(x * y);
  }

  double value, magnitude;
};

// C (m + 1, n) was `before`. Gaps and the last row must be unchanged; without `accumulate`, C was
// NaN. Errors are at most `error` times the magnitude.
template <typename A, typename B>
void expect_product(
    const TestMatrix<A>& a,
    const TestMatrix<B>& b,
    const TestMatrix<>& before,
    const TestMatrix<>& c,
    bool accumulate,
    double error) {
  for (std::int64_t r = 0; r < a.rows; ++r) {
    for (std::int64_t j = 0; j < b.columns; ++j) {
      const Sum sum(a, b, r, j, accumulate ? before.at(r, j) : 0);
      ASSERT_NEAR(c.at(r, j), sum.value, error * sum.magnitude) << r << ", " << j;
    }
    for (std::int64_t j = b.columns; j < c.stride; ++j) {
      ASSERT_TRUE(std::isnan(c.at(r, j))) << "written after row " << r;
    }
  }
  for (std::int64_t j = 0; j < b.columns; ++j) {
    const double last = c.at(a.rows, j);
    ASSERT_TRUE(accumulate ? last == before.at(a.rows, j) : std::isnan(last)) << j;
  }
}

}  // namespace lltm::cpu
