// lltm::cell on the CPU.
#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace lltm::cpu {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> step(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    bool save) {
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const Linear linear(weights, bias);
  const Tensor gates = linear.project_input(input);
  linear.add_recurrent(gates, h.to(gates.scalar_type()));

  Tensor h_next = at::empty({batch, hidden}, input.options());
  Tensor c_next = at::empty({batch, hidden}, input.options());
  Tensor activations = save ? at::empty({batch, 4 * hidden}, input.options()) : Tensor();
  visit_dtype(input.scalar_type(), [&]<typename T>(T*) {
    ForwardArgs<T, compute_t<T>> args;
    args.hidden = hidden;
    args.gates = read<compute_t<T>>(gates);
    args.gates_step = hidden;
    args.c = read<T>(c);
    args.h_next = write<T>(h_next);
    args.c_next = write<T>(c_next);
    args.activations = write<T>(activations);
    args.activations_step = hidden;
    at::parallel_for(0, batch * hidden, kGrain, [&](int64_t begin, int64_t end) {
      pointwise<T, compute_t<T>>().forward(args, begin, end);
    });
  });
  return {h_next, c_next, activations};
}

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  auto [h_next, c_next, activations] = step(input, h, c, weights, bias, /*save=*/false);
  return {h_next, c_next};
}

std::tuple<Tensor, Tensor, Tensor> cell_forward(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  return step(input, h, c, weights, bias, /*save=*/true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cell_backward(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> output_mask) {
  check_cell_backward(
      grad_h, grad_c, input, h, weights, activations);
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const auto options = input.options().dtype(compute_dtype(dtype));
  const Tensor dh = grad_h.value_or(Tensor());
  const Tensor dc_next =
      grad_c.has_value() && grad_c->defined() ? grad_c->to(options.dtype()) : Tensor();
  Tensor dz = at::empty({batch, 3 * hidden}, options);
  Tensor dc = at::empty({batch, hidden}, options);
  visit_dtype(dtype, [&]<typename T>(T*) {
    BackwardArgs<T, compute_t<T>> args;
    args.hidden = hidden;
    args.activations = read<T>(activations);
    args.activations_step = hidden;
    args.grad_h = read<T>(dh);
    args.grad_c = read<compute_t<T>>(dc_next);
    args.grad_gates = write<compute_t<T>>(dz);
    args.grad_gates_step = hidden;
    args.grad_c_prev = write<compute_t<T>>(dc);
    at::parallel_for(0, batch * hidden, kGrain, [&](int64_t begin, int64_t end) {
      pointwise<T, compute_t<T>>().backward(args, begin, end);
    });
  });

  const Linear linear(weights, std::nullopt);
  const auto [d_input, d_h, d_c, d_weights, d_bias] = output_mask;
  Tensor grad_h_prev;
  if (d_h) {
    grad_h_prev = at::empty({batch, hidden}, options);
    linear.state_gradient(grad_h_prev, dz);
    grad_h_prev = grad_h_prev.to(dtype);
  }
  return {
      d_input ? linear.input_gradient(dz).to(dtype) : Tensor(),
      grad_h_prev,
      d_c ? dc.to(dtype) : Tensor(),
      d_weights ? weights_gradient(dz, h, input).to(dtype) : Tensor(),
      d_bias ? dz.sum(0).to(dtype) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("cell", TORCH_FN(cell));
  m.impl("cell_forward", TORCH_FN(cell_forward));
  m.impl("cell_backward", TORCH_FN(cell_backward));
}

}  // namespace lltm::cpu
