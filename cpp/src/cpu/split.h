// Products of float matrices on a matrix unit that takes bfloat16 only (AMX).
//
// A float is the sum of three bfloat16, each of them what is left of it by the
// ones before, rounded to nearest: their significands of 8 bits hold all of its
// 24. Of the nine products of the parts of two factors, the six largest are
// added up in float. The other three come to at most 2^-23 of the product, and
// seldom near it, so that the sums are at least as accurate as those of float
// products, in half the time (Henry, Tang, Heinecke: Leveraging the bfloat16
// Artificial Intelligence Datatype for Higher-Precision Computations, 2019).
//
// Two limits. An infinity has no such parts, and where a product is too large for
// a float, those of the parts may cancel to NaN: so whoever splits finds out
// whether every number is below kSplitLimit, and turns to float products where one
// is not. And what is below 2^-126, a part or a product of parts, counts as zero:
// numbers below 2^-103, and products below 2^-102, lose digits.
//
// Part of the files per instruction set: no header of torch.
#pragma once

#include <cstdint>

namespace lltm::cpu {

// Storage of one float's three parts. In memory, the parts of kSplitGroup
// elements lie together, all first parts, then all second, then all third: a
// pointer to elements points to a group's first.
struct BFloat16x3 {
  std::uint16_t bits[3];
};
constexpr std::int64_t kSplitGroup = 32;
constexpr float kSplitLimit = 0x1p60f;
// Columns of a panel of a right operand.
constexpr std::int64_t kSplitPanel = 16;

// Left operands lie row by row, in whole groups that end in zeros. Right operands
// (depth, columns) lie in panels of 16 columns, each in groups of 32 rows, each
// of those in pairs of rows: (column, row % 2).
//
// The elements from one row of a left operand to the next: as many as an odd
// number of groups has, for the rows of a tile to have places of their own in the
// first-level cache.
constexpr std::int64_t split_stride(std::int64_t depth) {
  return ((depth + kSplitGroup - 1) / kSplitGroup | 1) * kSplitGroup;
}

// What splits a matrix x (rows, columns) of floats, contiguous in its rows, tells
// whether all of it could be split: each element is NaN or below kSplitLimit.
//
// `panel_stride` is the elements from one panel to the next: 16 times the depth
// of the whole operand, of which x may be a part.
struct SplitKernels {
  // C (rows, columns) = A (rows, depth) B (depth, columns), or += if accumulate.
  // depth is a multiple of 32, columns of 16.
  void (*multiply)(
      std::int64_t rows,
      std::int64_t columns,
      std::int64_t depth,
      const BFloat16x3* a,
      std::int64_t lda,
      const BFloat16x3* b,
      float* c,
      std::int64_t ldc,
      bool accumulate);
  // x as a left operand.
  bool (*rows)(
      std::int64_t rows,
      std::int64_t columns,
      const float* x,
      std::int64_t x_stride,
      BFloat16x3* y,
      std::int64_t y_stride);
  // x^T as a left operand.
  bool (*columns)(
      std::int64_t rows,
      std::int64_t columns,
      const float* x,
      std::int64_t x_stride,
      BFloat16x3* y,
      std::int64_t y_stride);
  // x as a right operand.
  bool (*pack)(
      std::int64_t rows,
      std::int64_t columns,
      const float* x,
      std::int64_t x_stride,
      BFloat16x3* y,
      std::int64_t panel_stride);
  // x^T as a right operand.
  bool (*pack_transposed)(
      std::int64_t rows,
      std::int64_t columns,
      const float* x,
      std::int64_t x_stride,
      BFloat16x3* y,
      std::int64_t panel_stride);
};

}  // namespace lltm::cpu
