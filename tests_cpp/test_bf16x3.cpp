// Parts, layouts, results and rounding errors. Links only the kernels.
#include "kernel_test.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lltm::cpu {
namespace {

using Operand = std::vector<BFloat16x3>;

class Bf16x3 : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (kernels_ != nullptr) bf16x3_ = kernels_->bf16x3;
  }

  Bf16x3Kernels bf16x3_{};
};
LLTM_EACH_ISA(Bf16x3, "emulated_amx", "amx");

TestMatrix<> normal(std::int64_t rows, std::int64_t columns, unsigned seed = 0) {
  return {rows, columns, /*gap=*/5, seed};
}

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

Operand left_operand(const Bf16x3Kernels& kernels, const TestMatrix<>& x) {
  const std::int64_t stride = bf16x3_row_stride(x.columns);
  Operand operand(x.rows * stride, kUntouched);
  EXPECT_TRUE(kernels.pack_a(x.rows, x.columns, x.matrix(), {operand.data(), stride}));
  return operand;
}

Operand right_operand(const Bf16x3Kernels& kernels, const TestMatrix<>& x) {
  const std::int64_t depth = round_up(x.rows, 32);
  Operand operand(depth * round_up(x.columns, 16), kUntouched);
  EXPECT_TRUE(kernels.pack_b(x.rows, x.columns, x.matrix(), {operand.data(), depth * 16}));
  return operand;
}

TEST_P(Bf16x3, PartsOfEveryMagnitudeSumUpToTheNumber) {
  std::mt19937 generator(1);
  constexpr int kSmallest = -103, kLargest = 59;  // exponents, one per row
  TestMatrix<> x = normal(kLargest - kSmallest + 1, 64);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    const auto exponent = static_cast<std::uint32_t>(r + kSmallest + 127) << 23;
    for (std::int64_t c = 0; c < x.columns; ++c) {
      const auto random = static_cast<std::uint32_t>(generator());
      x(r, c) = std::bit_cast<float>((random & 0x807FFFFFu) | exponent);
    }
    x(r, 0) = std::bit_cast<float>(exponent | 0x7FFFFFu);
    x(r, 1) = std::bit_cast<float>(exponent | 1u);
  }
  x(0, 2) = 0.0f;
  const Operand operand = left_operand(bf16x3_, x);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    for (std::int64_t c = 0; c < x.columns; ++c) {
      ASSERT_EQ(left(operand, bf16x3_row_stride(64), r, c), x.at(r, c)) << "row " << r;
    }
  }
}

TEST_P(Bf16x3, ValuesOutOfRangeAreReportedWhereverTheyAre) {
  const TestMatrix<> good = normal(40, 45);
  for (const float bad : {kBf16x3Limit, -1.5f * kBf16x3Limit, INFINITY, -INFINITY}) {
    for (std::int64_t r = 0; r < good.rows; ++r) {
      for (std::int64_t c = 0; c < good.columns; ++c) {
        TestMatrix<> x = good;
        x(r, c) = bad;
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
  TestMatrix<> x = normal(1, 3);
  x(0, 1) = std::numeric_limits<float>::quiet_NaN();
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
    const TestMatrix<> x = normal(rows, columns);
    const Operand by_rows = left_operand(bf16x3_, x);
    const std::int64_t stride = bf16x3_row_stride(columns);
    Operand by_columns(rows * stride, kUntouched);
    const TestMatrix<> xt = x.transposed();
    ASSERT_TRUE(
        bf16x3_.pack_a_transposed(xt.rows, xt.columns, xt.matrix(), {by_columns.data(), stride}));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < round_up(columns, 32); ++k) {
        const double expected = k < columns ? x.at(r, k) : 0.0;
        ASSERT_EQ(left(by_rows, stride, r, k), expected);
        ASSERT_EQ(left(by_columns, stride, r, k), expected);
      }
      for (std::int64_t k = round_up(columns, 32); k < stride; ++k) {
        ASSERT_EQ(by_rows[r * stride + k].bits[0], 0x5A5A) << "written after the row";
        ASSERT_EQ(by_columns[r * stride + k].bits[0], 0x5A5A) << "written after the row";
      }
    }
  }
}

