// The per-step engine: ATen's GEMMs and the element-wise kernel.
#include "common/steps.h"
#include "cpu/dispatch.h"
#include "cpu/engine/between_stages.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/step_io.h"
#include "cpu/gemm/gemm.h"
#include "cpu/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Means need complete rows.
template <typename Args, typename C, typename Run>
void run_stage(
    Args step, const BetweenStages<C>& between, int stage, int64_t rows, const Run& run) {
  const int64_t hidden = step.hidden;
  const StageMemory<C> stages = between.memory(stage, 0);
  if (stages.stage != nullptr) step.stages = &stages;
  const int64_t unit = stages.stage == nullptr ? 1 : std::max<int64_t>(hidden, 1);
  const int64_t grain = divide_up(kElementwiseGrain, unit);
  parallel_for(rows * hidden / unit, grain, [&](int64_t begin, int64_t end) {
    run(step, begin * unit, end * unit);
  });
}

}  // namespace

SequenceResult per_step_forward(const SequenceArgs& args) {
  const int64_t hidden = args.h_0->size(1);
  const at::ScalarType dtype = args.input->scalar_type();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const CellInfo& cell = *args.cell;
  const Linear linear = Linear::with_bias(args);
  // One GEMM for the input of all steps is faster. With few elements, each step is projected as in
  // PyTorch: a GEMM with many rows rounds differently, and the errors are not averaged out.
  const bool few = has_few_elements(args.h_0->size(0), hidden);
  const Tensor x = flat_rows(args.input).to(compute_dtype(dtype));
  const Tensor gates =
      few ? at::empty({x.size(0), cell.slots * hidden}, x.options()) : linear.project_x(x);
  std::vector<Tensor> operands;  // of products
  for (int p = 0; p < cell.operands().count; ++p) {
    operands.push_back(at::empty(args.h_0->sizes(), x.options()));
  }

  const Tensor c = at::empty(args.c_0->sizes(), args.input->options()).copy_(args.c_0);
  const Tensor parameters = cell_parameters(cell, args.bias_ih);
  const Tensor h = at::empty(args.h_0->sizes(), gates.options()).copy_(args.h_0);

  return visit_dtype(dtype, [&]<typename T>(T*) -> SequenceResult {
    using C = compute_t<T>;
    const ForwardIO<T> io(args, steps);
    const Range units = {0, hidden};
    const auto all_gates = read<C>(gates);
    const BetweenStages<C> between(
        cell.forward(),
        args.h_0->size(0),
        hidden,
        /*readers=*/1,
        gates.options());
    ForwardArgs<T, C> step;
    std::vector<Matrix<C>> matrices;
    for (const Tensor& operand : operands) matrices.push_back(write<C>(operand));
    step.operands = matrices.data();
    step.cell = &cell;
    step.hidden = step.layer_hidden = step.gates_step = hidden;
    step.parameters = read_row<C>(parameters);
    step.c = read<T>(c);
    step.c_next = write<T>(c);
    step.h_operand = write<C>(h);
    for (size_t k = 0; k < steps.size(); ++k) {
      const auto [offset, rows] = steps[k];
      io.enter_c(k, step.c_next, {0, args.h_0->size(0)}, units);
      io.enter_h(k, step.h_operand, {0, rows}, units);
      const Tensor step_gates = gates.narrow(0, offset, rows);
      const Tensor step_h = h.narrow(0, 0, rows);
      few ? linear.project(step_gates, step_h, x.narrow(0, offset, rows))
          : linear.add_recurrent(step_gates, step_h);
      step.gates = all_gates.from(offset);
      step.h_next = io.h_next(k, {0, rows}, units);
      step.activations = io.saved_values(k, {0, rows}, units);
      for (int stage = 0; stage < between.count(); ++stage) {
        if (stage > 0) {
          between.average(stage - 1, {0, rows}, 0);
          for (size_t p = 0; p < operands.size(); ++p) {
            if ((between.stage(stage - 1).operands >> p & 1) == 0) continue;
            for (const SlotRange slots : cell.operands()[p].gates) {
              linear.add_product(step_gates, operands[p].narrow(0, 0, rows), slots);
            }
          }
        }
        run_stage(step, between, stage, rows, elementwise<T, C>(cell).forward);
      }
      io.leave_c(k, step.c_next, {0, rows}, units);
    }
    return {io.output, h.to(dtype), c, io.saved()};
  });
}

