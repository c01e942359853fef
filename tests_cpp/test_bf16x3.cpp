// Parts of numbers, and the emulation of AMX. test_formats.cpp has the products. Links only the
// kernels.
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

Operand left_operand(const Bf16x3Kernels& kernels, const TestMatrix<>& x) {
  const std::int64_t stride = bf16x3_row_stride(x.columns);
  Operand operand(x.rows * stride, kUntouched);
  EXPECT_TRUE(kernels.pack_a(x.rows, x.columns, x.matrix(), {operand.data(), stride}));
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
