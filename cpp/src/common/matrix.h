// A strided matrix for all kernels. No PyTorch header: files compiled per instruction set include
// it.
#pragma once

#include "cell/math.h"

#include <cstdint>
#include <type_traits>

namespace lltm {

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Strides are in elements, with any value. Null data is an omitted matrix.
template <typename T>
struct Matrix {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  LLTM_CELL_INLINE T* row(std::int64_t r) const { return data + r * row_stride; }
  LLTM_CELL_INLINE Matrix from(std::int64_t r, std::int64_t c = 0) const {
    return {data == nullptr ? nullptr : row(r) + c * col_stride, row_stride, col_stride};
  }
};

template <typename T>
LLTM_CELL_INLINE Matrix<const T> as_const(const Matrix<T>& matrix) {
  return {matrix.data, matrix.row_stride, matrix.col_stride};
}

// A matrix of any element type.
struct View {
  void* data = nullptr;
  std::int64_t row_stride = 0, col_stride = 1;

  template <typename T>
  Matrix<T> as() const {
    return {static_cast<T*>(data), row_stride, col_stride};
  }
};

// The rows of each step in (T, B, .) with any strides, also batch-first, or packed (N, .).
struct StepsView {
  View first;
  std::int64_t step_bytes = 0, step_rows = 1;  // from step to step, or from row to row if packed

  // From the index of a step's first row (steps.h).
  View of(std::int64_t offset) const {
    if (first.data == nullptr) return first;
    auto* const data = static_cast<char*>(first.data) + offset / step_rows * step_bytes;
    return {data, first.row_stride, first.col_stride};
  }
};

// B (K, N) in a GEMM format (cpu/gemm/formats.h), k and n padded. ld: row stride in elements, if
// row-major.
template <typename Operand>
struct PackedB {
  Operand* data;
  std::int64_t k, n, ld;
};

// C (m, b.n) = A (m, b.k) B, or C += A B if `accumulate`.
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
