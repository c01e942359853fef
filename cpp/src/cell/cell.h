// The cell on one page: its gates, what forward saves for backward, and the
// element-wise arithmetic of both. Everything else that depends on the cell, from the
// shape checks to the kernels, takes it from here.
//
// V is float or double in the kernels, and at::Tensor on the composite path, where ATen's
// sigmoid, tanh, elu and where are meant. So the functions are straight-line code: `where`
// selects between two values that are both already computed.
//
// H hidden units, G gates, S saved activations. W is (G * H, H + I), and
//     z = [h, x] W^T + b      (rows, G * H)
// is what forward starts from: gate k of unit j is column k * H + j. `activations` is
// (rows, S * H), laid out the same way. Of the two states, h is what the next GEMM reads;
// c is only ever combined element by element.
//
// Another cell is another such page: CONTRIBUTING.md, "Your own cell".
#pragma once

#include "cell/math.h"

#if defined(LLTM_CELL)
#include LLTM_CELL
#else

namespace lltm {
namespace {

struct Lltm {
  static constexpr int kGates = 3;  // input gate, output gate, candidate
  static constexpr int kSaved = 4;  // i, o, g, tanh(c')

  template <typename V>
  struct Forward {
    V h, c;  // h', c'
    V saved[kSaved];
  };

  template <typename V>
  struct Backward {
    V dz[kGates];
    V dc;  // gradient of c
  };

  template <typename V>
  static LLTM_CELL_INLINE Forward<V> forward(const V (&z)[kGates], const V& c) {
    using namespace math;
    const V i = sigmoid(z[0]);
    const V o = sigmoid(z[1]);
    const V g = elu(z[2]);
    const V c_next = c + i * g;
    const V tanh_c = tanh(c_next);
    return {o * tanh_c, c_next, {i, o, g, tanh_c}};
  }

  // dh and dc_next are the gradients of h' and c'.
  template <typename V>
  static LLTM_CELL_INLINE Backward<V> backward(
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

using Cell = Lltm;

}  // namespace
}  // namespace lltm
#endif
