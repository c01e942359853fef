// One thread's code in an element-wise kernel, for host and device. Cell is DefinitionRegisters
// (definition.h) or, for custom cells, the struct that program_source.cpp prints:
//     static constexpr CellInfo kCell
//     void forward(const V (&in)[], V (&out)[]), void backward(...)    registers as in program.h
//
// A thread computes `kWidth` adjacent units in a row: a 16-byte access in the storage type (wide
// form), or 1. An argument with strided elements or unaligned rows is read element by element,
// without effect on others.
#pragma once

#include "cell/definition.h"
#include "cuda/kernel/elementwise.h"

#include <cstdint>
#include <type_traits>
#include <utility>

namespace lltm::cuda {
namespace {

constexpr int kAccessBytes = 16;

// Units per thread in the wide form.
template <typename T>
constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(T));

// Few, so that a small step uses many multiprocessors.
constexpr int kThreads = 128;
// Allows 128 registers per thread: the default targets more blocks and spills.
constexpr int kResidentBlocks = 4;

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

// True if rows support 16-byte accesses at columns that are multiples of kWide<T>.
template <typename T>
inline bool is_wide(const Matrix<T>& matrix) {
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.data);
  return matrix.col_stride == 1 && address % kAccessBytes == 0 &&
         matrix.row_stride % kWide<std::remove_const_t<T>> == 0;
}

// Widened to the compute type; zeros if null.
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

// Narrowed; does nothing if null.
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

struct ForwardAccess {
  bool gates, bias_ih, bias_hh, parameters, c, h_next, h_operand, c_next, activations;
};
struct BackwardAccess {
  bool activations, parameters, grad_h, grad_h_state, grad_c, grad_gates, grad_c_prev;
};

template <typename T>
inline ForwardAccess access_of(const ForwardArgs<T>& a) {
  return {
      is_wide(a.gates),
      is_wide(a.bias_ih),
      is_wide(a.bias_hh),
      is_wide(a.parameters),
      is_wide(a.c),
      is_wide(a.h_next),
      is_wide(a.h_operand),
      is_wide(a.c_next),
      is_wide(a.activations)};
}

template <typename T, typename D>
inline BackwardAccess access_of(const BackwardArgs<T, D>& a) {
  return {
      is_wide(a.activations),
      is_wide(a.parameters),
      is_wide(a.grad_h),
      is_wide(a.grad_h_state),
      is_wide(a.grad_c),
      is_wide(a.grad_gates),
      is_wide(a.grad_c_prev)};
}

// Rows are multiples of an access, and registers hold all units' values. With 128 registers per
// thread, most cells in python/lltm/cells fit, with at most 11 inputs or outputs in 16 bits.
template <typename T>
constexpr bool fits_wide(const CellInfo& cell, std::int64_t hidden) {
  constexpr int kMostBytes = 88 * 4;
  const int bytes = ProgramSizes(cell).most() * kWide<T> * static_cast<int>(sizeof(compute_t<T>));
  return hidden % kWide<T> == 0 && bytes <= kMostBytes;
}

