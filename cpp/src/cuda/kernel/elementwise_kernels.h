// One thread's code in an element-wise kernel, for host and device: a stage of a cell, from the
// struct that print_stage prints (program_source.cpp).
//
// A thread computes `kWidth` adjacent units in a row: a 16-byte access in the storage type (wide
// form), or 1. An argument with strided elements or unaligned rows is read element by element,
// without effect on others.
#pragma once

#include "cell/program.h"
#include "cuda/kernel/elementwise.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cuda {
namespace {

constexpr int kAccessBytes = 16;

// Units per thread in the wide form.
template <typename T>
constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(T));

// Few, so that a small step uses many multiprocessors.
constexpr int kThreads = 128;
// Blocks per multiprocessor. Allows 128 registers per thread, and 168 of kernels with 8 units per
// thread, a few of which need more than 128. The default targets more blocks and spills.
constexpr int resident_blocks(int width) {
  return width == 8 ? 3 : 4;
}

// A one-dimensional grid: other dimensions are limited to 65535 blocks.
constexpr std::int64_t blocks_for(std::int64_t count) {
  return (count + kThreads - 1) / kThreads;
}
LLTM_CELL_INLINE std::int64_t piece_of(std::int64_t block, int thread) {
  return block * kThreads + thread;
}

struct Position {
  std::int64_t row, col;
};

// On a GPU, a 64-bit division takes about a hundred instructions, a 32-bit division about twenty.
LLTM_CELL_INLINE Position position(std::int64_t n, std::int64_t per_row) {
  constexpr std::int64_t kLargest = 0xFFFFFFFF;
  if (n <= kLargest && per_row <= kLargest) {
    const auto small = static_cast<std::uint32_t>(n);
    const auto divisor = static_cast<std::uint32_t>(per_row);
    const std::uint32_t row = small / divisor;
    return {row, small - row * divisor};
  }
  const std::int64_t row = n / per_row;
  return {row, n - row * per_row};
}

// Moved by one instruction.
template <typename T>
struct alignas(kAccessBytes) Access {
  T values[kWide<T>];
};

template <typename T>
StageMatrix<T> stage_matrix(const Matrix<T>& matrix, std::int64_t block_stride) {
  constexpr int kUnits = kWide<std::remove_const_t<T>>;
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.data);
  const bool is_wide = matrix.col_stride == 1 && address % kAccessBytes == 0 &&
                       matrix.row_stride % kUnits == 0 && block_stride % kUnits == 0;
  return {matrix.data, matrix.row_stride, matrix.col_stride, block_stride, is_wide};
}

// Rows are multiples of an access, and registers hold all units' values. With 128 registers per
// thread, most cells in python/lltm/cells fit, with at most 11 inputs or outputs in 16 bits.
template <typename T>
constexpr bool fits_wide(const Program& program, std::int64_t hidden) {
  constexpr int kMostBytes = 88 * 4;
  const int most = program.inputs > program.outputs ? program.inputs : program.outputs;
  const int bytes = most * kWide<T> * static_cast<int>(sizeof(compute_t<T>));
  return hidden % kWide<T> == 0 && bytes <= kMostBytes;
}

template <typename T>
LLTM_CELL_INLINE T* row_of_block(const StageMatrix<T>& matrix, std::int64_t row, int block) {
  return matrix.data + row * matrix.row_stride + block * matrix.block_stride;
}

// Widened to the compute type; zeros if null.
template <int kWidth, typename T, typename V>
LLTM_CELL_INLINE void load(
    const StageMatrix<T>& matrix, const Position& at, int block, V (&values)[kWidth]) {
  using Element = std::remove_const_t<T>;
  if (matrix.data == nullptr) {
    LLTM_UNROLL
    for (int j = 0; j < kWidth; ++j) values[j] = V(0);
    return;
  }
  const T* const x = row_of_block(matrix, at.row, block) + at.col * matrix.col_stride;
  if constexpr (kWidth % kWide<Element> == 0) {
    if (matrix.is_wide) {
      Access<Element> access[kWidth / kWide<Element>];
      LLTM_UNROLL
      for (int k = 0; k < kWidth / kWide<Element>; ++k) {
        access[k] = reinterpret_cast<const Access<Element>*>(x)[k];
      }
      LLTM_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        values[j] = static_cast<V>(access[j / kWide<Element>].values[j % kWide<Element>]);
      }
      return;
    }
  }
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) values[j] = static_cast<V>(x[j * matrix.col_stride]);
}

template <int kWidth, typename T, typename V>
LLTM_CELL_INLINE void add(
    const StageMatrix<T>& matrix, const Position& at, int block, V (&values)[kWidth]) {
  V terms[kWidth];
  load(matrix, at, block, terms);
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) values[j] += terms[j];
}

// A value that is the same for all units of a row.
template <int kWidth, typename T, typename V>
LLTM_CELL_INLINE void load_of_row(
    const StageMatrix<T>& matrix, const Position& at, int block, V (&values)[kWidth]) {
  const auto value = static_cast<V>(*row_of_block(matrix, at.row, block));
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) values[j] = value;
}

// Narrowed; does nothing if null. Columns are contiguous.
template <int kWidth, typename T, typename V>
LLTM_CELL_INLINE void store(
    const StageMatrix<T>& matrix, const Position& at, int block, const V (&values)[kWidth]) {
  if (matrix.data == nullptr) return;
  T* const y = row_of_block(matrix, at.row, block) + at.col;
  if constexpr (kWidth % kWide<T> == 0) {
    if (matrix.is_wide) {
      LLTM_UNROLL
      for (int k = 0; k < kWidth / kWide<T>; ++k) {
        Access<T> access;
        LLTM_UNROLL
        for (int j = 0; j < kWide<T>; ++j) {
          access.values[j] = static_cast<T>(values[k * kWide<T> + j]);
        }
        reinterpret_cast<Access<T>*>(y)[k] = access;
      }
      return;
    }
  }
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) y[j] = static_cast<T>(values[j]);
}

// Calls Stage::compute for each of the units.
template <typename Stage, int kWidth, int kInputs, int kOutputs, typename V>
LLTM_CELL_INLINE void compute_each(const V (&in)[kInputs][kWidth], V (&out)[kOutputs][kWidth]) {
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    V x[kInputs], y[kOutputs];
    LLTM_UNROLL
    for (int k = 0; k < kInputs; ++k) x[k] = in[k][j];
    Stage::compute(x, y);
    LLTM_UNROLL
    for (int k = 0; k < kOutputs; ++k) out[k][j] = y[k];
  }
}

}  // namespace
}  // namespace lltm::cuda
