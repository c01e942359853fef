// GEMMs with weights in place, and of small batches, compared with float64. Links only the kernels.
// test_formats.cpp has the others.
#include "kernel_test.h"

#include <algorithm>

namespace lltm::cpu {
namespace {

class F32Kernels : public KernelTest {};
LLTM_EACH_ISA(F32Kernels, "default", "avx2", "avx512");

template <typename B>
void check_in_place(const GemmsF32<B>& gemms, int64_t m, int64_t n, int64_t k0, int64_t k1) {
  SCOPED_TRACE(
      testing::Message() << "m " << m << ", n " << n << ", k " << k0 << " + " << k1 << ", "
                         << sizeof(B) << " bytes");
  const TestMatrix<> a0(m, k0, 3, 1), a1(m, k1, 0, 2);
  const TestMatrix<B> b0(n, k0, 2, 3), b1(n, k1, 1, 4);
  for (const bool accumulate : {false, true}) {
    TestMatrix<> c(m, n, /*gap=*/3);
    if (accumulate) c.fill([] { return 2; });
    gemms.multiply_transposed(
        m,
        {{{a0.matrix(), b0.matrix(), k0}, {a1.matrix(), b1.matrix(), k1}},
         n,
         c.output(),
         accumulate});
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        Sum sum(accumulate ? 2 : 0);
        for (int64_t k = 0; k < k0; ++k) sum.add(a0.at(i, k), b0.at(j, k));
        for (int64_t k = 0; k < k1; ++k) sum.add(a1.at(i, k), b1.at(j, k));
        // At least 4 adjacent lanes, then their sum.
        const auto additions = static_cast<double>((k0 + k1) / 4 + 2 + 6);
        ASSERT_NEAR(c.at(i, j), sum.value, additions * 0x1p-24 * sum.magnitude) << i << ", " << j;
      }
      for (int64_t j = n; i + 1 < m && j < c.stride; ++j) {
        ASSERT_TRUE(std::isnan(c.at(i, j))) << "written after row " << i;
      }
    }
  }
}

TEST_P(F32Kernels, ProductsWithWeightsInPlace) {
  for (int64_t m = 1; m <= 4; ++m) {
    for (const int64_t n : {1, 2, 3, 4, 7, 8, 9, 17}) {
      for (const int64_t k : {0, 1, 15, 16, 17, 100, 300}) {
        for (const int64_t k1 : {0, 1, 33}) {
          check_in_place(gemms_f32_of<float>(*kernels_), m, n, k, k1);
          check_in_place(gemms_f32_of<Half>(*kernels_), m, n, k, k1);
          check_in_place(gemms_f32_of<BFloat16>(*kernels_), m, n, k, k1);
        }
      }
    }
  }
}

// In one chain, a first sum of at least 2^24 would lose each 1.
TEST_P(F32Kernels, ProductsInPlaceAreSummedInChains) {
  constexpr int64_t kK = 1024, kLargest = 16, kN = 9;  // of the first chain, for every width
  const std::vector<float> a(4 * kK, 1.0f);
  std::vector<float> b(kN * kK, 1.0f);
  for (int64_t j = 0; j < kN; ++j) std::fill_n(b.begin() + j * kK, kLargest, 0x1p24f);
  for (int64_t m = 1; m <= 4; ++m) {
    std::vector<float> c(m * kN);
    gemms_f32_of<float>(*kernels_).multiply_transposed(
        m, {{{{a.data(), kK}, {b.data(), kK}, kK}}, kN, {c.data(), kN}, /*accumulate=*/false});
    // All except the first chain's, at most 16 in each of 16 lanes.
    for (const float x : c) ASSERT_GE(x, kLargest * 0x1p24f + (kK - 16 * 16));
  }
}

void check_small_batch(GemmSmallBatch gemm, int64_t m, int64_t n, int64_t k, int64_t additions) {
  SCOPED_TRACE(testing::Message() << "m " << m << ", n " << n << ", k " << k);
  const TestMatrix<> a(m, k, /*gap=*/3, 1), b(k, n, /*gap=*/0, 2);
  for (const bool accumulate : {false, true}) {
    TestMatrix<> c(m + 1, n, /*gap=*/16);
    if (accumulate) c.fill([] { return 2; });
    const TestMatrix<> before = c;
    gemm(m, a.matrix(), {b.data.data(), k, n, n}, c.output(), accumulate);
    expect_product(a, b, before, c, accumulate, static_cast<double>(additions) * 0x1p-24);
  }
}

TEST_P(F32Kernels, ProductsOfSmallBatch) {
  for (int64_t m = 1; m <= 9; ++m) {
    for (const int64_t n : {1, 3, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 100, 192}) {
      for (const int64_t k : {1, 2, 7, 8, 9, 31, 32, 33, 40, 100, 300}) {
        // A chain, the sum of chains, and the result.
        check_small_batch(kernels_->gemm_small_batch, m, n, k, 8 + 4 + 1);
        check_small_batch(kernels_->gemm_small_batch_f32, m, n, k, 32 + (k + 31) / 32 + 1);
      }
    }
  }
}

// A float32 sum would lose the smaller terms, each below half an ulp.
TEST_P(F32Kernels, ProductsOfSmallBatchAreAccumulatedInFloat64) {
  constexpr int64_t kK = 1024, kLargest = 32, kN = 64;
  const std::vector<float> a(4 * kK, 1.0f);
  std::vector<float> b(kK * kN, 0x1p-12f);
  std::fill_n(b.begin(), kLargest * kN, 0x1p14f);
  constexpr double kSum = kLargest * 0x1p14 + (kK - kLargest) * 0x1p-12;
  static_assert(static_cast<float>(kSum) != kLargest * 0x1p14f, "the smaller terms show");
  for (int64_t m = 1; m <= 4; ++m) {
    std::vector<float> c(m * kN);
    kernels_->gemm_small_batch(
        m, {a.data(), kK}, {b.data(), kK, kN, kN}, {c.data(), kN}, /*accumulate=*/false);
    for (const float x : c) ASSERT_EQ(x, static_cast<float>(kSum));
  }
}

}  // namespace
}  // namespace lltm::cpu
