// The code of one thread of an element-wise kernel of a cell that a user has written: that of
// elementwise_kernels.h, with a page that program_source.h prints in the place of a built-in one:
//     static constexpr CellInfo kCell
//     void forward(const V (&in)[], V (&out)[]), void backward(...)    registers as in program.h
//
// What a program writes may be what it reads, as c_next is c: all loads come before all stores.
#pragma once

#include "cuda/kernel/elementwise_kernels.h"

#include <cstdint>

namespace lltm::cuda {
namespace {

// How many inputs and outputs the programs of a cell have.
struct ProgramSizes {
  int forward_in, forward_out, backward_in, backward_out;

  constexpr explicit ProgramSizes(const CellInfo& cell)
      : forward_in(cell.slots + cell.state_columns() + cell.parameters),
        forward_out(1 + cell.states + cell.saved),
        backward_in(cell.saved + cell.parameters + 1 + cell.states),
        backward_out(cell.grad_columns() + cell.state_columns()) {}

  constexpr int most() const {
    const int of_forward = forward_in > forward_out ? forward_in : forward_out;
    const int of_backward = backward_in > backward_out ? backward_in : backward_out;
    return of_forward > of_backward ? of_forward : of_backward;
  }
};

// Whether a thread's values of kWide<T> units fit in registers, of which each kernel may have 128:
// those of the cells in examples/cells do, at most 11 inputs or outputs in 16 bits.
template <typename T>
constexpr bool fits_wide(const ProgramSizes& sizes) {
  constexpr int kMostBytes = 88 * 4;
  return sizes.most() * kWide<T> * static_cast<int>(sizeof(compute_t<T>)) <= kMostBytes;
}

// Before a statement, for k < count; `count` is known and may be 0.
#define LLTM_EACH(k, count) LLTM_UNROLL for (int k = 0; k < (count); ++k)

// Piece n of (rows, hidden / kWidth).
template <typename Page, int kWidth, typename T>
LLTM_CELL_INLINE void forward_program_at(
    const ForwardArgs<T>& a, const ForwardAccess& wide, std::int64_t n) {
  constexpr CellInfo cell = Page::kCell;
  constexpr ProgramSizes sizes(cell);
  constexpr int own = cell.reads_h ? 1 : 0;  // h stands before the other states
  using C = compute_t<T>;
  const Position at = position(n, a.hidden / kWidth);
  const std::int64_t row = at.row, col = at.col * kWidth;
  C in[sizes.forward_in][kWidth], out[sizes.forward_out][kWidth];
  LLTM_EACH(k, cell.slots) {
    load(a.gates, wide.gates, row, col + k * a.hidden, in[k]);
    C bias[kWidth];
    if (cell.x.contains(k)) {
      load(a.bias_ih, wide.bias_ih, 0, col + cell.x_blocks[k] * a.hidden, bias);
      LLTM_EACH(j, kWidth) in[k][j] += bias[j];
    }
    if (cell.h.contains(k)) {
      load(a.bias_hh, wide.bias_hh, 0, col + cell.h_blocks[k] * a.hidden, bias);
      LLTM_EACH(j, kWidth) in[k][j] += bias[j];
    }
  }
  constexpr int states = cell.slots, parameters = states + cell.state_columns();
  LLTM_EACH(k, cell.state_columns()) load(a.c, wide.c, row, col + k * a.hidden, in[states + k]);
  LLTM_EACH(k, cell.parameters) {
    load(a.parameters, wide.parameters, 0, col + k * a.hidden, in[parameters + k]);
  }
  LLTM_EACH(j, kWidth) {
    C x[sizes.forward_in], y[sizes.forward_out];
    LLTM_EACH(k, sizes.forward_in) x[k] = in[k][j];
    Page::forward(x, y);
    LLTM_EACH(k, sizes.forward_out) out[k][j] = y[k];
  }
  store(a.h_next, wide.h_next, row, col, out[0]);
  store(a.h_operand, wide.h_operand, row, col, out[0]);
  if (own == 1) store(a.c_next, wide.c_next, row, col, out[0]);
  LLTM_EACH(k, cell.states) {
    store(a.c_next, wide.c_next, row, col + (own + k) * a.hidden, out[1 + k]);
  }
  LLTM_EACH(k, cell.saved) {
    store(a.activations, wide.activations, row, col + k * a.hidden, out[1 + cell.states + k]);
  }
}

template <typename Page, int kWidth, typename T, typename D>
LLTM_CELL_INLINE void backward_program_at(
    const BackwardArgs<T, D>& a, const BackwardAccess& wide, std::int64_t n) {
  constexpr CellInfo cell = Page::kCell;
  constexpr ProgramSizes sizes(cell);
  constexpr int own = cell.reads_h ? 1 : 0;
  using C = compute_t<T>;
  const Position at = position(n, a.hidden / kWidth);
  const std::int64_t row = at.row, col = at.col * kWidth;
  C in[sizes.backward_in][kWidth], out[sizes.backward_out][kWidth];
  LLTM_EACH(k, cell.saved) {
    load(a.activations, wide.activations, row, col + k * a.hidden, in[k]);
  }
  LLTM_EACH(k, cell.parameters) {
    load(a.parameters, wide.parameters, 0, col + k * a.hidden, in[cell.saved + k]);
  }
  // The gradient of h': of the output, through the next step's GEMM and, where the cell reads h,
  // through its element-wise part.
  constexpr int dh = cell.saved + cell.parameters;
  C part[kWidth];
  load(a.grad_h, wide.grad_h, row, col, in[dh]);
  load(a.grad_h_state, wide.grad_h_state, row, col, part);
  LLTM_EACH(j, kWidth) in[dh][j] += part[j];
  if (own == 1) {
    load(a.grad_c, wide.grad_c, row, col, part);
    LLTM_EACH(j, kWidth) in[dh][j] += part[j];
  }
  LLTM_EACH(k, cell.states) {
    load(a.grad_c, wide.grad_c, row, col + (own + k) * a.hidden, in[dh + 1 + k]);
  }
  LLTM_EACH(j, kWidth) {
    C x[sizes.backward_in], y[sizes.backward_out];
    LLTM_EACH(k, sizes.backward_in) x[k] = in[k][j];
    Page::backward(x, y);
    LLTM_EACH(k, sizes.backward_out) out[k][j] = y[k];
  }
  LLTM_EACH(k, cell.grad_columns()) {
    store(a.grad_gates, wide.grad_gates, row, col + k * a.hidden, out[k]);
  }
  LLTM_EACH(k, cell.state_columns()) {
    const int of_state = cell.grad_columns() + k;
    store(a.grad_c_prev, wide.grad_c_prev, row, col + k * a.hidden, out[of_state]);
  }
}

#undef LLTM_EACH

}  // namespace
}  // namespace lltm::cuda