// Calls body(k) with k as a std::integral_constant. With unrolled loops, NVRTC uses up to twelve
// more registers in backward, and fewer blocks fit on a multiprocessor.
template <int kCount, typename Body>
LLTM_CELL_INLINE void for_each_index(const Body& body) {
  [&]<int... k>(std::integer_sequence<int, k...>) {
    (body(std::integral_constant<int, k>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// All loads precede all stores: c_next may be c.
template <typename Cell, int kWidth, typename T>
LLTM_CELL_INLINE void forward_at(
    const ForwardArgs<T>& a, const ForwardAccess& wide, std::int64_t n) {
  constexpr ProgramSizes sizes(Cell::kCell);
  using C = compute_t<T>;
  const Position at = position(n, a.hidden / kWidth);
  const std::int64_t row = at.row, col = at.col * kWidth;
  C in[sizes.forward_in][kWidth], out[sizes.forward_out][kWidth];
  for_each_index<Cell::kCell.slots>([&](auto slot) {
    constexpr int k = slot, of_x = Cell::kCell.x_blocks[k], of_h = Cell::kCell.h_blocks[k];
    load(a.gates, wide.gates, row, col + k * a.hidden, in[k]);
    const auto add = [&](const Matrix<const T>& bias, bool is_wide, int block) {
      C b[kWidth];
      load(bias, is_wide, 0, col + block * a.hidden, b);
      LLTM_UNROLL
      for (int j = 0; j < kWidth; ++j) in[k][j] += b[j];
    };
    if constexpr (Cell::kCell.x.contains(k)) add(a.bias_ih, wide.bias_ih, of_x);
    if constexpr (Cell::kCell.h.contains(k)) add(a.bias_hh, wide.bias_hh, of_h);
  });
  for_each_index<Cell::kCell.state_columns()>([&](auto index) {
    constexpr int k = index;
    load(a.c, wide.c, row, col + k * a.hidden, in[Cell::kCell.slots + k]);
  });
  for_each_index<Cell::kCell.parameters>([&](auto index) {
    constexpr int k = index, first = Cell::kCell.slots + Cell::kCell.state_columns();
    load(a.parameters, wide.parameters, 0, col + k * a.hidden, in[first + k]);
  });
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    C x[sizes.forward_in], y[sizes.forward_out];
    LLTM_UNROLL
    for (int k = 0; k < sizes.forward_in; ++k) x[k] = in[k][j];
    Cell::forward(x, y);
    LLTM_UNROLL
    for (int k = 0; k < sizes.forward_out; ++k) out[k][j] = y[k];
  }
  store(a.h_next, wide.h_next, row, col, out[0]);
  store(a.h_operand, wide.h_operand, row, col, out[0]);
  for_each_index<Cell::kCell.state_columns()>([&](auto index) {
    constexpr int k = index, from = Cell::kCell.reads_h ? k : 1 + k;  // h' comes first in both
    store(a.c_next, wide.c_next, row, col + k * a.hidden, out[from]);
  });
  for_each_index<Cell::kCell.saved>([&](auto index) {
    constexpr int k = index;
    store(
        a.activations, wide.activations, row, col + k * a.hidden, out[1 + Cell::kCell.states + k]);
  });
}

template <typename Cell, int kWidth, typename T, typename D>
LLTM_CELL_INLINE void backward_at(
    const BackwardArgs<T, D>& a, const BackwardAccess& wide, std::int64_t n) {
  constexpr ProgramSizes sizes(Cell::kCell);
  constexpr int dh = Cell::kCell.saved + Cell::kCell.parameters, own = Cell::kCell.reads_h ? 1 : 0;
  using C = compute_t<T>;
  const Position at = position(n, a.hidden / kWidth);
  const std::int64_t row = at.row, col = at.col * kWidth;
  C in[sizes.backward_in][kWidth], out[sizes.backward_out][kWidth];
  for_each_index<Cell::kCell.saved>([&](auto index) {
    constexpr int k = index;
    load(a.activations, wide.activations, row, col + k * a.hidden, in[k]);
  });
  for_each_index<Cell::kCell.parameters>([&](auto index) {
    constexpr int k = index;
    load(a.parameters, wide.parameters, 0, col + k * a.hidden, in[Cell::kCell.saved + k]);
  });
  // The gradient of h' has up to three parts: from the output, the next step's GEMM and its
  // element-wise part.
  load(a.grad_h, wide.grad_h, row, col, in[dh]);
  const auto add = [&](const Matrix<const D>& part, bool is_wide) {
    C d[kWidth];
    load(part, is_wide, row, col, d);
    LLTM_UNROLL
    for (int j = 0; j < kWidth; ++j) in[dh][j] += d[j];
  };
  add(a.grad_h_state, wide.grad_h_state);
  if constexpr (Cell::kCell.reads_h) add(a.grad_c, wide.grad_c);
  for_each_index<Cell::kCell.states>([&](auto index) {
    constexpr int k = index;
    load(a.grad_c, wide.grad_c, row, col + (own + k) * a.hidden, in[dh + 1 + k]);
  });
  LLTM_UNROLL
  for (int j = 0; j < kWidth; ++j) {
    C x[sizes.backward_in], y[sizes.backward_out];
    LLTM_UNROLL
    for (int k = 0; k < sizes.backward_in; ++k) x[k] = in[k][j];
    Cell::backward(x, y);
    LLTM_UNROLL
    for (int k = 0; k < sizes.backward_out; ++k) out[k][j] = y[k];
  }
  for_each_index<Cell::kCell.grad_columns()>([&](auto index) {
    constexpr int k = index;
    store(a.grad_gates, wide.grad_gates, row, col + k * a.hidden, out[k]);
  });
  for_each_index<Cell::kCell.state_columns()>([&](auto index) {
    constexpr int k = index;
    store(
        a.grad_c_prev,
        wide.grad_c_prev,
        row,
        col + k * a.hidden,
        out[Cell::kCell.grad_columns() + k]);
  });
}

// Of element type E (value_type of program_source.h).
template <typename E>
LLTM_CELL_INLINE compute_t<E> load(const StagePort& p, const Position& at) {
  if (p.data == nullptr) return compute_t<E>(0);
  return compute_t<E>(static_cast<const E*>(p.data)[at.row * p.row_stride + at.col * p.col_stride]);
}
template <typename E>
LLTM_CELL_INLINE void store(const StagePort& p, const Position& at, compute_t<E> value) {
  if (p.data != nullptr) {
    static_cast<E*>(p.data)[at.row * p.row_stride + at.col * p.col_stride] = E(value);
  }
}
// `block` * H columns to the right.
LLTM_CELL_INLINE Position in_block(const Position& at, std::int64_t hidden, int block) {
  return {at.row, at.col + block * hidden};
}

// T of the tensors, D of the gradients of states.
template <typename T, typename D>
struct StageTypes {};

// Stage: see print_stage.
template <typename Stage, int kWidth, typename T, typename D, typename Args>
LLTM_CELL_INLINE void stage_at(const Args& args, StageTypes<T, D>, std::int64_t n) {
  Stage::template run<T, D>(args, position(n, args.hidden));
}

}  // namespace
}  // namespace lltm::cuda
