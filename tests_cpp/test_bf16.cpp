// Compares the bfloat16 GEMM of each instruction set with float64. Links only the kernels.
#include "cpu/kernel/table.h"
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace lltm::cpu {

#if defined(LLTM_EMULATED_AMX)
const Kernels* kernels_emulated_amx();
#endif

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

GemmBf16 find_gemm(const std::string& isa) {
  if (isa == "emulated_amx") {
#if defined(LLTM_EMULATED_AMX)
    if (lltm_test::cpu_has("avx512")) return kernels_emulated_amx()->gemm_bf16_operands;
#endif
    return nullptr;
  }
  if (!lltm_test::cpu_has(isa)) return nullptr;
  if (isa == "bf16") return kernels_bf16();
  const Kernels* const kernels = isa == "amx"      ? kernels_amx()
                                 : isa == "avx512" ? kernels_avx512()
                                 : isa == "avx2"   ? kernels_avx2()
                                                   : kernels_default();
  return kernels == nullptr ? nullptr : kernels->gemm_bf16_operands;
}

// bfloat16 represents x exactly.
BFloat16 bfloat16(float x) {
  return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
}

// NaN gaps between rows detect reads.
struct Values {
  Values(int64_t r, int64_t c, int64_t gap) : rows(r), columns(c), stride(c + gap) {
    data.assign(rows * stride, kNaN);
  }
  template <typename Value>
  Values& fill(const Value& value) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) data[i * stride + j] = value();
    }
    return *this;
  }
  float at(int64_t r, int64_t c) const { return data[r * stride + c]; }

  int64_t rows, columns, stride;
  std::vector<float> data;
};

struct Operands {
  template <typename Value>
  Operands(int64_t m, int64_t n, int64_t k, const Value& value)
      : a(m, k, /*gap=*/4), b(k, n, /*gap=*/m % 3) {
    a.fill(value);
    b.fill(value);
    for (const float x : a.data) rows.push_back(bfloat16(x));
    pairs.resize(k * b.stride);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < b.stride; ++j) {
        pairs[(i / 2 * b.stride + j) * 2 + i % 2] = bfloat16(b.at(i, j));
      }
    }
  }
  Matrix<const BFloat16> left() const { return {rows.data(), a.stride}; }
  PackedB<const BFloat16> right() const { return {pairs.data(), b.rows, b.columns, b.stride}; }

  Values a, b;
  std::vector<BFloat16> rows, pairs;
};

class Bf16Kernels : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    gemm_ = find_gemm(GetParam());
    if (gemm_ == nullptr) GTEST_SKIP() << "this CPU or this compiler has none";
  }

  // Each element's error is at most `additions` times half an ulp of the sum of magnitudes.
  template <typename Value>
  void check(
      int64_t m, int64_t n, int64_t k, bool accumulate, const Value& value, double additions) {
    SCOPED_TRACE(testing::Message() << "m " << m << ", n " << n << ", k " << k);
    const Operands operands(m, n, k, value);
    Values c(m + 1, n, /*gap=*/5);  // the last row is not written
    if (accumulate) c.fill(value);
    const Values before = c;
    gemm_(m, operands.left(), operands.right(), {c.data.data(), c.stride}, accumulate);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = accumulate ? before.at(i, j) : 0, magnitude = std::abs(sum);
        for (int64_t l = 0; l < k; ++l) {
          const double term = double{operands.a.at(i, l)} * operands.b.at(l, j);
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(c.at(i, j), sum, additions * 0x1p-24 * magnitude) << i << ", " << j;
      }
      for (int64_t j = n; j < c.stride; ++j) {
        ASSERT_TRUE(std::isnan(c.data[i * c.stride + j])) << "written behind row " << i;
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      ASSERT_TRUE(accumulate ? c.at(m, j) == before.at(m, j) : std::isnan(c.at(m, j))) << j;
    }
  }

  // Sums of small integers are exact.
  void check_exact(int64_t m, int64_t n, int64_t k, bool accumulate) {
    std::uniform_int_distribution<int> integer(-8, 8);
    check(m, n, k, accumulate, [&] { return static_cast<float>(integer(generator_)); }, 0);
  }

  std::mt19937 generator_{1};
  GemmBf16 gemm_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(
    Kernels,
    Bf16Kernels,
    testing::Values("avx512", "bf16", "emulated_amx", "amx"),
    [](const auto& info) { return info.param; });

TEST_P(Bf16Kernels, TilesOfAllSizes) {
  for (int64_t m = 1; m <= 50; ++m) {
    for (const int64_t n : {1, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 112, 130}) {
      check_exact(m, n, /*k=*/m % 3 == 0 ? 34 : 6, /*accumulate=*/m % 2 == 1);
    }
  }
}

TEST_P(Bf16Kernels, EveryDepth) {
  for (const int64_t k : {2, 4, 30, 32, 34, 62, 64, 66, 128, 510, 512, 514, 1030, 2050}) {
    for (const int64_t m : {1, 5, 17, 33}) {
      check_exact(m, 20, k, /*accumulate=*/false);
      check_exact(m, 48, k, /*accumulate=*/true);
    }
  }
}

TEST_P(Bf16Kernels, SumsAreFloat32) {
  std::normal_distribution<float> normal;
  const auto value = [&] {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(normal(generator_)) & 0xFFFF0000u);
  };
  for (const int64_t k : {2, 32, 64, 300, 1000}) {
    check(9, 50, k, /*accumulate=*/false, value, static_cast<double>(k));
    check(40, 50, k, /*accumulate=*/true, value, static_cast<double>(k));
  }
}

TEST_P(Bf16Kernels, RowsDoNotDependOnEachOther) {
  std::normal_distribution<float> normal;
  Operands operands(40, 50, 600, [&] {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(normal(generator_)) & 0xFFFF0000u);
  });
  operands.rows[7 * operands.a.stride] = bfloat16(std::numeric_limits<float>::infinity());
  std::vector<float> all(40 * 50), one(50);
  gemm_(40, operands.left(), operands.right(), {all.data(), 50}, /*accumulate=*/false);
  for (int64_t r = 0; r < 40; ++r) {
    gemm_(1, operands.left().from(r), operands.right(), {one.data(), 50}, /*accumulate=*/false);
    for (int64_t j = 0; j < 50; ++j) {
      ASSERT_EQ(std::isfinite(one[j]), r != 7);
      ASSERT_EQ(one[j], all[r * 50 + j]) << r;
    }
  }
}

TEST(Bf16Kernels, BelowAvx512ThereAreNone) {
  for (const std::string isa : {"default", "avx2"}) EXPECT_EQ(find_gemm(isa), nullptr) << isa;
}

}  // namespace
}  // namespace lltm::cpu
