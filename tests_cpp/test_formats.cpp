// Packs matrices in every GEMM operand format and layout and compares their product with float64.
// Links only kernels and formats. test_int8.cpp has the products of bytes.
#include "cpu/gemm/formats.h"
#include "cpu/kernels.h"
#include "kernel_test.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace lltm::cpu {

// Replaces dispatch.cpp.
static Kernels chosen;
const Kernels& kernels() {
  return chosen;
}

namespace {

class FormatsOfGemm : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    // With the packing of its CPU's other kernels.
    const bool bf16 = GetParam() == "bf16", has_avx512 = find_kernels("avx512") != nullptr;
    const std::string isa = !bf16 ? GetParam() : has_avx512 ? "avx512" : "default";
    const Kernels* const kernels =
        bf16 && !lltm_test::cpu_has("bf16") ? nullptr : find_kernels(isa);
    if (kernels == nullptr) GTEST_SKIP() << "this CPU or this compiler has none";
    chosen = *kernels;
    if (bf16) chosen.gemm_bf16_operands = kernels_bf16();
  }
};
LLTM_EACH_ISA(FormatsOfGemm, "default", "avx2", "avx512", "bf16", "emulated_amx", "amx");

// In [-1, 1].
template <typename T>
TestMatrix<T> uniform(int64_t rows, int64_t columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(-1, 1);
  return TestMatrix<T>(rows, columns, /*gap=*/2).fill([&] {
    return narrow<T>(distribution(generator));
  });
}

// All bytes are 0xFF, which is NaN.
template <typename T>
struct AlignedArray {
  explicit AlignedArray(int64_t size) : memory(size * sizeof(T) + 64, 0xFF) {}
  T* data() {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<T*>((begin + 63) / 64 * 64);
  }
  std::vector<unsigned char> memory;
};

// Error relative to the sum of the terms' magnitudes. Each term is added in at most one chain, then
// in the sum of chains.
double error_of(F32Format, int64_t m, int64_t k) {
  const int64_t chain = longest_chain(m);
  return static_cast<double>(std::min(k, chain) + k / chain + 2) * 0x1p-24;
}
double error_of(Bf16Format, int64_t /*m*/, int64_t k) {
  return static_cast<double>(k + 2) * 0x1p-24;
}
// The parts omit 2^-23 of each product. Rounding errors grow with the square root of the number of
// terms.
double error_of(Bf16x3Format, int64_t /*m*/, int64_t k) {
  return 0x1p-23 + 0x1p-24 * std::sqrt(6.0 * static_cast<double>(k));
}

// The elements of B before packing, or in place.
template <typename Format>
struct Right {
  using Element = typename Format::Unpacked;
};
template <typename T>
struct Right<F32InPlaceFormat<T>> {
  using Element = T;
};

// C's last row, and its gaps, must be unchanged.
template <typename Format>
void check_gemm(Format format, int64_t m, int64_t n, int64_t k, bool transposed, bool accumulate) {
  SCOPED_TRACE(
      testing::Message() << "m " << m << ", n " << n << ", k " << k
                         << (transposed ? ", transposed" : ""));
  using Element = typename Format::Element;
  using Unpacked = typename Format::Unpacked;
  constexpr bool kBInPlace =
      std::is_base_of_v<F32Format, Format> && !std::is_same_v<F32Format, Format>;
  const auto a = uniform<Unpacked>(m, k, 1);
  const auto b = uniform<typename Right<Format>::Element>(k, n, 2);
  const int64_t padded_k = Format::padded_k(k), padded_n = Format::padded_n(n);
  TestMatrix<> c(m + 1, padded_n, /*gap=*/5);  // NaN
  if (accumulate) c.fill([] { return 0.5F; });
  const TestMatrix<> before = c;
  if constexpr (kBInPlace) {
    Format::gemm(m, a.matrix(), {b.data.data(), k, n, b.stride}, c.output(), accumulate);
  } else {
    const int64_t a_stride = Format::a_stride(k);
    AlignedArray<Element> a_memory(m * a_stride), b_memory(padded_k * padded_n);
    const Matrix<Element> a_packed = {a_memory.data(), a_stride};
    const PackedB<Element> b_packed = {b_memory.data(), padded_k, padded_n, padded_n};
    if (transposed) {
      ASSERT_TRUE(Format::pack_a_transposed(m, k, padded_k, a.transposed().matrix(), a_packed));
      ASSERT_TRUE(Format::pack_b_transposed(b_packed, 0, 0, b.transposed().matrix(), k, n));
    } else {
      if (Format::kInPlace) std::fill_n(a_packed.data, m * a_stride, Element{});  // not written
      ASSERT_TRUE(Format::pack_a(m, k, a.matrix(), a_packed));
      ASSERT_TRUE(Format::pack_b(b_packed, 0, 0, b.matrix(), k, n));
    }
    Format::gemm(m, as_const(a_packed), as_const(b_packed), c.output(), accumulate);
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const Sum sum(a, b, i, j, accumulate ? 0.5 : 0);
      ASSERT_NEAR(c.at(i, j), sum.value, error_of(format, m, k) * sum.magnitude) << i << ", " << j;
    }
    for (int64_t j = padded_n; j < c.stride; ++j) {
      ASSERT_TRUE(std::isnan(c.at(i, j))) << "written after row " << i;
    }
  }
  for (int64_t j = 0; j < padded_n; ++j) {
    const double last = c.at(m, j);
    ASSERT_TRUE(accumulate ? last == before.at(m, j) : std::isnan(last)) << j;
  }
}

template <typename Format>
void check_products(Format format) {
  for (int64_t m = 1; m <= 50; ++m) {
    for (const int64_t n : {1, 7, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 112, 130}) {
      check_gemm(format, m, n, m % 3 == 0 ? 34 : 5, m % 2 == 0, /*accumulate=*/m % 4 < 2);
    }
  }
  for (const int64_t m : {1, 8, 17, 33}) {
    for (const int64_t k : {1, 2, 31, 32, 33, 64, 65, 100, 129, 130, 300, 514, 1030, 1536}) {
      for (const bool transposed : {false, true}) {
        check_gemm(format, m, 48, k, transposed, /*accumulate=*/transposed == (m < 9));
      }
    }
  }
}

TEST_P(FormatsOfGemm, ProductsOfFloat32) {
  if (!F32Format::available()) GTEST_SKIP() << "the baseline of x86 has none";
  check_products(F32Format{});
  check_products(F32InPlaceFormat<float>{});
  check_products(F32InPlaceFormat<Half>{});
  check_products(F32InPlaceFormat<BFloat16>{});
}

TEST_P(FormatsOfGemm, ProductsOfBfloat16) {
  if (!Bf16Format::available()) GTEST_SKIP() << "this instruction set has none";
  check_products(Bf16Format{});
}

TEST_P(FormatsOfGemm, ProductsOfSplitFloat32) {
  if (!Bf16x3Format::available()) GTEST_SKIP() << "this instruction set has none";
  check_products(Bf16x3Format{});
}

}  // namespace
}  // namespace lltm::cpu
