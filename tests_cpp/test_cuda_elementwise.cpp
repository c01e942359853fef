// The index space of large tensors, and which data is read in 16-byte accesses.
#include "cuda/kernel/elementwise_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

namespace lltm::cuda {
namespace {

TEST(CudaIndex, PositionsAreCorrectBeyond32Bits) {
  const int64_t limit = int64_t{1} << 32;
  for (const int64_t per_row :
       {int64_t{1}, int64_t{7}, int64_t{768}, limit - 1, limit, limit + 5}) {
    for (const int64_t n :
         {int64_t{0}, int64_t{6}, limit - 2, limit - 1, limit, limit + 1, 9 * limit + 8}) {
      const Position position = lltm::cuda::position(n, per_row);
      EXPECT_EQ(position.row, n / per_row) << n << " of " << per_row;
      EXPECT_EQ(position.col, n % per_row) << n << " of " << per_row;
    }
  }
}

template <typename T>
class CudaAccess : public testing::Test {};
using Types = testing::Types<double, float, c10::Half, c10::BFloat16>;
TYPED_TEST_SUITE(CudaAccess, Types);

TYPED_TEST(CudaAccess, OnlyAlignedDataIsReadSixteenBytesAtATime) {
  alignas(16) const TypeParam data[2] = {};
  const auto wide = [&](int64_t offset, int64_t row_stride, int64_t col_stride, int64_t block = 8) {
    return stage_matrix(Matrix<const TypeParam>{data + offset, row_stride, col_stride}, block)
        .is_wide;
  };
  EXPECT_TRUE(wide(0, 16, 1));
  EXPECT_TRUE(wide(0, 32, 1));
  EXPECT_FALSE(wide(1, 16, 1)) << "begins out of line";
  EXPECT_FALSE(wide(0, 19, 1)) << "rows out of line";
  EXPECT_FALSE(wide(0, 48, 3)) << "every third column";
  EXPECT_FALSE(wide(0, 0, 0)) << "expanded";
  EXPECT_FALSE(wide(0, 16, 1, 7)) << "blocks out of line";
}

}  // namespace
}  // namespace lltm::cuda
