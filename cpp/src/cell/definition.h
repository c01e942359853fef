// A cell definition (lltm.h, lstm.h, gru.h, rnn.h) has kCell, kSlots, kSaved and the element-wise
// part of a step:
//     StepForward<Definition, V> forward(z, c)
//     StepBackward<Definition, V> backward(saved, dh, dc_next)    dh, dc_next: gradients of h', c'
// If h is the only state, c is h, and backward(saved, dh) gets the complete gradient of h'.
//
// V is float or double in kernels, and a recorded value in record_definition.h. The functions are
// therefore straight-line code with the operations of math.h.
//
// Device code: no PyTorch or standard headers.
#pragma once

#include "cell/cell.h"
#include "cell/math.h"

namespace lltm {

template <typename Definition, typename V>
struct StepForward {
  V h, c;  // h', c'
  V saved[Definition::kSaved];
};

template <typename Definition, typename V>
struct StepBackward {
  V dz[Definition::kSlots];
  V dc;  // gradient of c
};

// Register counts of a cell's programs.
struct ProgramSizes {
  int forward_in, forward_out, backward_in, backward_out;

  constexpr explicit ProgramSizes(const CellInfo& cell)
      : forward_in(cell.slots + cell.state_columns() + cell.parameters),
        forward_out(1 + cell.states + cell.saved),
        backward_in(cell.saved + cell.parameters + 1 + cell.states),
        backward_out(cell.grad_columns() + cell.state_columns()) {}
};

namespace {

// If h is the only state, dc_next is part of the gradient of h'.
template <typename Definition, typename V>
LLTM_CELL_INLINE StepBackward<Definition, V> backward_of(
    const V (&saved)[Definition::kSaved], const V& dh, const V& dc_next) {
  if constexpr (Definition::kCell.has_c()) {
    return Definition::backward(saved, dh, dc_next);
  } else {
    return Definition::backward(saved, V(dh + dc_next));
  }
}

template <typename Definition>
struct DefinitionRegisters {
  static constexpr CellInfo kCell = Definition::kCell;
  static constexpr ProgramSizes kSizes = ProgramSizes(kCell);

  // Of a column of c. Programs of custom cells have other values.
  static LLTM_CELL_INLINE double initial(int /*column*/) { return 0; }

  template <typename V>
  static LLTM_CELL_INLINE void forward(
      const V (&in)[kSizes.forward_in], V (&out)[kSizes.forward_out]) {
    V z[Definition::kSlots];
    LLTM_UNROLL
    for (int k = 0; k < Definition::kSlots; ++k) z[k] = in[k];
    const auto y = Definition::forward(z, in[Definition::kSlots]);
    out[0] = y.h;
    if constexpr (kCell.has_c()) out[1] = y.c;
    LLTM_UNROLL
    for (int k = 0; k < Definition::kSaved; ++k) out[1 + kCell.states + k] = y.saved[k];
  }

  template <typename V>
  static LLTM_CELL_INLINE void backward(
      const V (&in)[kSizes.backward_in], V (&out)[kSizes.backward_out]) {
    V saved[Definition::kSaved];
    LLTM_UNROLL
    for (int k = 0; k < Definition::kSaved; ++k) saved[k] = in[k];
    const auto d = [&] {
      if constexpr (kCell.has_c()) {
        return Definition::backward(saved, in[Definition::kSaved], in[Definition::kSaved + 1]);
      } else {
        return Definition::backward(saved, in[Definition::kSaved]);
      }
    }();
    LLTM_UNROLL
    for (int k = 0; k < Definition::kSlots; ++k) out[k] = d.dz[k];
    out[Definition::kSlots] = d.dc;
  }
};

}  // namespace
}  // namespace lltm
