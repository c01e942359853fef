// The matrix product of one block: oneDNN's batch-reduce GEMM micro-kernel,
// through libtorch, or for BFloat16x3 our own (split.h). oneDNN's is an internal
// function of libtorch, so this is the only file that names it, and nothing may
// rely on it being there.
//
// Of oneDNN's, each thread compiles one kernel for each set of sizes and leading
// dimensions it meets, and never frees it: callers keep that set small. kMaxRows
// and the few heights that `multiply` cuts its rows into see to the rows.
#pragma once

#include "cpu/pointwise.h"

#include <cstdint>

namespace lltm::cpu {

// Whether products of operands of type G (float, BFloat16 or BFloat16x3) can be
// had, by this libtorch on this CPU. Found out by trying, once.
template <typename G>
bool has_micro_kernel();

// How the second operand (K, N) lies in memory: float row by row; BFloat16 in
// pairs of rows, element (k, n) at [k / 2][n][k % 2]; BFloat16x3 as in split.h.
template <typename G>
constexpr std::int64_t kRowsTogether = 1;
template <>
inline constexpr std::int64_t kRowsTogether<BFloat16> = 2;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// K as the operands have to be padded to, with zeros. BFloat16: to whole pairs,
// and above one tile of AMX (32) to whole tiles. A part of a tile costs a whole
// one and more; where it is no multiple of 4, the product takes 4 to 10 times
// as long.
template <typename G>
constexpr std::int64_t padded_depth(std::int64_t depth) {
  return depth;
}
template <>
constexpr std::int64_t padded_depth<BFloat16>(std::int64_t depth) {
  constexpr std::int64_t kTile = 32;
  return round_up(depth, depth <= kTile ? kRowsTogether<BFloat16> : kTile);
}
template <>
constexpr std::int64_t padded_depth<BFloat16x3>(std::int64_t depth) {
  return round_up(depth, kSplitGroup);
}

// N as the second operand and the result have to be padded to, with anything.
template <typename G>
constexpr std::int64_t padded_columns(std::int64_t columns) {
  return columns;
}
template <>
constexpr std::int64_t padded_columns<BFloat16x3>(std::int64_t columns) {
  return round_up(columns, kSplitPanel);
}

// Whether the rows of a matrix, `stride` elements apart, can be an operand in
// place: only next to each other, since each stride of a caller's tensor would be
// one more kernel to compile and keep. The kernel's addresses within a block are
// 32-bit offsets.
constexpr bool is_operand_stride(std::int64_t stride, std::int64_t columns) {
  return stride == columns && stride <= std::int64_t{1} << 20;
}

constexpr std::int64_t kMaxRows = 64;

// C (rows, columns) = A (rows, depth) B (depth, columns), or += if accumulate.
// depth and columns are padded already. No argument may be 0. Leading dimensions
// in elements; for BFloat16, B's is that of an unpaired row, for BFloat16x3 it
// is not used.
template <typename G>
void multiply(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const G* a,
    std::int64_t lda,
    const G* b,
    std::int64_t ldb,
    float* c,
    std::int64_t ldc,
    bool accumulate);

// To be called by each thread at the end of its work.
void release_micro_kernel();

}  // namespace lltm::cpu
