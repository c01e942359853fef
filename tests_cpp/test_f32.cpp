// Compared with float64. Links only the kernels.
#include "cpu/kernel/table.h"
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace lltm::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const Kernels* find_kernels(const std::string& isa) {
  if (!lltm_test::cpu_has(isa)) return nullptr;
  return isa == "avx512" ? kernels_avx512() : isa == "avx2" ? kernels_avx2() : kernels_default();
}

// NaN gaps between rows detect reads.
struct Values {
  Values(int64_t r, int64_t c, unsigned seed, int64_t gap = 0)
      : rows(r), columns(c), stride(c + gap), data(rows * stride, kNaN) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) data[i * stride + j] = normal(generator);
    }
  }
  float at(int64_t r, int64_t c) const { return data[r * stride + c]; }
  Matrix<const float> matrix() const { return {data.data(), stride}; }

  int64_t rows, columns, stride;
  std::vector<float> data;
};

std::vector<float> stored(const Kernels& /*kernels*/, Values& values, float /*type*/) {
  return values.data;
}
template <typename T>
std::vector<T> stored(const ArrayConvert<T>& convert, Values& values) {
  const auto size = static_cast<int64_t>(values.data.size());
  std::vector<T> result(size);
  convert.store(values.data.data(), result.data(), size);
  convert.load(result.data(), values.data.data(), size);
  return result;
}
std::vector<Half> stored(const Kernels& kernels, Values& values, Half /*type*/) {
  return stored(kernels.convert_f16, values);
}
std::vector<BFloat16> stored(const Kernels& kernels, Values& values, BFloat16 /*type*/) {
  return stored(kernels.convert_bf16, values);
}

class F32Kernels : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    kernels_ = find_kernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this CPU or this compiler has none";
  }

  const Kernels* kernels_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(
    Kernels, F32Kernels, testing::Values("default", "avx2", "avx512"), [](const auto& info) {
      return info.param;
    });

class PackedF32 : public F32Kernels {
 protected:
  void SetUp() override {
    F32Kernels::SetUp();
    if (!IsSkipped() && gemms_f32_of<float>(*kernels_).multiply == nullptr)
      GTEST_SKIP() << "the baseline has none";
  }

  // Products in chains of `chain` terms, with B in each storage type.
  void check(int64_t m, int64_t n, int64_t k, int64_t chain, bool accumulate) const {
    check_of<float>(m, n, k, chain, accumulate);
    check_of<Half>(m, n, k, chain, accumulate);
    check_of<BFloat16>(m, n, k, chain, accumulate);
  }

