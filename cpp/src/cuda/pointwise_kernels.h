// What one thread of a pointwise kernel does, for host and device: the tests run
// it on the CPU, over the same indices as the grid.
//
// A thread works on `kWidth` neighbouring units of one row: as many as fill a
// 16-byte access of the storage type, or one. An input that can't be read 16
// bytes at a time (gaps between its elements, or a row that begins elsewhere
// than at a multiple of 16 bytes) is read element by element, and the others
// are not held back by it.
#pragma once

#include "cell_math.h"
#include "cuda/pointwise.h"

#include <cstdint>

// Arrays stay in registers only where every index is known.
#if defined(__CUDACC__)
#define LLTM_UNROLL _Pragma("unroll")
#else
#define LLTM_UNROLL
#endif

namespace lltm::cuda {
namespace {

constexpr int kAccessBytes = 16;

// Units of a thread in the wide form.
template <typename T>
constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(T));

// ---- the index space --------------------------------------------------------

struct Grid {
  std::int64_t blocks;
  int threads;  // per block
};

// One dimension: the others hold 65535 blocks at most, fewer than there are
// rows. Small blocks, so that a small step reaches many multiprocessors.
constexpr int kThreads = 128;
constexpr std::int64_t kMaxBlocks = 1 << 20;

// For `count` pieces of work, at least one.
inline Grid grid_for(std::int64_t count) {
  const std::int64_t blocks = (count + kThreads - 1) / kThreads;
  return {blocks < kMaxBlocks ? blocks : kMaxBlocks, kThreads};
}

// Runs body(n) for the pieces n < count of one thread: its own and, as often as
// the grid is smaller than the work, those a whole grid further on.
template <typename Body>
LLTM_CELL_INLINE void grid_stride(
    std::int64_t block,
    std::int64_t blocks,
    int thread,
    int threads,
    std::int64_t count,
    const Body& body) {
  for (std::int64_t n = block * threads + thread; n < count; n += blocks * threads) body(n);
}

struct Position {
  std::int64_t row, col;
};

// Of piece n among rows of `per_row` pieces. A GPU divides 64-bit numbers in
// some hundred instructions and 32-bit ones in some twenty.
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

// ---- memory -----------------------------------------------------------------

// 16 bytes, moved by one instruction.
template <typename T>
struct alignas(kAccessBytes) Access {
  T values[kWide<T>];
};

// Whether every row can be read and written 16 bytes at a time, given that the
// columns asked for are multiples of kWide<T>.
template <typename T>
inline bool is_wide(const Matrix<T>& matrix) {
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.data);
  return matrix.col_stride == 1 && address % kAccessBytes == 0 &&
         matrix.row_stride % kWide<std::remove_const_t<T>> == 0;
}

// kWidth elements of a row, widened to the compute type; zero where absent.
template <int kWidth, typename T>
LLTM_CELL_INLINE void load(
    const Matrix<const T>& matrix,
    bool wide,
    std::int64_t row,
    std::int64_t col,
    compute_t<T> (&values)[kWidth]) {
  if (matrix.data == nullptr) {
    LLTM_UNROLL
    for (int j = 0; j < kWidth; ++j) values[j] = compute_t<T>(0);
    return;
  }
  const T* const x = matrix.row(row) + col * matrix.col_stride;
  if constexpr (kWidth % kWide<T> == 0) {
    if (wide) {
      Access<T> access[kWidth / kWide<T>];
      LLTM_UNROLL
      for (int k = 0; k < kWidth / kWide<T>; ++k) {
        access[k] = reinterpret_cast<const Access<T>*>(x)[k];
      }
      LLTM_UNROLL
      for (int j = 0; j < kWidth; ++j) {
        values[j] = static_cast<compute_t<T>>(access[j / kWide<T>].values[j % kWide<T>]);
      }
      return;
    }
  }
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    values[j] = static_cast<compute_t<T>>(x[j * matrix.col_stride]);
  }
}

