// A matrix in memory, as the element-wise kernels of every backend see it. Part of
// the files per instruction set: no header of torch.
#pragma once

#include "cell/math.h"

#include <cstdint>
#include <type_traits>

namespace lltm {

// The type that a storage type T is computed and accumulated in.
template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Strides in elements, any value. Null data: absent.
template <typename T>
struct Matrix {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  LLTM_CELL_INLINE T* row(std::int64_t r) const { return data + r * row_stride; }
  // The part from row r and column c on.
  LLTM_CELL_INLINE Matrix from(std::int64_t r, std::int64_t c = 0) const {
    return {data == nullptr ? nullptr : row(r) + c * col_stride, row_stride, col_stride};
  }
};

template <typename T>
LLTM_CELL_INLINE Matrix<const T> as_const(const Matrix<T>& matrix) {
  return {matrix.data, matrix.row_stride, matrix.col_stride};
}

// The right operand of a GEMM, B (K, N), in a GEMM format (cpu/gemm/formats.h): k and n are
// padded; the rows of formats that have rows are `ld` elements apart.
template <typename Operand>
struct PackedB {
  Operand* data;
  std::int64_t k, n, ld;
};

// The functions C (m, b.n) = A (m, b.k) B, or += where `accumulate`.
template <typename Operand>
using Gemm = void(
    std::int64_t m,
    Matrix<const Operand> a,
    PackedB<const Operand> b,
    Matrix<float> c,
    bool accumulate);

template <typename Operand>
LLTM_CELL_INLINE PackedB<const Operand> as_const(const PackedB<Operand>& b) {
  return {b.data, b.k, b.n, b.ld};
}

}  // namespace lltm
