// One step: two products and a kernel; backward a kernel, and a product for each
// gradient.
#include "cuda/dispatch.h"
#include "cuda/engine.h"
#include "cuda/pointwise.h"
#include "cuda/products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace lltm::cuda {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> cell_forward(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    bool save) {
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const Tensor h_next = at::empty({batch, hidden}, input.options());
  const Tensor c_next = at::empty({batch, hidden}, input.options());
  const Tensor activations = save ? at::empty({batch, 4 * hidden}, input.options()) : Tensor();
  const Tensor gates = at::empty({batch, 3 * hidden}, input.options().dtype(compute_dtype(dtype)));

  const Tensor x = as_operand(input);
  const Tensor h_operand = as_operand(h);
  const Tensor weights_h = as_operand(weights.slice(1, 0, hidden));
  const Tensor weights_x = as_operand(weights.slice(1, hidden));
  const Products products(dtype);
  products.multiply(operand(x), transposed(operand(weights_x)), result(gates), false);
  products.multiply(operand(h_operand), transposed(operand(weights_h)), result(gates), true);

  visit_dtype(dtype, [&]<typename T>(T*) {
    ForwardArgs<T> args;
    args.rows = batch;
    args.hidden = hidden;
    args.gates = read<compute_t<T>>(gates);
    args.bias = read_row<T>(bias.value_or(Tensor()));
    args.c = read<T>(c);
    args.h_next = write<T>(h_next);
    args.c_next = write<T>(c_next);
    args.activations = write<T>(activations);
    launch_forward(args, current_stream());
  });
  return {h_next, c_next, activations};
}

Gradients cell_backward(
    const Tensor& grad_h,
    const Tensor& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> wanted) {
  const int64_t hidden = h.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const auto [want_input, want_h, want_c, want_weights, want_bias] = wanted;
  const auto empty_if = [&](bool want, const Tensor& like) {
    return want ? at::empty(like.sizes(), input.options()) : Tensor();
  };
  const Tensor dz = at::empty({h.size(0), 3 * hidden}, input.options());
  const Tensor d_c = empty_if(want_c, h);
  visit_dtype(dtype, [&]<typename T>(T*) {
    BackwardArgs<T, T> args;
    args.rows = h.size(0);
    args.hidden = hidden;
    args.activations = read<T>(activations);
    args.grad_h = read<T>(grad_h);
    args.grad_c = read<T>(grad_c);
    args.grad_gates = write<T>(dz);
    args.grad_c_prev = write<T>(d_c);
    launch_backward(args, current_stream());
  });

  const Products products(dtype);
  const Tensor d_input = empty_if(want_input, input);
  const Tensor d_h = empty_if(want_h, h);
  const Tensor d_weights = empty_if(want_weights, weights);
  if (want_input) {
    const Tensor weights_x = as_operand(weights.slice(1, hidden));
    products.multiply(operand(dz), operand(weights_x), result(d_input), false);
  }
  if (want_h) {
    const Tensor weights_h = as_operand(weights.slice(1, 0, hidden));
    products.multiply(operand(dz), operand(weights_h), result(d_h), false);
  }
  if (want_weights) {
    const Operand dz_t = transposed(operand(dz));
    const Tensor h_operand = as_operand(h);
    const Tensor x = as_operand(input);
    products.multiply(dz_t, operand(h_operand), result(d_weights.slice(1, 0, hidden)), false);
    products.multiply(dz_t, operand(x), result(d_weights.slice(1, hidden)), false);
  }
  // ATen's sum adds in a fixed order, in float32.
  return {d_input, d_h, d_c, d_weights, want_bias ? dz.sum(0) : Tensor()};
}

}  // namespace lltm::cuda
