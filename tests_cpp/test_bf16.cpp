// Compares the bfloat16 GEMM of each instruction set with float64. Links only the kernels.
#include "kernel_test.h"

namespace lltm::cpu {
namespace {

GemmBf16 find_gemm(const std::string& isa) {
  if (isa == "bf16") return lltm_test::cpu_has(isa) ? kernels_bf16() : nullptr;
  const Kernels* const kernels = find_kernels(isa);
  return kernels == nullptr ? nullptr : kernels->gemm_bf16_operands;
}

// Values that bfloat16 represents exactly.
struct Operands {
  template <typename Value>
  Operands(int64_t m, int64_t n, int64_t k, const Value& value)
      : a(m, k, /*gap=*/4), b(k, n, /*gap=*/m % 3) {
    const auto exact = [&] { return narrow<BFloat16>(value()); };
    a.fill(exact);
    b.fill(exact);
    pairs.assign(k * b.stride, narrow<BFloat16>(std::numeric_limits<float>::quiet_NaN()));
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < n; ++j) pairs[(i / 2 * b.stride + j) * 2 + i % 2] = b(i, j);
    }
  }
  PackedB<const BFloat16> right() const { return {pairs.data(), b.rows, b.columns, b.stride}; }

  TestMatrix<BFloat16> a, b;
  std::vector<BFloat16> pairs;
};

class Bf16Kernels : public KernelTest {
 protected:
  void SetUp() override {
    gemm_ = find_gemm(GetParam());
    expect_any(reinterpret_cast<const void*>(gemm_));
  }

  // Each element's error is at most `additions` times half an ulp of the sum of magnitudes.
  template <typename Value>
  void check(
      int64_t m, int64_t n, int64_t k, bool accumulate, const Value& value, double additions) {
    SCOPED_TRACE(testing::Message() << "m " << m << ", n " << n << ", k " << k);
    const Operands operands(m, n, k, value);
    TestMatrix<> c(m + 1, n, /*gap=*/5);
    if (accumulate) c.fill(value);
    const TestMatrix<> before = c;
    gemm_(m, operands.a.matrix(), operands.right(), c.output(), accumulate);
    expect_product(operands.a, operands.b, before, c, accumulate, additions * 0x1p-24);
  }

  // Sums of small integers are exact.
  void check_exact(int64_t m, int64_t n, int64_t k, bool accumulate) {
    std::uniform_int_distribution<int> integer(-8, 8);
    check(m, n, k, accumulate, [&] { return static_cast<float>(integer(generator_)); }, 0);
  }

  std::mt19937 generator_{1};
  GemmBf16 gemm_ = nullptr;
};

LLTM_EACH_ISA(Bf16Kernels, "avx512", "bf16", "emulated_amx", "amx");

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
  const auto value = [&] { return widen(narrow<BFloat16>(normal(generator_))); };
  for (const int64_t k : {2, 32, 64, 300, 1000}) {
    check(9, 50, k, /*accumulate=*/false, value, static_cast<double>(k));
    check(40, 50, k, /*accumulate=*/true, value, static_cast<double>(k));
  }
}

TEST_P(Bf16Kernels, RowsDoNotDependOnEachOther) {
  std::normal_distribution<float> normal;
  Operands operands(40, 50, 600, [&] { return normal(generator_); });
  operands.a(7, 0) = narrow<BFloat16>(std::numeric_limits<float>::infinity());
  std::vector<float> all(40 * 50), one(50);
  gemm_(40, operands.a.matrix(), operands.right(), {all.data(), 50}, /*accumulate=*/false);
  for (int64_t r = 0; r < 40; ++r) {
    gemm_(
        1,
        operands.a.matrix().from(r),
        operands.right(),
        {one.data(), 50},
        /*accumulate=*/false);
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
