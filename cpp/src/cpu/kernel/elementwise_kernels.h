// The element-wise kernels, included once per instruction set.
//
// Blocks of kPiece elements in a row are loaded (widened or gathered unless contiguous in the
// compute type), computed in a vectorized loop, and stored. Padding the last block gives odd sizes
// vector speed.
#pragma once

#include "cell/cells.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/gemm_kernels.h"
#include "cpu/kernel/int8_kernels.h"
#include "cpu/kernel/program_kernels.h"
#include "cpu/kernel/small_batch_kernels.h"
#include "cpu/kernel/small_layer_kernels.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

namespace lltm::cpu {
namespace {

constexpr std::int64_t padded(std::int64_t n) {
  return (n + 15) / 16 * 16;
}

template <typename T>
LLTM_CELL_INLINE bool is_in_place(const Matrix<const T>& matrix, std::int64_t n, bool is_padded) {
  return matrix.data != nullptr && matrix.col_stride == 1 && (is_padded || n == padded(n));
}

// float16 by the CPU's instructions, which compilers do not find.
template <typename T>
LLTM_CELL_INLINE void widen_row(
    const T* __restrict x, std::int64_t n, compute_t<T>* __restrict values) {
#if defined(__AVX2__) || defined(__aarch64__)
  if constexpr (std::is_same_v<T, Half>) {
    std::int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_lanes(load_lanes(x + j), values + j);
    if (j < n) store_first(load_first(x + j, n - j), values + j, n - j);
    return;
  }
#endif
  for (std::int64_t j = 0; j < n; ++j) values[j] = widen(x[j]);
}

template <typename T>
LLTM_CELL_INLINE void narrow_row(
    const compute_t<T>* __restrict values, std::int64_t n, T* __restrict y) {
#if defined(__AVX2__) || defined(__aarch64__)
  if constexpr (std::is_same_v<T, Half>) {
    std::int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_lanes(load_lanes(values + j), y + j);
    if (j == n) return;
    T rest[kLanes];
    store_lanes(load_first(values + j, n - j), rest);
    __builtin_memcpy(y + j, rest, (n - j) * sizeof(T));
    return;
  }
#endif
  for (std::int64_t j = 0; j < n; ++j) y[j] = narrow<T>(values[j]);
}

// y = x, rounded to T. n is at most kPiece. y may be x.
template <typename T>
LLTM_CELL_INLINE void round_row(const compute_t<T>* x, std::int64_t n, compute_t<T>* y) {
  if constexpr (std::is_same_v<T, Half>) {
    T rounded[kPiece];
    narrow_row(x, n, rounded);
    widen_row(rounded, n, y);
  } else {
    for (std::int64_t j = 0; j < n; ++j) y[j] = widen(narrow<T>(x[j]));
  }
}

// Copies, widens and pads with zeros. Not inlined, to limit code size: kernels load many arrays.
template <typename T>
__attribute__((noinline)) void gather(
    const T* __restrict x, std::int64_t stride, std::int64_t n, compute_t<T>* __restrict values) {
  if (stride == 1 && n == kPiece) {  // a constant trip count needs no remainder loop
    return widen_row(x, kPiece, values);
  }
  if (stride == 1) {
    widen_row(x, n, values);
  } else if (stride == 0) {  // an expanded tensor, such as a sum's gradient
    const compute_t<T> value = widen(x[0]);
    for (std::int64_t j = 0; j < n; ++j) values[j] = value;
  } else {
    for (std::int64_t j = 0; j < n; ++j) values[j] = widen(x[j * stride]);
  }
  for (std::int64_t j = n; j < padded(n); ++j) values[j] = compute_t<T>(0);
}

// n elements from (row, col) on, contiguous in the compute type and readable up to padded(n), in
// place or in `buffer`. Null matrices are zero.
template <typename T>
LLTM_CELL_INLINE const compute_t<T>* load(
    const Matrix<const T>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    PieceBuffer<compute_t<T>>& buffer,
    bool is_padded = false) {
  using C = compute_t<T>;
  C* const values = buffer.values;
  if (matrix.data == nullptr) {
    for (std::int64_t j = 0; j < padded(n); ++j) values[j] = C(0);
    return values;
  }
  const T* const x = matrix.row(row) + col * matrix.col_stride;
  if constexpr (sizeof(T) == sizeof(C)) {
    if (is_in_place(matrix, n, is_padded)) return x;
  }
  gather(x, matrix.col_stride, n, values);
  return values;
}

// For n results, writable up to padded(n): the target or `buffer`, from which `store` copies.
template <typename T>
LLTM_CELL_INLINE compute_t<T>* target(
    const Matrix<T>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    PieceBuffer<compute_t<T>>& buffer) {
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    if (matrix.data != nullptr && n == padded(n)) return matrix.row(row) + col;
  }
  return buffer.values;
}

template <typename T>
__attribute__((noinline)) void scatter(
    const compute_t<T>* __restrict values, std::int64_t n, T* __restrict y) {
  if (n == kPiece) return narrow_row(values, kPiece, y);
  narrow_row(values, n, y);
}

template <typename T>
LLTM_CELL_INLINE void store(
    const Matrix<T>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    const compute_t<T>* values) {
  if (matrix.data == nullptr) return;
  T* const y = matrix.row(row) + col;
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    if (y == values) return;
  }
  scatter(values, n, y);
}