  template <typename B>
  void check_of(int64_t m, int64_t n, int64_t k, int64_t chain, bool accumulate) const {
    SCOPED_TRACE(
        testing::Message() << "m " << m << ", n " << n << ", k " << k << ", " << sizeof(B)
                           << " bytes");
    const Values a(m, k, 1, /*gap=*/3);
    Values b(k, n, 2, /*gap=*/m % 2);
    const std::vector<B> b_stored = stored(*kernels_, b, B{});
    const Values before(m, n, 3, /*gap=*/5);
    Values c = before;
    if (!accumulate) std::fill(c.data.begin(), c.data.end(), kNaN);
    gemms_f32_of<B>(*kernels_).multiply(
        m,
        a.matrix(),
        {b_stored.data(), k, n, b.stride},
        {c.data.data(), c.stride},
        chain,
        accumulate);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = accumulate ? before.at(i, j) : 0, magnitude = std::abs(sum);
        for (int64_t l = 0; l < k; ++l) {
          sum += double{a.at(i, l)} * b.at(l, j);
          magnitude += std::abs(double{a.at(i, l)} * b.at(l, j));
        }
        // Each term is added in at most one chain, then in the sum of chains.
        const auto additions = static_cast<double>(chain + k / chain + 2);
        ASSERT_NEAR(c.at(i, j), sum, additions * 0x1p-24 * magnitude) << i << ", " << j;
      }
      for (int64_t j = n; j < c.stride; ++j) {
        ASSERT_TRUE(std::isnan(c.data[i * c.stride + j])) << "written behind row " << i;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Kernels, PackedF32, testing::Values("default", "avx2", "avx512"), [](const auto& info) {
      return info.param;
    });

TEST_P(PackedF32, TilesOfAllSizes) {
  for (int64_t m = 1; m <= 26; ++m) {
    for (const int64_t n : {1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 112, 130}) {
      check(m, n, 5, 64, /*accumulate=*/m % 2 == 1);
    }
  }
}

TEST_P(PackedF32, PiecesOfKAreAddedOnce) {
  for (const int64_t k : {1, 2, 31, 32, 33, 64, 65, 100, 129, 300}) {
    for (const int64_t chain : {1, 32, 64}) {
      check(8, 48, k, chain, /*accumulate=*/false);
      check(13, 20, k, chain, /*accumulate=*/true);
    }
  }
}

TEST_P(PackedF32, RowsDoNotDependOnEachOther) {
  const Values a(9, 40, 1), b(40, 50, 2);
  const PackedB<const float> packed = {b.data.data(), 40, 50, 50};
  std::vector<float> all(9 * 50), one(50);
  gemms_f32_of<float>(*kernels_).multiply(
      9, a.matrix(), packed, {all.data(), 50}, 64, /*accumulate=*/false);
  for (int64_t r = 0; r < 9; ++r) {
    gemms_f32_of<float>(*kernels_).multiply(
        1, a.matrix().from(r), packed, {one.data(), 50}, 64, /*accumulate=*/false);
    for (int64_t j = 0; j < 50; ++j) ASSERT_EQ(one[j], all[r * 50 + j]);
  }
}

template <typename B>
void check_in_place(
    const Kernels& kernels,
    void (*gemm)(int64_t, const InPlaceGemm<B>&),
    int64_t m,
    int64_t n,
    int64_t k0,
    int64_t k1) {
  SCOPED_TRACE(
      testing::Message() << "m " << m << ", n " << n << ", k " << k0 << " + " << k1 << ", "
                         << sizeof(B) << " bytes");
  const Values a0(m, k0, 1, 3), a1(m, k1, 2);
  Values b0(n, k0, 3, 2), b1(n, k1, 4, 1);
  const std::vector<B> b0_stored = stored(kernels, b0, B{}), b1_stored = stored(kernels, b1, B{});
  const int64_t stride = n + 3;
  for (const bool accumulate : {false, true}) {
    std::vector<float> c(m * stride, accumulate ? 2 : std::numeric_limits<float>::quiet_NaN());
    gemm(
        m,
        {{{a0.matrix(), {b0_stored.data(), b0.stride}, k0},
          {a1.matrix(), {b1_stored.data(), b1.stride}, k1}},
         n,
         {c.data(), stride},
         accumulate});
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = accumulate ? 2 : 0, magnitude = sum;
        const auto add = [&](float x, float y) {
          sum += double{x} * y;
          magnitude += std::abs(double{x} * y);
        };
        for (int64_t k = 0; k < k0; ++k) add(a0.at(i, k), b0.at(j, k));
        for (int64_t k = 0; k < k1; ++k) add(a1.at(i, k), b1.at(j, k));
        // At least 4 adjacent lanes, then their sum.
        const auto additions = static_cast<double>((k0 + k1) / 4 + 2 + 6);
        ASSERT_NEAR(c[i * stride + j], sum, additions * 0x1p-24 * magnitude) << i << ", " << j;
      }
      for (int64_t j = n; j < stride; ++j) {
        const float after = c[i * stride + j];
        ASSERT_TRUE(accumulate ? after == 2 : std::isnan(after)) << "written behind row " << i;
      }
    }
  }
}

TEST_P(F32Kernels, ProductsWithWeightsInPlace) {
  for (int64_t m = 1; m <= 4; ++m) {
    for (const int64_t n : {1, 2, 3, 4, 7, 8, 9, 17}) {
      for (const int64_t k : {0, 1, 15, 16, 17, 100, 300}) {
        for (const int64_t k1 : {0, 1, 33}) {
          check_in_place(
              *kernels_, gemms_f32_of<float>(*kernels_).multiply_transposed, m, n, k, k1);
          check_in_place(*kernels_, gemms_f32_of<Half>(*kernels_).multiply_transposed, m, n, k, k1);
          check_in_place(
              *kernels_, gemms_f32_of<BFloat16>(*kernels_).multiply_transposed, m, n, k, k1);
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
  const Values a(m, k, 1, /*gap=*/3), b(k, n, 2);
  const int64_t stride = n + 3;
  for (const bool accumulate : {false, true}) {
    constexpr int64_t kBehind = 16;
    std::vector<float> c(
        m * stride + kBehind, accumulate ? 2 : std::numeric_limits<float>::quiet_NaN());
    gemm(m, {a.data.data(), a.stride}, {b.data.data(), k, n, n}, {c.data(), stride}, accumulate);
    const auto expect_untouched = [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        ASSERT_TRUE(accumulate ? c[j] == 2 : std::isnan(c[j])) << "written behind a row of C";
      }
    };
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = accumulate ? 2 : 0, magnitude = sum;
        for (int64_t l = 0; l < k; ++l) {
          const double term = double{a.at(i, l)} * b.at(l, j);
          sum += term;
          magnitude += std::abs(term);
        }
        const double bound = static_cast<double>(additions) * 0x1p-24;
        ASSERT_NEAR(c[i * stride + j], sum, bound * magnitude) << i << ", " << j;
      }
      expect_untouched(i * stride + n, (i + 1) * stride);
    }
    expect_untouched(m * stride, m * stride + kBehind);
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
