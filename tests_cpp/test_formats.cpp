// Packs matrices in every GEMM operand format and layout and compares their product with float64.
// Links only kernels and formats.
#include "cpu/gemm/formats.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernels.h"
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace lltm::cpu {

// Replaces dispatch.cpp.
static Kernels chosen;
const Kernels& kernels() {
  return chosen;
}

#if defined(LLTM_EMULATED_AMX)
const Kernels* kernels_emulated_amx();
#endif

namespace {

const Kernels* find_kernels(const std::string& isa) {
  if (isa == "emulated_amx") {
#if defined(LLTM_EMULATED_AMX)
    if (lltm_test::cpu_has("avx512")) return kernels_emulated_amx();
#endif
    return nullptr;
  }
  if (!lltm_test::cpu_has(isa)) return nullptr;
  if (isa == "bf16") {  // with the packing of its CPU's other kernels
    static Kernels kernels = kernels_avx512() != nullptr ? *kernels_avx512() : *kernels_default();
    kernels.gemm_bf16_operands = kernels_bf16();
    return &kernels;
  }
  return isa == "avx512" ? kernels_avx512() : isa == "avx2" ? kernels_avx2() : kernels_default();
}

class FormatsOfGemm : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const Kernels* const kernels = find_kernels(GetParam());
    if (kernels == nullptr) GTEST_SKIP() << "this CPU or this compiler has none";
    chosen = *kernels;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Kernels,
    FormatsOfGemm,
    testing::Values("default", "avx2", "avx512", "bf16", "emulated_amx"),
    [](const auto& info) { return info.param; });

template <typename T>
struct Values {
  Values(int64_t r, int64_t c, unsigned seed) : rows(r), columns(c), stride(c + 2) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t k = 0; k < rows * stride; ++k) data.push_back(narrow<T>(uniform(generator)));
  }
  double at(int64_t r, int64_t c) const { return widen(data[r * stride + c]); }
  Matrix<const T> matrix() const { return {data.data(), stride}; }
  // Also transposes the packing.
  Values transposed() const {
    Values y(columns, rows, 0);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) y.data[c * y.stride + r] = data[r * stride + c];
    }
    return y;
  }

  int64_t rows, columns, stride;
  std::vector<T> data;
};

template <typename T>
struct AlignedArray {
  explicit AlignedArray(int64_t size) : memory(size * sizeof(T) + 64) {}
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
  using Operand = typename Format::Operand;
  using Source = typename Format::Source;
  constexpr bool kInt8 = std::is_same_v<Format, Int8Format>;
  const Values<Source> a(m, k, 1), b(k, n, 2);
  const int64_t padded_k = Format::padded_k(k), padded_n = Format::padded_n(n);
  const int64_t a_stride = Format::a_stride(k);
  AlignedArray<Operand> a_memory(m * a_stride), b_memory(padded_k * padded_n);
  const Matrix<Operand> a_packed = {a_memory.data(), a_stride};
  const PackedB<Operand> b_packed = {b_memory.data(), padded_k, padded_n, padded_n};
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
      double sum = accumulate ? kBefore : 0, magnitude = sum;
      for (int64_t l = 0; l < k; ++l) {
        sum += a.at(i, l) * b.at(l, j);
        magnitude += std::abs(a.at(i, l) * b.at(l, j));
      }
      const double bound = error_of(format, k) * magnitude + absolute_error(format, k);
      ASSERT_NEAR(c[i * padded_n + j], sum, bound + (kInt8 ? 1e-6 : 0)) << i << ", " << j;
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
      const Values<BFloat16> x(k, n, 1);
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
