// GEMM of floats quantized to 8 bits: quantization, exact products and scales. Links only the
// kernels.
#include "cpu/kernel/int8.h"
#include "kernel_test.h"

#include <algorithm>
#include <cfenv>
#include <cstring>

namespace lltm::cpu {
namespace {

const Int8Kernels* find_int8(const std::string& isa) {
  if (isa == "vnni" || isa == "dotprod" || isa == "i8mm") {
    if (!lltm_test::cpu_has(isa)) return nullptr;
    return isa == "vnni" ? kernels_vnni() : isa == "i8mm" ? kernels_i8mm() : kernels_dotprod();
  }
  const Kernels* const kernels = find_kernels(isa);
  return kernels == nullptr ? nullptr : &kernels->int8;
}

class Int8Kernel : public KernelTest {
 protected:
  void SetUp() override {
    const Int8Kernels* const kernels = find_int8(GetParam());
    expect_any(kernels);
    if (kernels != nullptr) kernels_ = *kernels;
  }

  Int8Kernels kernels_{};
};
LLTM_EACH_ISA(
    Int8Kernel, "default", "avx2", "avx512", "vnni", "amx", "emulated_amx", "dotprod", "i8mm");

constexpr std::uint8_t kUntouched = 0x5A;

struct LeftOperand {
  LeftOperand(std::int64_t rows, std::int64_t k)
      : stride(int8_row_stride(k)), depth(int8_depth(k)), bytes(rows * stride, {kUntouched}) {}
  Matrix<Int8> matrix() { return {bytes.data(), stride}; }
  Matrix<const Int8> matrix() const { return {bytes.data(), stride}; }
  int at(std::int64_t r, std::int64_t k) const { return bytes[r * stride + k].bits - kInt8Offset; }
  float scale(std::int64_t r) const {
    float value = 0;
    std::memcpy(&value, bytes.data() + r * stride + depth, sizeof(value));
    return value;
  }

  std::int64_t stride, depth;
  std::vector<Int8> bytes;
};

TEST_P(Int8Kernel, RowsAreQuantizedToTheNearestOf255Steps) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const std::int64_t k : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 300}) {
    constexpr std::int64_t kRows = 3;
    const std::int64_t stride = k + 5;
    std::vector<float> x(kRows * stride);
    for (float& value : x) value = normal(generator) * 10;
    LeftOperand a(kRows, k);
    ASSERT_TRUE(kernels_.pack_a(kRows, k, {x.data(), stride}, a.matrix(), /*least=*/0));
    for (std::int64_t r = 0; r < kRows; ++r) {
      float largest = 0;
      for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, std::abs(x[r * stride + j]));
      ASSERT_FLOAT_EQ(a.scale(r), largest / 127);
      for (std::int64_t j = 0; j < k; ++j) {
        ASSERT_NEAR(a.at(r, j) * a.scale(r), x[r * stride + j], a.scale(r) * 0.50001f);
      }
      for (std::int64_t byte = a.depth + 4; byte < a.stride; ++byte) {
        ASSERT_EQ(a.bytes[r * a.stride + byte].bits, kUntouched) << "written behind the row";
      }
    }
  }
}

// The quotient of the largest value can round to 128.
TEST_P(Int8Kernel, OtherRoundingModesQuantizeToTheNextStep) {
  std::vector<float> x(300);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    for (int k = 0; k < 1000; ++k) {
      const float largest = 0.5f + 0.001f * static_cast<float>(k);
      for (std::size_t j = 0; j < x.size(); ++j) {
        x[j] = (j % 2 == 0 ? largest : -largest) / static_cast<float>(1 + j % 5);
      }
      LeftOperand a(1, 300);
      std::fesetround(mode);
      const bool finite = kernels_.pack_a(1, 300, {x.data(), 300}, a.matrix(), /*least=*/0);
      std::fesetround(FE_TONEAREST);
      ASSERT_TRUE(finite);
      for (std::size_t j = 0; j < x.size(); ++j) {
        ASSERT_NEAR(a.at(0, j) * a.scale(0), x[j], a.scale(0) * 1.001f) << mode;
      }
    }
  }
}

