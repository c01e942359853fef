// RNN, as in torch.nn. The engines' c holds h (cell.h); only the GEMM reads it.
//     h' = tanh(z) or relu(z)
#pragma once

#include "cell/definition.h"

namespace lltm {
namespace {

constexpr CellInfo rnn_cell(const char* name, bool bounded) {
  return {
      .name = name,
      .slots = 1,
      .saved = 1,
      .x = {0, 1},
      .h = {0, 1},
      .x_blocks = {0},
      .h_blocks = {0},
      .states = 0,
      .reads_h = true,
      .bounded = bounded,
      .forgets = true,
      .modules = {.layer_class = "RNN", .step_class = "RNNCell"}};
}

struct RnnTanh {
  static constexpr int kSlots = 1;
  static constexpr int kSaved = 1;  // h'
  static constexpr CellInfo kCell = rnn_cell("rnn_tanh", /*bounded=*/true);

  template <typename V>
  static LLTM_CELL_INLINE StepForward<RnnTanh, V> forward(const V (&z)[kSlots], const V& /*h*/) {
    using namespace math;
    const V h_next = tanh(z[0]);
    return {h_next, h_next, {h_next}};
  }

  template <typename V>
  static LLTM_CELL_INLINE StepBackward<RnnTanh, V> backward(const V (&saved)[kSaved], const V& dh) {
    return {{dh * (1 - saved[0] * saved[0])}, V(0)};
  }
};

struct RnnRelu {
  static constexpr int kSlots = 1;
  static constexpr int kSaved = 1;  // h'
  static constexpr CellInfo kCell = rnn_cell("rnn_relu", /*bounded=*/false);

  template <typename V>
  static LLTM_CELL_INLINE StepForward<RnnRelu, V> forward(const V (&z)[kSlots], const V& /*h*/) {
    using namespace math;
    const V h_next = maximum(z[0], V(0));
    return {h_next, h_next, {h_next}};
  }

  template <typename V>
  static LLTM_CELL_INLINE StepBackward<RnnRelu, V> backward(const V (&saved)[kSaved], const V& dh) {
    using namespace math;
    return {{where(not_equal(saved[0], V(0)), dh, V(0))}, V(0)};  // NaN h' keeps dh, as in ATen
  }
};

}  // namespace
}  // namespace lltm
