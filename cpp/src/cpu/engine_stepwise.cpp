// The engine in its simple form: public ATen products step by step, and the
// pointwise kernel after each. For float64, for empty sizes, and where there
// is no micro-kernel.
#include "cpu/dispatch.h"
#include "cpu/engine.h"
#include "cpu/linear.h"
#include "cpu/sums.h"
#include "steps.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace lltm::cpu {

using at::Tensor;

ForwardResult stepwise_forward(const ForwardProblem& p) {
  const int64_t hidden = p.h_0.size(1);
  const at::ScalarType dtype = p.input.scalar_type();
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);
  const Linear linear(p.weights, p.bias);
  // The input's part of the pre-activations for all steps at once, which is faster; or, of
  // few elements, all of it step by step as plain PyTorch does it, because a product of
  // many rows is rounded otherwise, and nothing averages that out (engine_few_rows.cpp).
  const bool few = has_few_elements(p.h_0);
  const Tensor x = flat_rows(p.input).to(compute_dtype(dtype));
  const Tensor gates =
      few ? at::empty({x.size(0), 3 * hidden}, x.options()) : linear.project_input(x);

  std::vector<int64_t> output_shape = p.input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = at::empty(output_shape, p.input.options());
  const Tensor output_rows = flat_rows(output);
  const Tensor activations =
      p.save ? at::empty({gates.size(0), 4 * hidden}, p.input.options()) : Tensor();
  const Tensor c = at::empty(p.c_0.sizes(), p.input.options()).copy_(p.c_0);
  // The state as the products read it; each step renews its own rows.
  const Tensor h = at::empty(p.h_0.sizes(), gates.options()).copy_(p.h_0);

  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    const auto all_gates = read<C>(gates);
    const auto all_output = write<T>(output_rows);
    const auto all_activations = write<T>(activations);
    ForwardArgs<T, C> args;
    args.hidden = hidden;
    args.gates_step = hidden;
    args.c = read<T>(c);
    args.c_next = write<T>(c);
    args.h_operand = write<C>(h);
    args.activations_step = hidden;
    for (const auto [offset, rows] : steps) {
      const Tensor step_gates = gates.narrow(0, offset, rows);
      const Tensor step_h = h.narrow(0, 0, rows);
      few ? linear.project(step_gates, step_h, x.narrow(0, offset, rows))
          : linear.add_recurrent(step_gates, step_h);
      args.gates = all_gates.from(offset);
      args.h_next = all_output.from(offset);
      args.activations = all_activations.from(offset);
      at::parallel_for(0, rows * hidden, kGrain, [&](int64_t begin, int64_t end) {
        pointwise<T, C>().forward(args, begin, end);
      });
    }
  });
  return {output, h.to(dtype), c, activations};
}

Gradients stepwise_backward(const BackwardProblem& p) {
  const int64_t hidden = p.h_0.size(1);
  const at::ScalarType dtype = p.input.scalar_type();
  const auto options = p.input.options().dtype(compute_dtype(dtype));
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);
  const Linear linear(p.weights, std::nullopt);
  const Tensor grad_rows = p.grad_output.defined() ? flat_rows(p.grad_output) : Tensor();

  // Gradients of the state; a row's are final once its first step is done.
  const Tensor dh = at::zeros(p.h_0.sizes(), options);
  const Tensor dc = at::zeros(p.h_0.sizes(), options);
  if (p.grad_h_n.defined()) dh.copy_(p.grad_h_n);
  if (p.grad_c_n.defined()) dc.copy_(p.grad_c_n);
  const Tensor dz = at::empty({p.activations.size(0), 3 * hidden}, options);

  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    const auto all_activations = read<T>(p.activations);
    const auto all_grad_h = read<T>(grad_rows);
    const auto all_grad_gates = write<C>(dz);
    BackwardArgs<T, C> args;
    args.hidden = hidden;
    args.activations_step = hidden;
    args.grad_h_state = read<C>(dh);
    args.grad_c = read<C>(dc);
    args.grad_gates_step = hidden;
    args.grad_c_prev = write<C>(dc);
    for (size_t k = steps.size(); k-- > 0;) {
      const auto [offset, rows] = steps[k];
      args.activations = all_activations.from(offset);
      args.grad_h = all_grad_h.from(offset);
      args.grad_gates = all_grad_gates.from(offset);
      at::parallel_for(0, rows * hidden, kGrain, [&](int64_t begin, int64_t end) {
        pointwise<T, C>().backward(args, begin, end);
      });
      // Overwrites the gradients that were just used.
      linear.state_gradient(dh.narrow(0, 0, rows), dz.narrow(0, offset, rows));
    }
  });
  GradientSums sums(p, steps, p.weights.to(dz.scalar_type()), /*split=*/false);
  if (!steps.empty()) sums.add(0, steps.size(), dz);
  return sums.finish(dc);
}

}  // namespace lltm::cpu
