// LSTM, as in torch.nn, with the same gate order.
//     i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o);  g = tanh(z_g)
//     c' = f c + i g;  h' = o tanh(c')
#pragma once

#include "cell/definition.h"

namespace lltm {
namespace {

struct Lstm {
  static constexpr int kSlots = 4;  // input gate, forget gate, candidate, output gate
  static constexpr int kSaved = 6;  // i, f, g, o, tanh(c'), c
  static constexpr CellInfo kCell = {
      .name = "lstm",
      .slots = kSlots,
      .saved = kSaved,
      .x = {0, 4},
      .h = {0, 4},
      .x_blocks = {0, 1, 2, 3},
      .h_blocks = {0, 1, 2, 3},
      .states = 1,
      .reads_h = false,
      .forgets = true,
      .modules = {.layer_class = "LSTM", .step_class = "LSTMCell", .state_names = {"c"}}};

  template <typename V>
  static LLTM_CELL_INLINE StepForward<Lstm, V> forward(const V (&z)[kSlots], const V& c) {
    using namespace math;
    const V i = sigmoid(z[0]);
    const V f = sigmoid(z[1]);
    const V g = tanh(z[2]);
    const V o = sigmoid(z[3]);
    const V c_next = f * c + i * g;
    const V tanh_c = tanh(c_next);
    return {o * tanh_c, c_next, {i, f, g, o, tanh_c, c}};
  }

  template <typename V>
  static LLTM_CELL_INLINE StepBackward<Lstm, V> backward(
      const V (&saved)[kSaved], const V& dh, const V& dc_next) {
    const V& i = saved[0];
    const V& f = saved[1];
    const V& g = saved[2];
    const V& o = saved[3];
    const V& tanh_c = saved[4];
    const V& c = saved[5];
    const V dc = dc_next + dh * o * (1 - tanh_c * tanh_c);
    const V dz_i = dc * g * (i * (1 - i));
    const V dz_f = dc * c * (f * (1 - f));
    const V dz_g = dc * i * (1 - g * g);
    const V dz_o = dh * tanh_c * (o * (1 - o));
    return {{dz_i, dz_f, dz_g, dz_o}, dc * f};
  }
};

}  // namespace
}  // namespace lltm
