#include "aten/fallback.h"

#include "aten/run_program.h"
#include "common/checkpoints.h"
#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm::aten_fallback {
namespace {

using at::Tensor;

Tensor widened(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(compute_dtype(tensor.scalar_type())) : tensor;
}

Tensor widened_or_zeros(const Tensor& grad, const Tensor& like) {
  return widened(grad.defined() ? grad : at::zeros_like(like));
}

// The columns of x (rows, I) that weight_ih multiplies, and the columns of the given gates.
std::pair<Tensor, Tensor> parts_of_input(
    const CellInfo& cell, const Tensor& x, c10::SymInt hidden) {
  const c10::SymInt projected = x.sym_size(1) - hidden * cell.given;
  return {x.slice_symint(1, 0, projected), x.slice_symint(1, projected)};
}

// The columns of the given gates follow the pre-activations with x.
Tensor project_x(const Operands& operands, const Tensor& x) {
  const CellInfo& cell = operands.cell;
  const auto project = [&](const Tensor& projected) {
    return at::linear(widened(projected), operands.weight_x, or_nullopt(operands.bias_x));
  };
  if (cell.given == 0) return project(x);
  const auto [projected, given] = parts_of_input(cell, x, operands.weight_h.sym_size(1));
  return at::cat({project(projected), widened(given)}, 1);
}

// For cells with several stages or given gates. Products add to the result.
Tensor pre_activations_by_slot(const Operands& operands, const Tensor& z_x, const Tensor& h) {
  const CellInfo& cell = operands.cell;
  const c10::SymInt hidden = operands.weight_h.sym_size(1), rows = z_x.sym_size(0);
  std::vector<Tensor> slots;
  for (int slot = 0; slot < cell.slots; ++slot) {
    Tensor z;
    const auto add = [&](const Tensor& term) { z = z.defined() ? z + term : term; };
    const auto columns_of_x = [&](int64_t k) { return z_x.narrow_symint(1, k * hidden, hidden); };
    if (cell.x.contains(slot)) add(columns_of_x(slot));
    const int given = cell.given_blocks[slot];
    if (given > 0) add(columns_of_x(cell.x.count() + given - 1));
    if (cell.direct.contains(slot)) {
      add(at::linear(h, rows_of_slot(cell, operands.weight_h, slot)));
    }
    if (cell.h.contains(slot) && operands.bias_h.defined()) {
      const c10::SymInt first = (slot - cell.h.begin) * hidden;
      add(operands.bias_h.narrow_symint(0, first, hidden));
    }
    // The only term may be a bias, or none.
    slots.push_back(
        z.defined() ? z.expand_symint({rows, hidden}) : z_x.new_zeros_symint({rows, hidden}));
  }
  return at::cat(slots, 1);
}

// (rows, S * H), from the input projection z_x and h.
Tensor pre_activations(const Operands& operands, const Tensor& z_x, const Tensor& h) {
  const CellInfo& cell = operands.cell;
  if (!cell.is_element_wise()) return pre_activations_by_slot(operands, z_x, h);
  const Tensor z_h = at::linear(h, operands.weight_h, or_nullopt(operands.bias_h));
  if (cell.x == cell.h) return z_x + z_h;
  const c10::SymInt hidden = h.sym_size(-1);
  const int both = cell.x.end - cell.h.begin;
  const auto part = [&](const Tensor& z, int begin, int end) {
    return z.slice_symint(1, begin * hidden, end * hidden);
  };
  return at::cat(
      {part(z_x, 0, cell.h.begin),
       part(z_x, cell.h.begin, cell.x.end) + part(z_h, 0, both),
       part(z_h, both, cell.h.count())},
      1);
}

// The rows of the gates that read h.
Tensor direct_weights(const Operands& operands) {
  const CellInfo& cell = operands.cell;
  const c10::SymInt hidden = operands.weight_h.sym_size(1);
  return operands.weight_h.narrow_symint(
      0, (cell.direct.begin - cell.h.begin) * hidden, cell.direct.count() * hidden);
}

Tensor columns(const CellInfo& cell, const Tensor& dz, SlotRange slots) {
  if (slots.count() == cell.grad_columns()) return dz;
  const c10::SymInt hidden = dz.sym_size(-1) / cell.grad_columns();
  return dz.slice_symint(-1, slots.begin * hidden, slots.end * hidden);
}

Tensor with_rows(const Tensor& rows, const Tensor& state) {
  return rows.size(0) == state.size(0) ? rows : at::cat({rows, state.slice(0, rows.size(0))}, 0);
}

}  // namespace