// False if values are out of range (int8, bf16x3). amx_kernels.h has the bf16x3 overload.
template <typename G>
LLTM_CELL_INLINE bool store_operand(
    const Matrix<G>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    const compute_t<G>* values) {
  store(matrix, row, col, n, values);
  return true;
}
LLTM_CELL_INLINE bool store_operand(
    const Matrix<Int8>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    const float* values) {
  Int8* const y = matrix.row(row) + col;
  bool fits = true;
  for (std::int64_t j = 0; j < n; ++j) {
    fits &= values[j] >= -1.0f && values[j] <= 1.0f;
    y[j] = quantize(values[j] * kInt8Largest);
  }
  return fits;
}

template <typename Body>
LLTM_CELL_INLINE void for_each_block(
    std::int64_t hidden, std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t row = begin / hidden;
  std::int64_t col = begin % hidden;
  while (begin < end) {
    const std::int64_t in_row = hidden - col < end - begin ? hidden - col : end - begin;
    const std::int64_t n = in_row < kPiece ? in_row : kPiece;
    body(row, col, n);
    begin += n;
    col += n;
    if (col == hidden) {
      col = 0;
      ++row;
    }
  }
}

// The output and the next GEMM's operand, equally rounded.
template <typename T, typename G>
LLTM_CELL_INLINE void store_h(
    const ForwardArgs<T, G>& a,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    const compute_t<T>* h,
    PieceBuffer<compute_t<T>>& rounded) {
  store(a.h_next, row, col, n, h);
  if (a.h_operand.data == nullptr) return;
  round_row<T>(h, n, rounded.values);
  if (a.recurrent_mask.data != nullptr) {
    PieceBuffer<compute_t<T>> buffer;
    const compute_t<T>* const factor = load(a.recurrent_mask, row, col, n, buffer);
    for (std::int64_t j = 0; j < n; ++j) rounded.values[j] *= factor[j];
  }
  if (!store_operand(a.h_operand, row, col, n, rounded.values)) *a.out_of_range.row(row) = true;
}

template <typename Definition, typename T, typename G>
void forward(const ForwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  PieceBuffer<C> in_z[kSlots], in_bias[kSlots], in_c, out_saved[kSaved], out_c, out_h;
  const C* bias[kSlots] = {};
  std::int64_t column_of_bias = -1;  // equal if a row is a single block
  for_each_block(a.hidden, begin, end, [&](std::int64_t row, std::int64_t col, std::int64_t n) {
    const C* z[kSlots];
    C* saved[kSaved];
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) {
      z[k] = load(a.z, row, col + k * a.z_stride, n, in_z[k], a.z_padded);
    }
    if (col != column_of_bias) {
      LLTM_UNROLL
      for (int k = 0; k < kSlots; ++k) {
        bias[k] = load(a.bias, 0, col + k * a.layer_hidden, n, in_bias[k]);
      }
      column_of_bias = col;
    }
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) {
      saved[k] = target(a.saved, row, col + k * a.layer_hidden, n, out_saved[k]);
    }
    const C* const c_prev = load(a.c, row, col, n, in_c);
    C* const c = target(a.c_next, row, col, n, out_c);
    C* const h = target(a.h_next, row, col, n, out_h);
    const std::int64_t size = padded(n);
    LLTM_INDEPENDENT
#pragma GCC unroll 1
    for (std::int64_t j = 0; j < size; ++j) {
      C z_j[kSlots];
      LLTM_UNROLL
      for (int k = 0; k < kSlots; ++k) z_j[k] = z[k][j] + bias[k][j];
      const auto y = Definition::forward(z_j, c_prev[j]);
      LLTM_UNROLL
      for (int k = 0; k < kSaved; ++k) saved[k][j] = y.saved[k];
      c[j] = y.c;
      h[j] = y.h;
    }
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) {
      store(a.saved, row, col + k * a.layer_hidden, n, saved[k]);
    }
    store(a.c_next, row, col, n, c);
    store_h(a, row, col, n, h, out_h);
  });
}

