// Parts, layouts, results and rounding errors. Links only the kernels.
#include "cpu/kernel/table.h"
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace lltm::cpu {

#if defined(LLTM_EMULATED_AMX)
const Kernels* kernels_emulated_amx();
#else
static const Kernels* kernels_emulated_amx() {
  return nullptr;
}
#endif

namespace {

using Floats = std::vector<float>;
using Operand = std::vector<BFloat16x3>;

enum class Amx { kEmulated, kOfThisCpu };

const Kernels* find_kernels(Amx amx, std::string& reason) {
  const bool emulated = amx == Amx::kEmulated;
  const Kernels* const kernels = emulated ? kernels_emulated_amx() : kernels_amx();
  if (kernels == nullptr) reason = "this compiler has none";
  if (!lltm_test::cpu_has(emulated ? "avx512" : "amx")) reason = "this CPU has none";
  return reason.empty() ? kernels : nullptr;
}

class Bf16x3 : public testing::TestWithParam<Amx> {
 protected:
  void SetUp() override {
    std::string reason;
    const Kernels* const kernels = find_kernels(GetParam(), reason);
    if (kernels == nullptr) GTEST_SKIP() << reason;
    bf16x3_ = kernels->bf16x3;
  }

  Bf16x3Kernels bf16x3_{};
};

INSTANTIATE_TEST_SUITE_P(
    Kernels, Bf16x3, testing::Values(Amx::kEmulated, Amx::kOfThisCpu), [](const auto& info) {
      return std::string(info.param == Amx::kEmulated ? "emulated" : "of_this_cpu");
    });

// Gaps between rows, nothing after the last: sanitizers detect reads past the end.
struct TestMatrix {
  TestMatrix(std::int64_t n_rows, std::int64_t n_columns, unsigned seed = 0)
      : rows(n_rows),
        columns(n_columns),
        stride(n_columns + 5),
        values((n_rows - 1) * stride + n_columns) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(generator);
  }
  float& at(std::int64_t r, std::int64_t c) { return values[r * stride + c]; }
  float at(std::int64_t r, std::int64_t c) const { return values[r * stride + c]; }
  Matrix<const float> matrix() const { return {values.data(), stride}; }
  TestMatrix transposed() const {
    TestMatrix result(columns, rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) result.at(c, r) = at(r, c);
    }
    return result;
  }

  std::int64_t rows, columns, stride;
  Floats values;
};

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Marks memory that kernels must overwrite, or must not write.
constexpr BFloat16x3 kUntouched = {{0x5A5A, 0x5A5A, 0x5A5A}};

double part(const std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// Element (r, k) of a left operand: the sum of its parts.
double left(const Operand& operand, std::int64_t stride, std::int64_t r, std::int64_t k) {
  const auto* const words = &operand[0].bits[0] + (r * stride + k / 32 * 32) * 3 + k % 32;
  return part(words[0]) + part(words[32]) + part(words[64]);
}

double right(const Operand& operand, std::int64_t depth, std::int64_t k, std::int64_t n) {
  const auto* const tile = &operand[0].bits[0] + (n / 16 * depth + k / 32 * 32) * 16 * 3;
  const auto* const words = tile + k % 32 / 2 * 32 + n % 16 * 2 + k % 2;
  return part(words[0]) + part(words[512]) + part(words[1024]);
}

Operand left_operand(const Bf16x3Kernels& kernels, const TestMatrix& x) {
  const std::int64_t stride = bf16x3_row_stride(x.columns);
  Operand operand(x.rows * stride, kUntouched);
  EXPECT_TRUE(kernels.pack_a(x.rows, x.columns, x.matrix(), {operand.data(), stride}));
  return operand;
}

Operand right_operand(const Bf16x3Kernels& kernels, const TestMatrix& x) {
  const std::int64_t depth = round_up(x.rows, 32);
  Operand operand(depth * round_up(x.columns, 16), kUntouched);
  EXPECT_TRUE(kernels.pack_b(x.rows, x.columns, x.matrix(), {operand.data(), depth * 16}));
  return operand;
}

TEST_P(Bf16x3, PartsOfEveryMagnitudeSumUpToTheNumber) {
  std::mt19937 generator(1);
  constexpr int kSmallest = -103, kLargest = 59;  // exponents, one per row
  TestMatrix x(kLargest - kSmallest + 1, 64);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    const auto exponent = static_cast<std::uint32_t>(r + kSmallest + 127) << 23;
    for (std::int64_t c = 0; c < x.columns; ++c) {
      const auto random = static_cast<std::uint32_t>(generator());
      x.at(r, c) = std::bit_cast<float>((random & 0x807FFFFFu) | exponent);
    }
    x.at(r, 0) = std::bit_cast<float>(exponent | 0x7FFFFFu);
    x.at(r, 1) = std::bit_cast<float>(exponent | 1u);
  }
  x.at(0, 2) = 0.0f;
  const Operand operand = left_operand(bf16x3_, x);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    for (std::int64_t c = 0; c < x.columns; ++c) {
      ASSERT_EQ(left(operand, bf16x3_row_stride(64), r, c), x.at(r, c)) << "row " << r;
    }
  }
}

