// Packs matrices in every GEMM operand format and layout and compares their product with float64.
// Links only kernels and formats.
#include "cpu/gemm/formats.h"
#include "cpu/kernels.h"
#include "kernel_test.h"

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
LLTM_EACH_ISA(FormatsOfGemm, "default", "avx2", "avx512", "bf16", "emulated_amx");

// In [-1, 1].
template <typename T>
TestMatrix<T> uniform(int64_t rows, int64_t columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(-1, 1);
  return TestMatrix<T>(rows, columns, /*gap=*/2).fill([&] {
    return narrow<T>(distribution(generator));
  });
}

template <typename T>
struct AlignedArray {
  explicit AlignedArray(int64_t size, unsigned char byte = 0)
      : memory(size * sizeof(T) + 64, byte) {}
  T* data() {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<T*>((begin + 63) / 64 * 64);
  }
  std::vector<unsigned char> memory;
};

// Error relative to the sum of the terms' magnitudes.
double error_of(F32Format, int64_t k) {
  return static_cast<double>(k + 2) * 0x1p-24;
}
double error_of(Bf16Format, int64_t k) {
  return static_cast<double>(k + 2) * 0x1p-24;
}
double error_of(Bf16x3Format, int64_t k) {
  return static_cast<double>(k + 8) * 0x1p-23;
}
double error_of(Int8Format, int64_t /*k*/) {
  return 0;
}

// Half a step of at most 1/127 per element, for both factors and all terms.
double absolute_error(Int8Format, int64_t k) {
  return static_cast<double>(k) * (1.01 / 127);
}
template <typename Format>
double absolute_error(Format, int64_t /*k*/) {
  return 0;
}

template <typename Format>
void check_gemm(Format format, int64_t m, int64_t n, int64_t k, bool transposed, bool accumulate) {
  SCOPED_TRACE(
      testing::Message() << "m " << m << ", n " << n << ", k " << k
                         << (transposed ? ", transposed" : ""));
  using Element = typename Format::Element;
  using Unpacked = typename Format::Unpacked;
  constexpr bool kInt8 = std::is_same_v<Format, Int8Format>;
  const auto a = uniform<Unpacked>(m, k, 1), b = uniform<Unpacked>(k, n, 2);
  const int64_t padded_k = Format::padded_k(k), padded_n = Format::padded_n(n);
  const int64_t a_stride = Format::a_stride(k);
  // pack_a_transposed writes the padding: NaN before. pack_a keeps it.
  AlignedArray<Element> a_memory(m * a_stride, transposed && !kInt8 ? 0xFF : 0);
  AlignedArray<Element> b_memory(padded_k * padded_n);
  const Matrix<Element> a_packed = {a_memory.data(), a_stride};
  const PackedB<Element> b_packed = {b_memory.data(), padded_k, padded_n, padded_n};
  if constexpr (!kInt8) {
    if (transposed) {
      ASSERT_TRUE(Format::pack_a_transposed(m, k, padded_k, a.transposed().matrix(), a_packed));
      ASSERT_TRUE(Format::pack_b(b_packed, 0, 0, b.matrix(), k, n));
    }
  }
  if (!transposed || kInt8) {
    ASSERT_TRUE(Format::pack_a(m, k, a.matrix(), a_packed));
    ASSERT_TRUE(Format::pack_b_transposed(b_packed, 0, 0, b.transposed().matrix(), k, n));
  }
  constexpr float kBefore = 0.5f;
  std::vector<float> c(m * padded_n, kBefore);
  Format::gemm(m, as_const(a_packed), as_const(b_packed), {c.data(), padded_n}, accumulate);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const Sum sum(a, b, i, j, accumulate ? kBefore : 0);
      const double bound = error_of(format, k) * sum.magnitude + absolute_error(format, k);
      ASSERT_NEAR(c[i * padded_n + j], sum.value, bound + (kInt8 ? 1e-6 : 0)) << i << ", " << j;
    }
  }
}

template <typename Format>
void check_products(Format format) {
  for (const int64_t m : {1, 3, 6, 17}) {
    for (const int64_t n : {1, 16, 30, 64}) {
      for (const int64_t k : {1, 2, 32, 33, 130}) {
        for (const bool transposed : {false, true}) {
          check_gemm(format, m, n, k, transposed, /*accumulate=*/m == 3);
        }
      }
    }
  }
}

TEST_P(FormatsOfGemm, ProductsOfFloat32) {
  if (!F32Format::available()) GTEST_SKIP() << "the baseline of x86 has none";
  check_products(F32Format{});
}

TEST_P(FormatsOfGemm, ProductsOfBfloat16) {
  if (!Bf16Format::available()) GTEST_SKIP() << "this instruction set has none";
  check_products(Bf16Format{});
}

TEST_P(FormatsOfGemm, ProductsOfSplitFloat32) {
  if (!Bf16x3Format::available()) GTEST_SKIP() << "this instruction set has none";
  check_products(Bf16x3Format{});
}

TEST_P(FormatsOfGemm, ProductsOfBytes) {
  check_products(Int8Format{});
}

// These packing kernels do not require a bfloat16 GEMM.
TEST_P(FormatsOfGemm, PairsOfRowsOfBfloat16AreInterleaved) {
  for (const int64_t k : {1, 2, 31, 32, 33, 70}) {
    for (const int64_t n : {1, 16, 33}) {
      const auto x = uniform<BFloat16>(k, n, 1);
      const int64_t padded_k = Bf16Format::padded_k(k);
      for (const bool transposed : {false, true}) {
        std::vector<BFloat16> memory(padded_k * n, BFloat16{1});
        const PackedB<BFloat16> b = {memory.data(), padded_k, n, n};
        if (transposed) {
          ASSERT_TRUE(Bf16Format::pack_b_transposed(b, 0, 0, x.transposed().matrix(), k, n));
        } else {
          ASSERT_TRUE(Bf16Format::pack_b(b, 0, 0, x.matrix(), k, n));
        }
        for (int64_t row = 0; row < padded_k; ++row) {
          for (int64_t j = 0; j < n; ++j) {
            const double expected = row < k ? x.at(row, j) : 0.0;
            ASSERT_EQ(widen(Bf16Format::at(as_const(b), row, j)), expected) << row << ", " << j;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