constexpr std::int64_t kRowsAhead = 4;

template <typename Definition, typename T, typename G>
void backward(const BackwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  PieceBuffer<C> in_saved[kSaved], in_dh, in_dh_state, in_dc, out_dz[kSlots], out_c;
  for_each_block(a.hidden, begin, end, [&](std::int64_t row, std::int64_t col, std::int64_t n) {
    const C* saved[kSaved];
    C* dz[kSlots];
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) {
      fetch_ahead(a.saved.row(row + kRowsAhead) + col + k * a.layer_hidden, n);
    }
    LLTM_UNROLL
    for (int k = 0; k < kSaved; ++k) {
      saved[k] = load(a.saved, row, col + k * a.layer_hidden, n, in_saved[k]);
    }
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) {
      dz[k] = target(a.dz, row, col + k * a.layer_hidden, n, out_dz[k]);
    }
    const C* const dh = load(a.grad_h, row, col, n, in_dh);
    const C* const dh_state = load(a.grad_h_state, row, col, n, in_dh_state);
    const C* const dc_next = load(a.grad_c, row, col, n, in_dc);
    C* const dc = target(a.grad_c_prev, row, col, n, out_c);
    const std::int64_t size = padded(n);
    LLTM_INDEPENDENT
#pragma GCC unroll 1
    for (std::int64_t j = 0; j < size; ++j) {
      C saved_j[kSaved];
      LLTM_UNROLL
      for (int k = 0; k < kSaved; ++k) saved_j[k] = saved[k][j];
      const auto d = backward_of<Definition>(saved_j, dh[j] + dh_state[j], dc_next[j]);
      LLTM_UNROLL
      for (int k = 0; k < kSlots; ++k) dz[k][j] = d.dz[k];
      dc[j] = d.dc;
    }
    bool fits = true;
    LLTM_UNROLL
    for (int k = 0; k < kSlots; ++k) {
      store(a.dz, row, col + k * a.layer_hidden, n, dz[k]);
      if (a.operand.data == nullptr) continue;
      fits &= store_operand(a.operand, row, col + k * a.operand_stride, n, dz[k]);
    }
    store(a.grad_c_prev, row, col, n, dc);
    if (!fits) *a.out_of_range = true;
  });
}

template <typename T>
LLTM_CELL_INLINE void transpose_rest(
    std::int64_t rows, std::int64_t columns, Matrix<const T> x, Matrix<T> y) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) y.row(j)[i] = x.row(i)[j];
  }
}

LLTM_CELL_INLINE std::uint32_t pair(BFloat16 first, BFloat16 second) {
  return first.bits | std::uint32_t{second.bits} << 16;
}

// A vector in a tile: a float row, or two bfloat16 rows as pairs, to transpose twice as many.
LLTM_CELL_INLINE void load_tile_row(Matrix<const float> x, std::int64_t i, Vector& to) {
  __builtin_memcpy(&to, x.row(i), sizeof(to));
}
LLTM_CELL_INLINE void load_tile_row(Matrix<const BFloat16> x, std::int64_t i, Vector& to) {
  std::uint32_t pairs[kTile];
  for (std::int64_t j = 0; j < kTile; ++j) pairs[j] = pair(x.row(2 * i)[j], x.row(2 * i + 1)[j]);
  __builtin_memcpy(&to, pairs, sizeof(to));
}

template <typename T>
LLTM_CELL_INLINE void transpose_tile_of(Matrix<const T> x, Matrix<T> y) {
  Vector tile[kTile];
  for (std::int64_t i = 0; i < kTile; ++i) load_tile_row(x, i, tile[i]);
  transpose_tile(tile);
  for (std::int64_t i = 0; i < kTile; ++i) __builtin_memcpy(y.row(i), &tile[i], sizeof(Vector));
}

template <typename T>
void transpose_matrix(std::int64_t rows, std::int64_t columns, Matrix<const T> x, Matrix<T> y) {
  constexpr std::int64_t kHeight = kTile * static_cast<std::int64_t>(sizeof(float) / sizeof(T));
  for (std::int64_t r = 0; r < rows; r += kHeight) {
    for (std::int64_t c = 0; c < columns; c += kTile) {
      const std::int64_t height = at_most(rows - r, kHeight);
      const std::int64_t width = at_most(columns - c, kTile);
      if (height == kHeight && width == kTile) {
        transpose_tile_of(x.from(r, c), y.from(c, r));
      } else {
        transpose_rest(height, width, x.from(r, c), y.from(c, r));
      }
    }
  }
}