Operands::Operands(const SequenceInputs& args) : cell(*args.cell) {
  const auto [ih, hh] = weights_of(args);
  weight_x = widened(x_slots(ih, cell));
  weight_h = widened(h_slots(without_heads(hh), cell));
  if (args.bias_ih.defined()) {
    bias_x = widened(x_slots(biases_of(args.bias_ih, cell), cell));
    if (cell.parameters > 0) parameters = widened(parameters_of(args.bias_ih, cell));
  }
  if (args.bias_hh.defined()) bias_h = widened(h_slots(args.bias_hh, cell));
}

StepResult forward_of_step(
    const Operands& operands,
    const Tensor& z_x,
    const Tensor& h,
    const Tensor& c,
    const StepIO& io,
    bool save) {
  const Tensor z = pre_activations(operands, z_x, io.enter_h(widened(h)));
  return run_forward(operands.cell, z, io.enter_c(c), operands.parameters, operands.weight_h, save);
}

std::tuple<Tensor, Tensor, Tensor> backward_of_step(
    const Operands& operands,
    const Tensor& activations,
    const Tensor& dh,
    const Tensor& dc,
    const StepIO& io) {
  const CellInfo& cell = operands.cell;
  const auto [dz, dc_before] =
      run_backward(cell, activations, dh, dc, operands.parameters, operands.weight_h);
  const Tensor dz_h = columns(cell, dz, cell.direct);
  const Tensor dh_before = at::matmul(dz_h, direct_weights(operands));
  return {dz, io.enter_h(dh_before), io.enter_backward_c(dc_before)};
}

namespace {

StepIO io_of_single_step(const SequenceInputs& args) {
  return StepIO(*args.cell, args.reset, args.recurrent_mask);
}

// h (N, H) as the recurrent GEMMs read it, in the order of input rows.
Tensor recurrent_rows(const SequenceBackwardArgs& args) {
  return args.is_step() ? io_of_single_step(args).enter_h(widened(args.h_0)) : entering_h(args);
}

}  // namespace

