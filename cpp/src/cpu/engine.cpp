#include "cpu/engine.h"

#include "cpu/dispatch.h"
#include "cpu/linear.h"
#include "steps.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace lltm::cpu {
namespace {

using at::Tensor;

// The state (B, H) that each row of the sequence began its step with, (N, H).
Tensor previous_states(
    const std::vector<Step>& steps, const Tensor& h_0, const Tensor& h_all) {
  Tensor previous = at::empty(h_all.sizes(), h_all.options());
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    int64_t carried = 0;
    if (k > 0) {
      carried = std::min(rows, steps[k - 1].rows);
      previous.narrow(0, offset, carried)
          .copy_(h_all.narrow(0, steps[k - 1].offset, carried));
    }
    previous.narrow(0, offset + carried, rows - carried)
        .copy_(h_0.narrow(0, carried, rows - carried));
  }
  return previous;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> run_forward(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse,
    bool save) {
  const int64_t hidden = h_0.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const std::vector<Step> steps = plan_steps(input, batch_sizes, reverse);
  const Linear linear(weights, bias);
  // The input's part of the pre-activations, for all steps at once.
  const Tensor gates = linear.project_input(flat_rows(input));

  std::vector<int64_t> output_shape = input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = at::empty(output_shape, input.options());
  const Tensor output_rows = flat_rows(output);
  const Tensor activations =
      save ? at::empty({gates.size(0), 4 * hidden}, input.options()) : Tensor();
  const Tensor h = h_0.to(compute_dtype(dtype), /*non_blocking=*/false, /*copy=*/true)
                       .contiguous();
  const Tensor c = at::empty(c_0.sizes(), input.options()).copy_(c_0);

  visit_dtype(dtype, [&]<typename T>(T*) {
    const auto all_gates = read<compute_t<T>>(gates);
    const auto all_output = write<T>(output_rows);
    const auto all_activations = write<T>(activations);
    ForwardArgs<T> args;
    args.hidden = hidden;
    args.c = read<T>(c);
    args.c_next = write<T>(c);
    args.h_state = write<compute_t<T>>(h);
    for (const auto [offset, rows] : steps) {
      linear.add_recurrent(gates.narrow(0, offset, rows), h.narrow(0, 0, rows));
      args.gates = all_gates.from_row(offset);
      args.h_next = all_output.from_row(offset);
      args.activations = all_activations.from_row(offset);
      at::parallel_for(0, rows * hidden, kGrain, [&](int64_t begin, int64_t end) {
        pointwise<T>(kernels()).forward(args, begin, end);
      });
    }
  });
  return {output, h.to(dtype), c, activations};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> run_backward(
    const Tensor& grad_output,
    const Tensor& grad_h_n,
    const Tensor& grad_c_n,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& weights,
    const Tensor& output,
    const Tensor& activations,
    const std::optional<Tensor>& batch_sizes,
    bool reverse,
    std::array<bool, 5> output_mask) {
  const int64_t hidden = h_0.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const auto options = input.options().dtype(compute_dtype(dtype));
  const std::vector<Step> steps = plan_steps(input, batch_sizes, reverse);
  const Linear linear(weights, std::nullopt);
  const Tensor grad_rows =
      grad_output.defined() ? flat_rows(grad_output) : Tensor();

  // Gradients of the state; a row's are final once its first step is done.
  const Tensor dh = at::zeros(h_0.sizes(), options);
  const Tensor dc = at::zeros(h_0.sizes(), options);
  if (grad_h_n.defined()) dh.copy_(grad_h_n);
  if (grad_c_n.defined()) dc.copy_(grad_c_n);
  const Tensor dz = at::empty({activations.size(0), 3 * hidden}, options);

  visit_dtype(dtype, [&]<typename T>(T*) {
    const auto all_activations = read<T>(activations);
    const auto all_grad_h = read<T>(grad_rows);
    const auto all_grad_gates = write<compute_t<T>>(dz);
    BackwardArgs<T> args;
    args.hidden = hidden;
    args.grad_h_state = read<compute_t<T>>(dh);
    args.grad_c = read<compute_t<T>>(dc);
    args.grad_c_prev = write<compute_t<T>>(dc);
    for (size_t k = steps.size(); k-- > 0;) {
      const auto [offset, rows] = steps[k];
      args.activations = all_activations.from_row(offset);
      args.grad_h = all_grad_h.from_row(offset);
      args.grad_gates = all_grad_gates.from_row(offset);
      at::parallel_for(0, rows * hidden, kGrain, [&](int64_t begin, int64_t end) {
        pointwise<T>(kernels()).backward(args, begin, end);
      });
      linear.state_gradient(dh.narrow(0, 0, rows), dz.narrow(0, offset, rows));
    }
  });

  // What does not depend on the order of the steps, for all of them at once.
  const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] = output_mask;
  const Tensor x = flat_rows(input);
  Tensor grad_weights;
  if (d_weights) {
    const Tensor h = previous_states(steps, h_0, flat_rows(output));
    grad_weights = weights_gradient(dz, h, x).to(dtype);
  }
  return {
      d_input ? linear.input_gradient(dz).to(dtype).view(input.sizes()) : Tensor(),
      d_h_0 ? dh.to(dtype) : Tensor(),
      d_c_0 ? dc.to(dtype) : Tensor(),
      grad_weights,
      d_bias ? dz.sum(0).to(dtype) : Tensor()};
}

}  // namespace lltm::cpu
