// Compiles gemm.cpp with cuda_on_host.h. Sums of small integers are exact in every dtype.
#include "aten/split_k.h"
#include "cuda/gemm/gemm.h"
#include "cuda_on_host.h"
#include "testing.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>

namespace lltm_test {
namespace {

using lltm::operand;
using lltm::result;
using lltm::transposed;
using lltm::cuda::Gemm;

at::Tensor integers(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(-2, 3, sizes, generator, at::TensorOptions(dtype));
}

at::Tensor inner_columns(int64_t rows, int64_t cols, at::ScalarType dtype, uint64_t seed) {
  return integers({rows, cols + 3}, dtype, seed).slice(1, 2, 2 + cols);
}

// PyTorch allows any stride for a dimension of size 1; cuBLAS checks it.
TEST(CudaOperands, ASingleRowOrColumnHasTheRowLengthAsLeadingDimension) {
  const int64_t far = int64_t{1} << 40;
  const at::Tensor memory = at::randn({5});
  const at::Tensor row = memory.as_strided({1, 5}, {far, 1});
  const at::Tensor column = memory.as_strided({5, 1}, {1, far});
  for (const at::Tensor& tensor : {row, column}) {
    ASSERT_TRUE(lltm::as_operand(tensor).is_same(tensor));
    const lltm::GemmOperand operand = lltm::operand(tensor);
    EXPECT_EQ(operand.data, memory.const_data_ptr());
    EXPECT_EQ(operand.rows, tensor.size(0));
    EXPECT_EQ(operand.cols, tensor.size(1));
    EXPECT_EQ(operand.ld, tensor.size(1));
    EXPECT_FALSE(operand.transposed);
    EXPECT_EQ(lltm::transposed(operand).ld, operand.ld);
  }
  EXPECT_EQ(lltm::result(row).ld, 5);
  EXPECT_EQ(lltm::result(memory.as_strided({0, 5}, {far, 1})).ld, 5);
}

TEST(CudaOperands, RowsThatOverlapAreCopied) {
  const at::Tensor windows = at::randn({10}).unfold(0, 5, 1);
  for (const at::Tensor& tensor : {windows, windows.t(), windows[0].expand({6, 5})}) {
    const at::Tensor operand = lltm::as_operand(tensor);
    EXPECT_TRUE(operand.is_contiguous());
    EXPECT_TRUE(identical(operand, tensor));
  }
}

TEST(CudaOperands, UnalignedOperandsOfManyGemmsArePaddedOnce) {
  const auto is_copied = [](const at::Tensor& tensor, int64_t rows, int64_t cols) {
    const at::Tensor operand = lltm::as_padded_operand(tensor, rows, cols, 16);
    EXPECT_EQ(operand.sizes(), (at::IntArrayRef{rows, cols}));
    EXPECT_TRUE(
        identical(operand, at::pad(tensor, {0, cols - tensor.size(1), 0, rows - tensor.size(0)})));
    const auto size = static_cast<int64_t>(tensor.element_size());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(operand.const_data_ptr()) % 16, 0);
    EXPECT_EQ(operand.stride(0) * size % 16, 0);
    EXPECT_EQ(operand.stride(1), 1);
    return !operand.is_alias_of(tensor);
  };
  for (const at::ScalarType dtype : kDtypes) {
    const int64_t access = 16 / static_cast<int64_t>(c10::elementSize(dtype));
    EXPECT_EQ(lltm::padded_cols(access, dtype, 16), access);
    EXPECT_EQ(lltm::padded_cols(access + 1, dtype, 16), 2 * access);
    const at::Tensor even = integers({3, 4 * access}, dtype, 1);
    EXPECT_FALSE(is_copied(even, 3, 4 * access));
    EXPECT_FALSE(is_copied(even.slice(1, 0, access), 3, access));
    EXPECT_TRUE(is_copied(even.slice(1, 1, 1 + access), 3, access)) << "begins in between";
    EXPECT_TRUE(is_copied(even.t(), 4 * access, 3)) << "lies by columns";
    EXPECT_TRUE(is_copied(even, 4, 4 * access)) << "more rows";
    const at::Tensor odd = integers({3, 4 * access + 1}, dtype, 1);
    EXPECT_TRUE(is_copied(odd.slice(1, 0, access), 3, access)) << "rows begin in between";
    EXPECT_TRUE(is_copied(odd, 3, 5 * access)) << "more columns";
    EXPECT_TRUE(is_copied(odd, 3, 4 * access + 1));
  }
}

class CudaGemm : public testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  at::ScalarType result_dtype() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaGemm,
    testing::Values(
        std::tuple(at::kDouble, at::kDouble),
        std::tuple(at::kFloat, at::kFloat),
        std::tuple(at::kHalf, at::kHalf),
        std::tuple(at::kHalf, at::kFloat),
        std::tuple(at::kBFloat16, at::kBFloat16),
        std::tuple(at::kBFloat16, at::kFloat)),
    [](const auto& info) {
      return name(std::get<0>(info.param)) + "_to_" + name(std::get<1>(info.param));
    });