Gradients gradients_of(
    const SequenceBackwardArgs& args,
    const Operands& operands,
    const Tensor& dz,
    const Tensor& dh,
    const Tensor& dc) {
  const CellInfo& cell = operands.cell;
  const bool concatenated = !args.weight_hh.defined();
  const Tensor dz_x = columns(cell, dz, cell.x), dz_h = columns(cell, dz, cell.h);
  const c10::SymInt hidden = operands.weight_h.sym_size(1);
  const auto of_input = [&] {
    std::vector<Tensor> parts = {at::matmul(dz_x, operands.weight_x)};
    parts.resize(1 + cell.given);
    for (int slot = 0; slot < cell.slots; ++slot) {
      const int given = cell.given_blocks[slot];
      if (given > 0) parts[given] = columns(cell, dz, {slot, slot + 1});
    }
    return (cell.given == 0 ? parts[0] : at::cat(parts, 1)).view_symint(args.input->sym_sizes());
  };
  const auto of_weight_x = [&] {
    const Tensor x = parts_of_input(cell, flat_rows(args.input), hidden).first;
    return x_blocks(at::matmul(dz_x.t(), widened(x)), cell);
  };
  const auto of_weight_h = [&] {
    if (cell.operands().count == 0) {
      return h_blocks(at::matmul(dz_h.t(), recurrent_rows(args)), cell);
    }
    std::vector<std::pair<int, Tensor>> parts;  // in pre-activation order
    const auto add = [&](SlotRange slots, const Tensor& rows) {
      if (slots.count() == 0) return;
      parts.emplace_back(slots.begin, at::matmul(columns(cell, dz, slots).t(), rows));
    };
    add(cell.direct, recurrent_rows(args));
    for (const Operand& operand : cell.operands()) {
      const Tensor v = widened(args.saved->narrow_symint(1, operand.saved * hidden, hidden));
      for (const SlotRange slots : operand.gates) add(slots, v);
    }
    std::sort(
        parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Tensor> gradients;
    for (const auto& [slot, gradient] : parts) gradients.push_back(gradient);
    return h_blocks(at::cat(gradients), cell);
  };
  const auto of_bias_x = [&] {
    const Tensor biases = x_blocks(dz_x.sum(0), cell);
    if (cell.parameters == 0) return biases;
    return at::cat({biases, columns(cell, dz, {cell.slots, cell.grad_columns()}).sum(0)});
  };
  // Cloned, because in a graph both bias gradients may be the same tensor.
  const auto of_bias_h = [&] { return h_blocks(dz_h.sum(0), cell).clone(); };
  const auto concatenated_weight = [&] {
    return concatenate(cell, {of_weight_x(), of_weight_h()});
  };
  const auto& mask = args.output_mask;
  const auto wanted = [](bool is_wanted, const auto& compute) {
    return is_wanted ? compute() : Tensor();
  };
  return {
      wanted(mask[0], of_input),
      mask[1] ? dh : Tensor(),
      mask[2] ? dc : Tensor(),
      concatenated ? wanted(mask[3], concatenated_weight) : wanted(mask[3], of_weight_x),
      with_heads(wanted(mask[4] && !concatenated, of_weight_h), args.weight_hh),
      wanted(mask[5], of_bias_x),
      wanted(mask[6], of_bias_h)};
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  const Tensor& input = args.input;
  const Operands operands(args);
  const Tensor z_x = project_x(operands, flat_rows(input));
  if (args.is_step()) {  // keeps symbolic sizes
    const StepIO io = io_of_single_step(args);
    const auto [h, c, activations] =
        forward_of_step(operands, z_x, args.h_0, args.c_0, io, args.saves_activations());
    return {
        Tensor(), h, c, args.saves_checkpoints() ? args.c_0->unsqueeze(0).clone() : activations};
  }
  std::vector<Step> steps = plan_steps(input, args.batch_sizes, args.reverse);
  // Without steps, runs a step without rows: in autograd every result depends on every argument, as
  // in the kernels.
  const bool none = steps.empty();
  if (none) steps.push_back({0, 0});

  Tensor h = args.h_0;
  Tensor c = args.c_0;
  std::vector<Tensor> outputs;
  std::vector<Tensor> activations;
  std::vector<Tensor> checkpoints;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    if (!none && has_checkpoint(k, args.saved_checkpoint_steps())) checkpoints.push_back(c);
    const StepIO io(args, steps[k]);
    const auto [h_next, c_next, saved] = forward_of_step(
        operands,
        z_x.narrow(0, offset, rows),
        h.narrow(0, 0, rows),
        c.narrow(0, 0, rows),
        io,
        args.saves_activations());
    outputs.push_back(io.leave(h_next, c_next));
    activations.push_back(saved);
    h = with_rows(h_next, h);
    c = with_rows(c_next, c);
  }
  if (args.reverse) {
    std::reverse(outputs.begin(), outputs.end());
    std::reverse(activations.begin(), activations.end());
  }
  const auto saved = [&] {
    if (args.saves_activations()) return at::cat(activations, 0);
    if (!args.saves_checkpoints()) return Tensor();
    return none ? at::empty({0, c.size(0), c.size(1)}, c.options()) : at::stack(checkpoints);
  };
  const int64_t columns = args.h_0->size(1) * args.cell->output_columns();
  return {at::cat(outputs, 0).view(output_sizes(input, columns)), h, c, saved()};
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  const Operands operands(args);
  if (args.is_step()) {
    const StepIO io = io_of_single_step(args);
    const auto [dz, dh, dc] = backward_of_step(
        operands,
        args.saved,
        widened_or_zeros(args.grad_h_n, args.h_0),
        widened_or_zeros(args.grad_c_n, args.c_0),
        io);
    return gradients_of(args, operands, dz, dh, dc);
  }
  const Tensor grad_rows = flat_rows(widened_or_zeros(args.grad_output, args.output));
  const Tensor grad_states =
      args.grad_states.defined() ? flat_rows(widened(args.grad_states)) : Tensor();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  Tensor dh = widened_or_zeros(args.grad_h_n, args.h_0);
  Tensor dc = widened_or_zeros(args.grad_c_n, args.c_0);
  const int64_t width = args.cell->grad_columns() * args.h_0->size(1);
  std::vector<Tensor> dz = {grad_rows.new_zeros({0, width})};
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    const StepIO io(args, steps[k]);
    const auto [dz_of_step, dh_before, dc_before] = backward_of_step(
        operands,
        args.saved->narrow(0, offset, rows),
        dh.narrow(0, 0, rows) + grad_rows.narrow(0, offset, rows),
        io.leave_backward(
            dc.narrow(0, 0, rows),
            grad_states.defined() ? grad_states.narrow(0, offset, rows) : grad_states),
        io);
    dz.push_back(dz_of_step);
    dh = with_rows(dh_before, dh);
    dc = with_rows(dc_before, dc);
  }
  if (!args.reverse) std::reverse(dz.begin(), dz.end());
  if (steps.empty()) {  // results must not be arguments
    dh = dh.clone();
    dc = dc.clone();
  }
  return gradients_of(args, operands, at::cat(dz), dh, dc);
}

}  // namespace lltm::aten_fallback