TEST_P(Bf16x3, ValuesOutOfRangeAreReportedWhereverTheyAre) {
  const TestMatrix good(40, 45);
  for (const float bad : {kBf16x3Limit, -1.5f * kBf16x3Limit, INFINITY, -INFINITY}) {
    for (std::int64_t r = 0; r < good.rows; ++r) {
      for (std::int64_t c = 0; c < good.columns; ++c) {
        TestMatrix x = good;
        x.at(r, c) = bad;
        const auto data = x.matrix();
        Operand to(64 * 160);
        ASSERT_FALSE(bf16x3_.pack_a(x.rows, x.columns, data, {to.data(), 96}));
        ASSERT_FALSE(bf16x3_.pack_a_transposed(x.rows, x.columns, data, {to.data(), 96}));
        ASSERT_FALSE(bf16x3_.pack_b(x.rows, x.columns, data, {to.data(), 64 * 16}));
        ASSERT_FALSE(bf16x3_.pack_b_transposed(x.rows, x.columns, data, {to.data(), 64 * 16}));
      }
    }
  }
}

TEST_P(Bf16x3, NanIsDecomposedIntoNan) {
  TestMatrix x(1, 3);
  x.at(0, 1) = std::numeric_limits<float>::quiet_NaN();
  const Operand operand = left_operand(bf16x3_, x);
  EXPECT_EQ(left(operand, 32, 0, 0), x.at(0, 0));
  EXPECT_TRUE(std::isnan(left(operand, 32, 0, 1)));
  EXPECT_EQ(left(operand, 32, 0, 2), x.at(0, 2));
}

struct Size {
  std::int64_t rows, columns;
};
constexpr Size kSizes[] = {
    {1, 1},
    {1, 32},
    {2, 16},
    {3, 17},
    {16, 16},
    {17, 31},
    {31, 33},
    {32, 32},
    {33, 48},
    {50, 75},
    {64, 64},
    {65, 129}};

TEST_P(Bf16x3, LeftOperandsHaveTheElementsThenZerosToTheGroupsEnd) {
  for (const auto [rows, columns] : kSizes) {
    const TestMatrix x(rows, columns);
    const Operand by_rows = left_operand(bf16x3_, x);
    const std::int64_t stride = bf16x3_row_stride(columns);
    Operand by_columns(rows * stride, kUntouched);
    const TestMatrix xt = x.transposed();
    ASSERT_TRUE(
        bf16x3_.pack_a_transposed(xt.rows, xt.columns, xt.matrix(), {by_columns.data(), stride}));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < round_up(columns, 32); ++k) {
        const double expected = k < columns ? x.at(r, k) : 0.0;
        ASSERT_EQ(left(by_rows, stride, r, k), expected);
        ASSERT_EQ(left(by_columns, stride, r, k), expected);
      }
      for (std::int64_t k = round_up(columns, 32); k < stride; ++k) {
        ASSERT_EQ(by_rows[r * stride + k].bits[0], 0x5A5A) << "written behind the row";
        ASSERT_EQ(by_columns[r * stride + k].bits[0], 0x5A5A) << "written behind the row";
      }
    }
  }
}