TEST_P(CudaGemm, OperandsMayBeRowMajorOrColumnMajorViews) {
  for (const auto& [m, k, n] : {std::tuple(4, 5, 3), {1, 5, 3}, {4, 1, 3}, {4, 5, 1}, {1, 1, 1}}) {
    for (const bool accumulate : {false, true}) {
      for (const int columns : {0, 1, 2, 3}) {  // which of a and b are column-major
        SCOPED_TRACE(testing::Message() << m << ' ' << k << ' ' << n << ' ' << columns);
        const bool a_t = (columns & 1) != 0, b_t = (columns & 2) != 0;
        const at::Tensor a = inner_columns(a_t ? k : m, a_t ? m : k, dtype(), 1);
        const at::Tensor b = inner_columns(b_t ? n : k, b_t ? k : n, dtype(), 2);
        const at::Tensor around = integers({m, n + 3}, result_dtype(), 3);
        const at::Tensor before = around.clone();
        const at::Tensor c = around.slice(1, 2, 2 + n);
        // C is not read without accumulation.
        if (!accumulate) c.fill_(std::numeric_limits<double>::quiet_NaN());

        const Gemm gemm(dtype());
        gemm(
            a_t ? transposed(operand(a)) : operand(a),
            b_t ? transposed(operand(b)) : operand(b),
            result(c),
            accumulate);

        const auto as_double = [](const at::Tensor& t, bool t_t) {
          return (t_t ? t.t() : t).to(at::kDouble);
        };
        at::Tensor expected = at::mm(as_double(a, a_t), as_double(b, b_t));
        if (accumulate) expected = expected + before.slice(1, 2, 2 + n).to(at::kDouble);
        EXPECT_TRUE(identical(c, expected.to(result_dtype())));
        EXPECT_TRUE(identical(around.slice(1, 0, 2), before.slice(1, 0, 2)));
        EXPECT_TRUE(identical(around.slice(1, 2 + n), before.slice(1, 2 + n)));
      }
    }
  }
}

TEST_P(CudaGemm, KOfZeroGivesZero) {
  const at::Tensor a = at::empty({4, 0}, dtype()), b = at::empty({0, 3}, dtype());
  for (const bool accumulate : {false, true}) {
    const at::Tensor around = integers({4, 6}, result_dtype(), 3) + 5;
    const at::Tensor before = around.clone();
    const Gemm gemm(dtype());
    gemm(operand(a), operand(b), result(around.slice(1, 2, 5)), accumulate);
    if (!accumulate) before.slice(1, 2, 5).zero_();
    EXPECT_TRUE(identical(around, before));
  }
}

// Several partial sums and a remainder. A has contiguous rows, or contiguous columns.
TEST_P(CudaGemm, SplitKSumsAreExact) {
  if (result_dtype() != at::kFloat && result_dtype() != at::kDouble) return;
  for (const int64_t rows : {0, 1, 512, 513, 512 * 32, 512 * 32 + 1, 512 * 97 + 5}) {
    const at::Tensor a = rows % 2 == 0 ? integers({rows + 2, 3}, dtype(), 1)
                                       : integers({3, rows + 2}, dtype(), 1).t();
    const at::Tensor b = integers({rows + 1, 2}, dtype(), 2);
    const at::Tensor around = at::full({3, 5}, 7, result_dtype());
    const Gemm gemm(dtype());
    lltm::SplitKGemm products(gemm, gemm.over_rows(), around.slice(1, 1, 3));
    products.add(a, 2, b, 0, rows / 2);
    products.add(a, 2 + rows / 2, b, 1 + rows / 2, rows - rows / 2);
    products.finish();
    const at::Tensor x = a.slice(0, 2).to(at::kDouble), y = b.to(at::kDouble);
    const at::Tensor y_rows = at::cat({y.slice(0, 0, rows / 2), y.slice(0, 1 + rows / 2)});
    const at::Tensor expected = at::full({3, 5}, 7, at::kDouble);
    expected.slice(1, 1, 3).copy_(at::mm(x.t(), y_rows));
    EXPECT_TRUE(identical(around, expected.to(result_dtype()))) << rows;
  }
}

// TF32 has ten fraction bits: 1 + 2^-12 becomes 1.
class CudaTf32 : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { allow_tf32 = GetParam(); }
  void TearDown() override { allow_tf32 = false; }

  static double times_one(double value, at::ScalarType dtype) {
    const at::Tensor a = at::full({1, 1}, value, dtype), one = at::ones({1, 1}, dtype);
    const at::Tensor c = at::empty({1, 1}, dtype);
    const Gemm gemm(dtype);
    gemm(operand(a), operand(one), result(c), false);
    return c.item<double>();
  }
};

INSTANTIATE_TEST_SUITE_P(Allowed, CudaTf32, testing::Bool(), [](const auto& info) {
  return info.param ? "yes" : "no";
});

TEST_P(CudaTf32, Float32FollowsPyTorch) {
  const double fine = 1 + std::ldexp(1, -12);
  EXPECT_EQ(times_one(fine, at::kFloat), GetParam() ? 1 : fine);
  EXPECT_EQ(times_one(fine, at::kDouble), fine);
  const double coarse = 1 + std::ldexp(1, -10);
  EXPECT_EQ(times_one(coarse, at::kFloat), coarse);
}

TEST_P(CudaTf32, TheEnvironmentCanForbidIt) {
  EXPECT_EQ(Gemm(at::kFloat).uses_tf32(), GetParam());
  EXPECT_FALSE(Gemm(at::kDouble).uses_tf32());
  setenv("NVIDIA_TF32_OVERRIDE", "0", /*replace=*/1);
  EXPECT_FALSE(Gemm(at::kFloat).uses_tf32());
  EXPECT_EQ(times_one(1 + std::ldexp(1, -12), at::kFloat), 1 + std::ldexp(1, -12));
  unsetenv("NVIDIA_TF32_OVERRIDE");
}

TEST_P(CudaTf32, SixteenBitGemmsAccumulateInFloat32) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    EXPECT_EQ(times_one(1.5, dtype), 1.5);
    EXPECT_EQ(last_math_mode, lltm::cuda::kNoReducedPrecisionReduction);
  }
  // Sets the shared handle's mode.
  times_one(1, at::kFloat);
  EXPECT_EQ(last_math_mode, GetParam() ? lltm::cuda::kTf32Math : lltm::cuda::kDefaultMath);
}

}  // namespace
}  // namespace lltm_test
