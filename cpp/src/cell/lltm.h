// LLTM: an LSTM without a forget gate, with an ELU candidate.
//     i, o = sigmoid(z_i), sigmoid(z_o);  g = elu(z_g)
//     c' = c + i g;  h' = o tanh(c')
#pragma once

#include "cell/definition.h"

namespace lltm {
namespace {

struct Lltm {
  static constexpr int kSlots = 3;  // input gate, output gate, candidate
  static constexpr int kSaved = 4;  // i, o, g, tanh(c')
  static constexpr CellInfo kCell = {
      .name = "lltm",
      .slots = kSlots,
      .saved = kSaved,
      .x = {0, 3},
      .h = {0, 3},
      .x_blocks = {0, 1, 2},
      .h_blocks = {0, 1, 2},
      .states = 1,
      .reads_h = false,
      .concatenated = true,
      .modules = {.layer_class = "LLTM", .step_class = "LLTMCell", .state_names = {"c"}}};

  template <typename V>
  static LLTM_CELL_INLINE StepForward<Lltm, V> forward(const V (&z)[kSlots], const V& c) {
    using namespace math;
    const V i = sigmoid(z[0]);
    const V o = sigmoid(z[1]);
    const V g = elu(z[2]);
    const V c_next = c + i * g;
    const V tanh_c = tanh(c_next);
    return {o * tanh_c, c_next, {i, o, g, tanh_c}};
  }

  template <typename V>
  static LLTM_CELL_INLINE StepBackward<Lltm, V> backward(
      const V (&saved)[kSaved], const V& dh, const V& dc_next) {
    using namespace math;
    const V& i = saved[0];
    const V& o = saved[1];
    const V& g = saved[2];
    const V& tanh_c = saved[3];
    const V dc = dc_next + dh * o * (1 - tanh_c * tanh_c);
    const V dz_i = dc * g * (i * (1 - i));
    const V dz_o = dh * tanh_c * (o * (1 - o));
    const V dz_g = dc * i * where(g > 0, 1, g + 1);
    return {{dz_i, dz_o, dz_g}, dc};
  }
};

}  // namespace
}  // namespace lltm