// The same for a result: narrowed, and dropped where absent. Its columns are
// contiguous.
template <int kWidth, typename T>
LLTM_CELL_INLINE void store(
    const Matrix<T>& matrix,
    bool wide,
    std::int64_t row,
    std::int64_t col,
    const compute_t<T> (&values)[kWidth]) {
  if (matrix.data == nullptr) return;
  T* const y = matrix.row(row) + col;
  if constexpr (kWidth % kWide<T> == 0) {
    if (wide) {
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

// ---- kernels ----------------------------------------------------------------

// Which arguments are read and written 16 bytes at a time.
struct ForwardAccess {
  bool gates, bias, c, h_next, h_state, c_next, activations;
};
struct BackwardAccess {
  bool activations, grad_h, grad_h_state, grad_c, grad_gates, grad_c_prev;
};

template <typename T>
inline ForwardAccess access_of(const ForwardArgs<T>& a) {
  return {
      is_wide(a.gates),
      is_wide(a.bias),
      is_wide(a.c),
      is_wide(a.h_next),
      is_wide(a.h_state),
      is_wide(a.c_next),
      is_wide(a.activations)};
}

template <typename T, typename S>
inline BackwardAccess access_of(const BackwardArgs<T, S>& a) {
  return {
      is_wide(a.activations),
      is_wide(a.grad_h),
      is_wide(a.grad_h_state),
      is_wide(a.grad_c),
      is_wide(a.grad_gates),
      is_wide(a.grad_c_prev)};
}

// The wide form needs rows of whole accesses.
template <typename T>
inline bool fits_wide(std::int64_t hidden) {
  return hidden % kWide<T> == 0;
}

// Piece n of (rows, hidden / kWidth). Everything is loaded before anything is
// stored: c_next may be c.
template <int kWidth, typename T>
LLTM_CELL_INLINE void forward_at(
    const ForwardArgs<T>& a, const ForwardAccess& wide, std::int64_t n) {
  using C = compute_t<T>;
  const auto [row, piece] = position(n, a.hidden / kWidth);
  const std::int64_t col = piece * kWidth;
  C z_i[kWidth], z_o[kWidth], z_g[kWidth], b_i[kWidth], b_o[kWidth], b_g[kWidth], c[kWidth];
  load(a.gates, wide.gates, row, col, z_i);
  load(a.gates, wide.gates, row, col + a.hidden, z_o);
  load(a.gates, wide.gates, row, col + 2 * a.hidden, z_g);
  load(a.c, wide.c, row, col, c);
  load(a.bias, wide.bias, 0, col, b_i);
  load(a.bias, wide.bias, 0, col + a.hidden, b_o);
  load(a.bias, wide.bias, 0, col + 2 * a.hidden, b_g);
  C i[kWidth], o[kWidth], g[kWidth], tanh_c[kWidth], h[kWidth];
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    const CellForward<C> y = cell_forward(z_i[j] + b_i[j], z_o[j] + b_o[j], z_g[j] + b_g[j], c[j]);
    i[j] = y.i;
    o[j] = y.o;
    g[j] = y.g;
    tanh_c[j] = y.tanh_c;
    c[j] = y.c;
    h[j] = y.h;
  }
  store(a.h_next, wide.h_next, row, col, h);
  store(a.h_state, wide.h_state, row, col, h);
  store(a.c_next, wide.c_next, row, col, c);
  store(a.activations, wide.activations, row, col, i);
  store(a.activations, wide.activations, row, col + a.hidden, o);
  store(a.activations, wide.activations, row, col + 2 * a.hidden, g);
  store(a.activations, wide.activations, row, col + 3 * a.hidden, tanh_c);
}

// Likewise; grad_c_prev may be grad_c.
template <int kWidth, typename T, typename S>
LLTM_CELL_INLINE void backward_at(
    const BackwardArgs<T, S>& a, const BackwardAccess& wide, std::int64_t n) {
  using C = compute_t<T>;
  const auto [row, piece] = position(n, a.hidden / kWidth);
  const std::int64_t col = piece * kWidth;
  C i[kWidth], o[kWidth], g[kWidth], tanh_c[kWidth], dh[kWidth], dh_state[kWidth], dc[kWidth];
  load(a.activations, wide.activations, row, col, i);
  load(a.activations, wide.activations, row, col + a.hidden, o);
  load(a.activations, wide.activations, row, col + 2 * a.hidden, g);
  load(a.activations, wide.activations, row, col + 3 * a.hidden, tanh_c);
  load(a.grad_h, wide.grad_h, row, col, dh);
  load(a.grad_h_state, wide.grad_h_state, row, col, dh_state);
  load(a.grad_c, wide.grad_c, row, col, dc);
  C dz_i[kWidth], dz_o[kWidth], dz_g[kWidth];
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    const CellBackward<C> d =
        cell_backward(i[j], o[j], g[j], tanh_c[j], dh[j] + dh_state[j], dc[j]);
    dz_i[j] = d.dz_i;
    dz_o[j] = d.dz_o;
    dz_g[j] = d.dz_g;
    dc[j] = d.dc;
  }
  store(a.grad_gates, wide.grad_gates, row, col, dz_i);
  store(a.grad_gates, wide.grad_gates, row, col + a.hidden, dz_o);
  store(a.grad_gates, wide.grad_gates, row, col + 2 * a.hidden, dz_g);
  store(a.grad_c_prev, wide.grad_c_prev, row, col, dc);
}

}  // namespace
}  // namespace lltm::cuda