TEST_P(Bf16x3, RightOperandsHaveTheElementsThenZerosToTheGroupsEnd) {
  for (const auto [rows, columns] : kSizes) {
    const TestMatrix<> x = normal(rows, columns);
    const Operand packed = right_operand(bf16x3_, x);
    const std::int64_t depth = round_up(rows, 32);
    Operand transposed(packed.size(), kUntouched);
    const TestMatrix<> xt = x.transposed();
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

// The kernel writes entire panels: those of zeros are exact.
void check_product(
    const Bf16x3Kernels& kernels,
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    bool accumulate) {
  SCOPED_TRACE(testing::Message() << rows << " x " << depth << " x " << columns);
  const std::int64_t width = round_up(columns, 16);
  const TestMatrix<> a = normal(rows, depth, 1);
  TestMatrix<> b = normal(depth, width, 2);
  for (std::int64_t k = 0; k < depth; ++k) {
    for (std::int64_t n = columns; n < width; ++n) b(k, n) = 0;
  }
  const Operand left = left_operand(kernels, a);
  const Operand right = right_operand(kernels, b);
  TestMatrix<> c(rows + 1, width, /*gap=*/3);
  if (accumulate) c.fill([] { return 0.75F; });
  const TestMatrix<> before = c;
  kernels.gemm(
      rows,
      {left.data(), bf16x3_row_stride(depth)},
      {right.data(), round_up(depth, 32), width, width},
      c.output(),
      accumulate);
  // The parts omit 2^-23 of each product. Rounding errors grow with the square root of the number
  // of terms.
  expect_product(
      a, b, before, c, accumulate, 0x1p-23 + 0x1p-24 * std::sqrt(6.0 * static_cast<double>(depth)));
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
  const TestMatrix<> a = normal(kRows, kDepth, 3);
  const TestMatrix<> b = normal(kDepth, kColumns, 4);
  const Operand left = left_operand(bf16x3_, a);
  const Operand right = right_operand(bf16x3_, b);
  std::vector<float> c(kRows * kColumns);
  bf16x3_.gemm(
      kRows,
      {left.data(), bf16x3_row_stride(kDepth)},
      {right.data(), kDepth, kColumns, kColumns},
      {c.data(), kColumns},
      false);
  double bf16x3_error = 0, float_error = 0;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t n = 0; n < kColumns; ++n) {
      const double exact = Sum(a, b, r, n, 0).value;
      float sum = 0;
      for (std::int64_t k = 0; k < kDepth; ++k) {
        sum = std::fma(static_cast<float>(a.at(r, k)), static_cast<float>(b.at(k, n)), sum);
      }
      bf16x3_error = std::max(bf16x3_error, std::abs(c[r * kColumns + n] - exact));
      float_error = std::max(float_error, std::abs(sum - exact));
    }
  }
  EXPECT_GT(float_error, 0);
  EXPECT_LE(bf16x3_error, float_error);
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& x) {
  std::vector<std::uint32_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), [](float value) {
    return std::bit_cast<std::uint32_t>(value);
  });
  return bits;
}

// Includes denormals, infinities and NaN.
TEST(AmxEmulation, IsBitwiseIdenticalToTheInstructions) {
  const Kernels* const both[] = {find_kernels("emulated_amx"), find_kernels("amx")};
  if (both[0] == nullptr || both[1] == nullptr)
    GTEST_SKIP() << "this CPU or this compiler has none";
  constexpr std::int64_t kRows = 45, kColumns = 48, kDepth = 96;
  std::mt19937 generator(5);
  for (const bool any_bits : {false, true}) {
    TestMatrix<> a = normal(kRows, kDepth, 6), b = normal(kDepth, kColumns, 7);
    for (std::vector<float>* const values : {&a.data, &b.data}) {
      for (float& value : *values) {
        const auto random = static_cast<std::uint32_t>(generator());
        if (any_bits) value = std::bit_cast<float>(random);
        if (!any_bits && random % 16 == 0) value *= 0x1p-120f;
      }
    }
    Operand left[2], right[2];
    std::vector<float> c[2];
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