TEST_P(Int8Kernel, RowsOfZerosAndOfTheSmallestNumbersAreZero) {
  const std::vector<float> x = {0, -0.0f, 0, 1e-40f, -1e-39f, 0};
  LeftOperand a(2, 3);
  ASSERT_TRUE(kernels_.pack_a(2, 3, {x.data(), 3}, a.matrix(), /*least=*/0));
  for (std::int64_t r = 0; r < 2; ++r) {
    EXPECT_EQ(a.scale(r), 0);
    for (std::int64_t k = 0; k < 3; ++k) EXPECT_EQ(a.at(r, k), 0);
  }
}

TEST_P(Int8Kernel, RowsOfTheLargestNumbersKeepTheirScale) {
  const float largest = std::numeric_limits<float>::max();
  const std::vector<float> x = {largest, -largest, largest / 127};
  LeftOperand a(1, 3);
  ASSERT_TRUE(kernels_.pack_a(1, 3, {x.data(), 3}, a.matrix(), /*least=*/0));
  EXPECT_EQ(a.at(0, 0), 127);
  EXPECT_EQ(a.at(0, 1), -127);
  EXPECT_EQ(a.at(0, 2), 1);
}

TEST_P(Int8Kernel, ValuesThatAreNotFiniteAreReportedWhereverTheyAre) {
  constexpr std::int64_t kRows = 3, kColumns = 37;
  for (const float bad : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    for (std::int64_t at = 0; at < kRows * kColumns; ++at) {
      std::vector<float> x(kRows * kColumns, 1.0f);
      x[at] = bad;
      LeftOperand a(kRows, kColumns);
      ASSERT_FALSE(kernels_.pack_a(kRows, kColumns, {x.data(), kColumns}, a.matrix(), /*least=*/0));
    }
  }
}

// Random bytes, or the extreme values, for the largest sums.
enum class Fill { kRandom, kLargest, kSmallest };

struct Problem {
  Problem(std::int64_t n_rows, std::int64_t n_columns, std::int64_t n_k, Fill fill)
      : rows(n_rows),
        columns(n_columns),
        k(n_k),
        a(rows, k),
        depth(int8_depth(k)),
        b(columns * int8_padded_k(k), {0}) {
    std::mt19937 generator(static_cast<unsigned>(rows * 1000 + columns * 10 + k));
    std::uniform_int_distribution<int> byte(-127, 127);
    std::uniform_real_distribution<float> scale(0.5f, 2.0f);
    const auto next = [&] { return fill == Fill::kRandom ? byte(generator) : 127; };
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t j = 0; j < k; ++j) {
        const int value = fill == Fill::kSmallest ? -next() : next();
        a.bytes[r * a.stride + j].bits = static_cast<std::uint8_t>(value + kInt8Offset);
      }
      const float value = scale(generator);
      std::memcpy(a.bytes.data() + r * a.stride + depth, &value, sizeof(value));
    }
    for (std::int64_t n = 0; n < columns; ++n) {
      std::int32_t sum = 0;
      for (std::int64_t j = 0; j < k; ++j) {
        const int value = next();
        panel(n)[(j / 4 * kInt8Panel + n % kInt8Panel) * 4 + j % 4].bits =
            static_cast<std::uint8_t>(value);
        sum += kInt8Offset * value;
      }
      const float value = scale(generator);
      Int8* const trailer = panel(n) + depth * kInt8Panel + n % kInt8Panel * 4;
      std::memcpy(trailer, &value, sizeof(value));
      std::memcpy(trailer + kInt8Panel * 4, &sum, sizeof(sum));
    }
  }
  Int8* panel(std::int64_t n) { return b.data() + n / kInt8Panel * kInt8Panel * int8_padded_k(k); }
  double right(std::int64_t j, std::int64_t n) {
    return static_cast<std::int8_t>(
        panel(n)[(j / 4 * kInt8Panel + n % kInt8Panel) * 4 + j % 4].bits);
  }
  double right_scale(std::int64_t n) {
    float value = 0;
    std::memcpy(&value, panel(n) + depth * kInt8Panel + n % kInt8Panel * 4, sizeof(value));
    return value;
  }

  std::int64_t rows, columns, k;
  LeftOperand a;
  std::int64_t depth;
  std::vector<Int8> b;
};