void pair_rows(std::int64_t columns, const BFloat16* a, const BFloat16* b, BFloat16* y) {
  for (std::int64_t j = 0; j < columns; ++j) {
    const std::uint32_t both = pair(a[j], b == nullptr ? BFloat16{0} : b[j]);
    __builtin_memcpy(y + 2 * j, &both, sizeof(both));
  }
}

// A bfloat16 pair, at any alignment, is one element.
void pair_columns(
    std::int64_t rows, std::int64_t columns, Matrix<const BFloat16> x, Matrix<BFloat16> y) {
  constexpr std::int64_t kWidth = 2 * kTile;
  for (std::int64_t r = 0; r < rows; r += kTile) {
    for (std::int64_t c = 0; c < columns; c += kWidth) {
      const Matrix<const BFloat16> from = x.from(r, c);
      const Matrix<BFloat16> to = y.from(c / 2, 2 * r);
      const std::int64_t height = at_most(rows - r, kTile);
      const std::int64_t width = at_most(columns - c, kWidth);
      Vector tile[kTile] = {};
      if (height == kTile && width == kWidth) {
        for (std::int64_t i = 0; i < kTile; ++i) {
          __builtin_memcpy(&tile[i], from.row(i), sizeof(Vector));
        }
        transpose_tile(tile);
        for (std::int64_t i = 0; i < kTile; ++i) {
          __builtin_memcpy(to.row(i), &tile[i], sizeof(Vector));
        }
      } else {
        for (std::int64_t i = 0; i < height; ++i) {
          __builtin_memcpy(&tile[i], from.row(i), width * sizeof(BFloat16));
        }
        transpose_tile(tile);
        for (std::int64_t i = 0; 2 * i < width; ++i) {
          __builtin_memcpy(to.row(i), &tile[i], height * sizeof(float));
        }
      }
    }
  }
}

// Even and odd rows are summed separately, for accuracy and speed.
void sum_rows(std::int64_t rows, std::int64_t columns, Matrix<const float> x, float* y) {
  for (std::int64_t c = 0; c < columns; c += kPiece) {
    const std::int64_t n = columns - c < kPiece ? columns - c : kPiece;
    PieceBuffer<float> even = {}, odd = {};
    for (std::int64_t r = 0; r < rows; r += 2) {
      for (std::int64_t j = 0; j < n; ++j) even.values[j] += x.row(r)[c + j];
      if (r + 1 == rows) break;
      for (std::int64_t j = 0; j < n; ++j) odd.values[j] += x.row(r + 1)[c + j];
    }
    for (std::int64_t j = 0; j < n; ++j) y[c + j] = even.values[j] + odd.values[j];
  }
}

template <typename T>
void load_array(const T* x, float* y, std::int64_t n) {
  widen_row(x, n, y);
}

template <typename T>
void store_array(const float* x, T* y, std::int64_t n) {
  narrow_row(x, n, y);
}

template <typename Definition>
constexpr CellKernels kCellKernels = {
    {forward<Definition, double, double>, backward<Definition, double, double>},
    {forward<Definition, float, float>, backward<Definition, float, float>},
    {forward<Definition, Half, float>, backward<Definition, Half, float>},
    {forward<Definition, BFloat16, float>, backward<Definition, BFloat16, float>},
    {forward<Definition, BFloat16, BFloat16>, backward<Definition, BFloat16, BFloat16>},
    {forward<Definition, float, BFloat16>, backward<Definition, float, BFloat16>},
    {},
    {},
    {forward<Definition, float, Int8>, nullptr},
    {forward<Definition, Half, Int8>, nullptr},
    {forward<Definition, BFloat16, Int8>, nullptr},
    forward_small_batch<Definition>,
    run_small_layer<Definition>,
};

constexpr Kernels make_kernels(const char* name) {
  Kernels kernels = {
      {kGemmF32<float>, gemm_in_place<float>},
      {kGemmF32<Half>, gemm_in_place<Half>},
      {kGemmF32<BFloat16>, gemm_in_place<BFloat16>},
      name,
      {},
      {},
      kInt8Kernels,
      kGemmBf16,
      transpose_matrix<float>,
      transpose_matrix<BFloat16>,
      pair_rows,
      pair_columns,
      sum_rows,
      gemm_small_batch<Float64Accumulators>,
      gemm_small_batch<Float32Accumulators>,
      {load_array<Half>, store_array<Half>},
      {load_array<BFloat16>, store_array<BFloat16>},
  };
  Cells::for_each([&]<typename Definition>(Definition) {
    kernels.cells[Cells::native<Definition>()] = kCellKernels<Definition>;
  });
  return kernels;
}

}  // namespace
}  // namespace lltm::cpu