TEST_P(Bf16x3, RightOperandsHaveTheElementsThenZerosToTheGroupsEnd) {
  for (const auto [rows, columns] : kSizes) {
    const TestMatrix x(rows, columns);
    const Operand packed = right_operand(bf16x3_, x);
    const std::int64_t depth = round_up(rows, 32);
    Operand transposed(packed.size(), kUntouched);
    const TestMatrix xt = x.transposed();
    ASSERT_TRUE(bf16x3_.pack_b_transposed(
        xt.rows, xt.columns, xt.matrix(), {transposed.data(), depth * 16}));
    for (std::int64_t n = 0; n < columns; ++n) {
      for (std::int64_t k = 0; k < depth; ++k) {
        const double expected = k < rows ? x.at(k, n) : 0.0;
        ASSERT_EQ(right(packed, depth, k, n), expected);
        ASSERT_EQ(right(transposed, depth, k, n), expected);
      }
    }
  }
}

// The gaps must not change.
void check_product(
    const Bf16x3Kernels& kernels,
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    bool accumulate) {
  const TestMatrix a(rows, depth, 1);
  const TestMatrix b(depth, columns, 2);
  const Operand left = left_operand(kernels, a);
  const Operand right = right_operand(kernels, b);
  const std::int64_t width = round_up(columns, 16);
  const std::int64_t ldc = width + 3;
  constexpr float kBefore = 0.75f;
  Floats c((rows + 2) * ldc, kBefore);
  kernels.gemm(
      rows,
      {left.data(), bf16x3_row_stride(depth)},
      {right.data(), round_up(depth, 32), width, width},
      {c.data() + ldc, ldc},
      accumulate);
  for (std::int64_t r = -1; r <= rows; ++r) {
    const float* const row = c.data() + (r + 1) * ldc;
    for (std::int64_t n = r >= 0 && r < rows ? width : 0; n < ldc; ++n) {
      ASSERT_EQ(row[n], kBefore) << "written at " << r << ", " << n;
    }
    if (r < 0 || r == rows) continue;
    for (std::int64_t n = 0; n < columns; ++n) {
      double expected = accumulate ? kBefore : 0.0;
      double magnitude = expected;
      for (std::int64_t k = 0; k < depth; ++k) {
        const double product = static_cast<double>(a.at(r, k)) * b.at(k, n);
        expected += product;
        magnitude += std::abs(product);
      }
      // The parts omit 2^-23 of each product. Rounding errors grow with the square root of the
      // number of terms.
      const double bound =
          magnitude * (0x1p-23 + 0x1p-24 * std::sqrt(6.0 * static_cast<double>(depth)));
      ASSERT_NEAR(row[n], expected, bound)
          << rows << " x " << depth << " x " << columns << " at " << r << ", " << n;
    }
  }
}

TEST_P(Bf16x3, ProductsOfEveryNumberOfRowsAreRightAndWriteNothingElse) {
  for (std::int64_t rows = 1; rows <= 97; ++rows)
    check_product(bf16x3_, rows, 48, 64, rows % 2 == 0);
}

TEST_P(Bf16x3, ProductsOfEveryNumberOfPanelsAreRightAndWriteNothingElse) {
  for (const std::int64_t rows : {5, 16, 32, 45}) {
    for (std::int64_t columns = 1; columns <= 160; columns += 13) {
      check_product(bf16x3_, rows, columns, 96, columns % 2 == 0);
    }
  }
}

TEST_P(Bf16x3, ProductsOfEveryDepthAreRight) {
  for (const std::int64_t rows : {3, 33}) {
    for (const std::int64_t depth : {1, 2, 31, 32, 33, 100, 128, 129, 160, 257, 700, 1536}) {
      check_product(bf16x3_, rows, 32, depth, false);
      check_product(bf16x3_, rows, 32, depth, true);
    }
  }
}