namespace {

// Splits K (the rows): some BLAS libraries accumulate all products in one chain, whose length
// increases rounding errors.
void weight_gradients(
    const Linear& linear,
    const Weights& out,
    const Tensor& dz,
    const Tensor& h,
    const Tensor& x,
    const Tensor& saved) {
  int64_t first = 0;
  do {
    const auto rows = [&](const Tensor& t) { return t.slice(0, first, first + kGradientChain); };
    linear.weight_gradients(out, rows(dz), rows(h), rows(x), rows(saved), first > 0);
    first += kGradientChain;
  } while (first < dz.size(0));
}

Gradients gradients_of(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Linear& linear,
    const Tensor& dz,
    const Tensor& dh,
    const Tensor& dc) {
  const at::ScalarType carried_dtype = args.carried_dtype();
  const auto [want_input, want_h, want_c, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  Tensor d_input;
  if (want_input) {
    d_input = at::empty({dz.size(0), args.input->size(-1)}, dz.options());
    linear.input_gradient(d_input, dz);
  }
  const WeightGradients weights(args, dz.options());
  if (want_ih || want_hh) {
    const Tensor h = dz.size(0) == 0 ? args.h_0->narrow(0, 0, 0)
                                     : entering_h(args, steps, 0, steps.size(), dz.scalar_type());
    const Weights parts = weights.parts(*args.cell);
    weight_gradients(linear, parts, dz, h, flat_rows(args.input), args.saved);
  }
  const Tensor sums = want_bias_ih || want_bias_hh ? dz.sum(0) : Tensor();
  const auto [bias_ih, bias_hh] = bias_gradients(sums, *args.cell, want_bias_ih, want_bias_hh);
  const auto carried = [&](bool wanted, const Tensor& gradient) {
    return wanted ? gradient.to(carried_dtype) : Tensor();
  };
  return {
      want_input ? d_input.to(args.input->scalar_type()).view(args.input->sizes()) : Tensor(),
      carried(want_h, dh),
      carried(want_c, dc),
      carried(want_ih, weights.weight_ih),
      carried(weights.weight_hh.defined(), weights.weight_hh),
      carried(want_bias_ih, bias_ih),
      carried(want_bias_hh, bias_hh)};
}

}  // namespace

Gradients per_step_backward(const SequenceBackwardArgs& args) {
  const int64_t hidden = args.h_0->size(1);
  const at::ScalarType dtype = args.input->scalar_type();
  const auto options = compute_options(args.input);
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const CellInfo& cell = *args.cell;
  const Linear linear(args);

  // A row is final after its first step.
  const Tensor dh = copy_or_zeros(args.grad_h_n, args.h_0->sizes(), options);
  const Tensor dc =
      copy_or_zeros(args.grad_c_n, {args.h_0->size(0), cell.state_columns() * hidden}, options);
  const Tensor dz = at::empty({args.saved->size(0), cell.grad_columns() * hidden}, options);
  const Tensor parameters = cell_parameters(cell, args.bias_ih);
  const int operands = cell.operands().count;
  const Tensor grad_operands = at::empty({args.h_0->size(0), operands * hidden}, options);

  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    const BetweenStages<C> between(
        cell.backward(),
        args.h_0->size(0),
        hidden,
        /*readers=*/1,
        options);
    const auto all_activations = read<T>(args.saved);
    const BackwardIO<T> io(args, steps);
    const Range units = {0, hidden};
    const auto all_grad_gates = write<C>(dz);
    BackwardArgs<T, C> step;
    step.cell = &cell;
    step.hidden = step.layer_hidden = hidden;
    step.parameters = read_row<C>(parameters);
    step.grad_h_state = read<C>(dh);
    step.grad_c = read<C>(dc);
    step.grad_c_prev = write<C>(dc);
    step.grad_operands = read<C>(grad_operands);
    for (size_t k = steps.size(); k-- > 0;) {
      const auto [offset, rows] = steps[k];
      step.activations = all_activations.from(offset);
      step.grad_h = io.leave_h(k, {0, rows}, units);
      step.grad_gates = all_grad_gates.from(offset);
      const Tensor step_dz = dz.narrow(0, offset, rows);
      io.leave_c(k, step.grad_c_prev, {0, rows}, units);
      for (int stage = 0; stage < between.count(); ++stage) {
        if (stage > 0) {
          between.average(stage - 1, {0, rows}, 0);
          for (int p = 0; p < operands; ++p) {
            if ((between.stage(stage - 1).operands >> p & 1) == 0) continue;
            grad_operands.narrow(0, 0, rows)
                .narrow(1, p * hidden, hidden)
                .copy_(linear.operand_gradient(step_dz, cell.operands()[p]));
          }
        }
        run_stage(step, between, stage, rows, elementwise<T, C>(cell).backward);
      }
      linear.state_gradient(dh.narrow(0, 0, rows), step_dz);
      io.enter_h(k, write<C>(dh), {0, rows}, units);
      io.enter_c(k, step.grad_c_prev, {0, rows}, units);
    }
  });
  return gradients_of(args, steps, linear, dz, dh, dc);
}

}  // namespace lltm::cpu