// Sums are exact: only the scales and the last addition round. The gaps must not change.
void check_product(
    const Int8Kernels& kernels,
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t k,
    bool accumulate,
    Fill fill = Fill::kRandom) {
  Problem p(rows, columns, k, fill);
  const std::int64_t ldc = columns + 3;
  constexpr float kBefore = 0.75f;
  std::vector<float> c((rows + 2) * ldc, kBefore);
  kernels.gemm(
      rows,
      as_const(p.a.matrix()),
      {p.b.data(), int8_padded_k(k), columns, columns},
      {c.data() + ldc, ldc},
      accumulate);
  for (std::int64_t r = -1; r <= rows; ++r) {
    const float* const row = c.data() + (r + 1) * ldc;
    for (std::int64_t n = r >= 0 && r < rows ? columns : 0; n < ldc; ++n) {
      ASSERT_EQ(row[n], kBefore) << "written at " << r << ", " << n;
    }
    if (r < 0 || r == rows) continue;
    for (std::int64_t n = 0; n < columns; ++n) {
      double sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += p.a.at(r, j) * p.right(j, n);
      const double product = sum * p.a.scale(r) * p.right_scale(n);
      const double expected = accumulate ? kBefore + product : product;
      // Four float roundings.
      const double bound = 4 * 0x1p-24 * (std::abs(product) + kBefore);
      ASSERT_NEAR(row[n], expected, bound)
          << rows << " x " << k << " x " << columns << " at " << r << ", " << n;
    }
  }
}

TEST_P(Int8Kernel, ProductsOfEveryNumberOfRowsAreRightAndWriteNothingElse) {
  for (std::int64_t rows = 1; rows <= 70; ++rows) {
    check_product(kernels_, rows, 48, 76, rows % 2 == 0);
  }
}

TEST_P(Int8Kernel, ProductsOfEveryNumberOfPanelsAreRightAndWriteNothingElse) {
  for (const std::int64_t rows : {1, 2, 5, 6, 7, 33}) {
    for (std::int64_t columns = 16; columns <= 272; columns += 16) {
      check_product(kernels_, rows, columns, 24, columns % 32 == 0);
    }
  }
}

TEST_P(Int8Kernel, ProductsOfEveryDepthAreRight) {
  for (const std::int64_t rows : {1, 3, 7, 40}) {
    for (const std::int64_t k : {1, 2, 3, 4, 5, 31, 32, 33, 60, 61, 64, 65, 100, 257, 1536}) {
      check_product(kernels_, rows, 32, k, false);
      check_product(kernels_, rows, 32, k, true);
    }
  }
}

TEST_P(Int8Kernel, TheLargestSumsDoNotOverflow) {
  for (const Fill fill : {Fill::kLargest, Fill::kSmallest}) {
    check_product(kernels_, 1, 16, kInt8MostK, false, fill);
    check_product(kernels_, 6, 16, kInt8MostK, false, fill);
  }
}

// Without accumulation: CPUs without fused multiply-add round twice.
TEST_P(Int8Kernel, ProductsAreTheSameBitsOnEveryCpu) {
  const Int8Kernels& others = kernels_default()->int8;
  for (const std::int64_t rows : {1, 5, 37}) {
    for (const std::int64_t k : {3, 64, 100}) {
      constexpr std::int64_t kColumns = 80;
      Problem p(rows, kColumns, k, Fill::kRandom);
      const PackedB<const Int8> b = {p.b.data(), int8_padded_k(k), kColumns, kColumns};
      std::vector<float> ours(rows * kColumns), theirs(rows * kColumns);
      kernels_.gemm(rows, as_const(p.a.matrix()), b, {ours.data(), kColumns}, false);
      others.gemm(rows, as_const(p.a.matrix()), b, {theirs.data(), kColumns}, false);
      ASSERT_EQ(ours, theirs) << rows << " x " << k;
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
