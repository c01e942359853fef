// A cell definition (lltm.h, lstm.h, gru.h, rnn.h) has kCell, kSlots, kSaved and the element-wise
// part of a step:
//     StepForward<Definition, V> forward(z, c)
//     StepBackward<Definition, V> backward(saved, dh, dc_next)    dh, dc_next: gradients of h', c'
// If h is the only state, c is h, and backward(saved, dh) gets the complete gradient of h'.
//
// V is float or double in kernels, and a recorded value in record_definition.h. The functions are
// therefore straight-line code with the operations of math.h.
//
// No PyTorch or standard header: compiled for each instruction set.
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

}  // namespace
}  // namespace lltm
