// GRU, as in torch.nn. The engines' c holds h (cell.h).
//     r, u = sigmoid(z_r), sigmoid(z_u);  n = tanh(z_nx + r z_nh)
//     h' = (1 - u) n + u h
#pragma once

#include "cell/definition.h"

namespace lltm {
namespace {

struct Gru {
  static constexpr int kSlots = 4;  // candidate from x, reset gate, update gate, candidate from h
  static constexpr int kSaved = 5;  // r, u, n, z_nh, h
  static constexpr CellInfo kCell = {
      .name = "gru",
      .slots = kSlots,
      .saved = kSaved,
      .x = {0, 3},
      .h = {1, 4},
      .x_blocks = {2, 0, 1},
      .h_blocks = {-1, 0, 1, 2},
      .states = 0,
      .reads_h = true,
      .forgets = true,
      .modules = {.layer_class = "GRU", .step_class = "GRUCell"}};

  template <typename V>
  static LLTM_CELL_INLINE StepForward<Gru, V> forward(const V (&z)[kSlots], const V& h) {
    using namespace math;
    const V r = sigmoid(z[1]);
    const V u = sigmoid(z[2]);
    const V n = tanh(z[0] + r * z[3]);
    const V h_next = n + u * (h - n);
    return {h_next, h_next, {r, u, n, z[3], h}};
  }

  template <typename V>
  static LLTM_CELL_INLINE StepBackward<Gru, V> backward(const V (&saved)[kSaved], const V& dh) {
    const V& r = saved[0];
    const V& u = saved[1];
    const V& n = saved[2];
    const V& z_nh = saved[3];
    const V& h = saved[4];
    const V dz_nx = dh * (1 - u) * (1 - n * n);
    const V dz_r = dz_nx * z_nh * (r * (1 - r));
    const V dz_u = dh * (h - n) * (u * (1 - u));
    return {{dz_nx, dz_r, dz_u, dz_nx * r}, dh * u};
  }
};

}  // namespace
}  // namespace lltm