// Long sums are the main use of bf16x3.
TEST_P(Bf16x3, ErrorsAreNoLargerThanThoseOfAFloatGemm) {
  constexpr std::int64_t kRows = 32, kColumns = 32, kDepth = 512;
  const TestMatrix a(kRows, kDepth, 3);
  const TestMatrix b(kDepth, kColumns, 4);
  const Operand left = left_operand(bf16x3_, a);
  const Operand right = right_operand(bf16x3_, b);
  Floats c(kRows * kColumns);
  bf16x3_.gemm(
      kRows,
      {left.data(), bf16x3_row_stride(kDepth)},
      {right.data(), kDepth, kColumns, kColumns},
      {c.data(), kColumns},
      false);
  double bf16x3_error = 0, float_error = 0;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t n = 0; n < kColumns; ++n) {
      double exact = 0;
      float sum = 0;
      for (std::int64_t k = 0; k < kDepth; ++k) {
        exact += static_cast<double>(a.at(r, k)) * b.at(k, n);
        sum = std::fma(a.at(r, k), b.at(k, n), sum);
      }
      bf16x3_error = std::max(bf16x3_error, std::abs(c[r * kColumns + n] - exact));
      float_error = std::max(float_error, std::abs(sum - exact));
    }
  }
  EXPECT_GT(float_error, 0);
  EXPECT_LE(bf16x3_error, float_error);
}

std::vector<std::uint32_t> bits_of(const Floats& x) {
  std::vector<std::uint32_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), [](float value) {
    return std::bit_cast<std::uint32_t>(value);
  });
  return bits;
}

// Includes denormals, infinities and NaN.
TEST(AmxEmulation, IsBitwiseIdenticalToTheInstructions) {
  std::string reason;
  const Kernels* const both[] = {
      find_kernels(Amx::kEmulated, reason), find_kernels(Amx::kOfThisCpu, reason)};
  if (!reason.empty()) GTEST_SKIP() << reason;
  constexpr std::int64_t kRows = 45, kColumns = 48, kDepth = 96;
  std::mt19937 generator(5);
  for (const bool any_bits : {false, true}) {
    TestMatrix a(kRows, kDepth, 6), b(kDepth, kColumns, 7);
    for (Floats* const values : {&a.values, &b.values}) {
      for (float& value : *values) {
        const auto random = static_cast<std::uint32_t>(generator());
        if (any_bits) value = std::bit_cast<float>(random);
        if (!any_bits && random % 16 == 0) value *= 0x1p-120f;
      }
    }
    Operand left[2], right[2];
    Floats c[2];
    for (int k = 0; k < 2; ++k) {
      const Bf16x3Kernels& kernels = both[k]->bf16x3;
      left[k].assign(kRows * bf16x3_row_stride(kDepth), kUntouched);
      right[k].assign(kDepth * kColumns, kUntouched);
      c[k].assign(kRows * kColumns, 1.0f);
      const std::int64_t lda = bf16x3_row_stride(kDepth);
      kernels.pack_a(kRows, kDepth, a.matrix(), {left[k].data(), lda});
      kernels.pack_b(kDepth, kColumns, b.matrix(), {right[k].data(), kDepth * 16});
      kernels.gemm(
          kRows,
          {left[k].data(), lda},
          {right[k].data(), kDepth, kColumns, kColumns},
          {c[k].data(), kColumns},
          /*accumulate=*/true);
    }
    const auto bytes = [](const Operand& x) { return x.size() * sizeof(BFloat16x3); };
    EXPECT_EQ(std::memcmp(left[0].data(), left[1].data(), bytes(left[0])), 0);
    EXPECT_EQ(std::memcmp(right[0].data(), right[1].data(), bytes(right[0])), 0);
    if (any_bits) {  // the bits of a NaN depend on operand order
      for (int k = 0; k < 2; ++k) {
        std::replace_if(c[k].begin(), c[k].end(), [](float x) { return std::isnan(x); }, 0.0f);
      }
    }
    EXPECT_EQ(bits_of(c[0]), bits_of(c[1]));
  }
}

}  // namespace
}  // namespace lltm::cpu
