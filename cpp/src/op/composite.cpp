#include "op/composite.h"

#include "cell/cells.h"
#include "common/checkpoints.h"
#include "common/states.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "op/backend.h"
#include "op/run_program.h"
#include "op/tensor_value.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <vector>

namespace lltm::composite {
namespace {

using at::Tensor;

// The tensor in its compute dtype.
Tensor widened(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(compute_dtype(tensor.scalar_type())) : tensor;
}

Tensor widened_or_zeros(const Tensor& grad, const Tensor& like) {
  return widened(grad.defined() ? grad : at::zeros_like(like));
}

// The weights in the compute dtype, in the order of slots.
struct Projections {
  template <typename Args>
  explicit Projections(const Args& args) : cell(*args.cell) {
    const auto [ih, hh] = weights_of(args);
    weight_x = widened(x_slots(ih, cell));
    weight_h = widened(h_slots(hh, cell));
    if (args.bias_ih.defined()) {
      bias_x = widened(x_slots(biases_of(args.bias_ih, cell), cell));
      if (cell.parameters > 0) parameters = widened(parameters_of(args.bias_ih, cell));
    }
    if (args.bias_hh.defined()) bias_h = widened(h_slots(args.bias_hh, cell));
  }

  Tensor of_x(const Tensor& x) const { return at::linear(x, weight_x, or_nullopt(bias_x)); }
  // The pre-activations (rows, S * H) from of_x and h.
  Tensor with_h(const Tensor& projected, const Tensor& h) const {
    const Tensor recurrent = at::linear(h, weight_h, or_nullopt(bias_h));
    if (cell.x == cell.h) return projected + recurrent;
    const c10::SymInt hidden = h.sym_size(-1);
    const int both = cell.x.end - cell.h.begin;
    const auto part = [&](const Tensor& z, int begin, int end) {
      return z.slice_symint(1, begin * hidden, end * hidden);
    };
    return at::cat(
        {part(projected, 0, cell.h.begin),
         part(projected, cell.h.begin, cell.x.end) + part(recurrent, 0, both),
         part(recurrent, both, cell.h.count())},
        1);
  }

  // The columns of dz that x and h have a part in.
  Tensor dz_x(const Tensor& dz) const { return columns(dz, cell.x); }
  Tensor dz_h(const Tensor& dz) const { return columns(dz, cell.h); }
  // Those of the cell's parameters.
  Tensor of_parameters(const Tensor& dz) const {
    return columns(dz, {cell.slots, cell.grad_columns()});
  }

  const CellInfo& cell;
  Tensor weight_x, weight_h, bias_x, bias_h;
  Tensor parameters;  // of the cell, (P * H)

 private:
  Tensor columns(const Tensor& dz, SlotRange slots) const {
    if (slots.count() == cell.grad_columns()) return dz;
    const c10::SymInt hidden = dz.sym_size(1) / cell.grad_columns();
    return dz.slice_symint(1, slots.begin * hidden, slots.end * hidden);
  }
};

// The gradients of weights and biases, added up over steps, in the order of slots.
class ParameterGradients {
 public:
  ParameterGradients(const Projections& projections, const OutputMask& mask, bool joined)
      : projections_(projections), mask_(mask), joined_(joined) {}

  // From dz (rows, (S + P) * H) and the x and h of these rows.
  void add(const Tensor& dz, const Tensor& x, const Tensor& h) {
    const auto [input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh] = mask_;
    const Tensor dz_x = projections_.dz_x(dz);
    const Tensor dz_h = projections_.dz_h(dz);
    if (weight_ih) sum(weight_x_, at::matmul(dz_x.t(), widened(x)));
    if (joined_ ? weight_ih : weight_hh) sum(weight_h_, at::matmul(dz_h.t(), widened(h)));
    if (bias_ih) {
      sum(bias_x_, dz_x.sum(0));
      if (projections_.cell.parameters > 0) sum(parameters_, projections_.of_parameters(dz).sum(0));
    }
    if (bias_hh) sum(bias_h_, dz_h.sum(0));
  }

  // weight_ih, weight_hh, bias_ih, bias_hh; undefined unless wanted.
  std::array<Tensor, 4> finish(at::ScalarType dtype) const {
    const CellInfo& cell = projections_.cell;
    const auto x = [&](const Tensor& t) { return t.defined() ? x_blocks(t, cell) : t; };
    const auto h = [&](const Tensor& t) { return t.defined() ? h_blocks(t, cell) : t; };
    const auto result = [&](const Tensor& t) { return t.defined() ? t.to(dtype) : t; };
    const Tensor bias_ih = parameters_.defined() ? at::cat({x(bias_x_), parameters_}) : x(bias_x_);
    const Weights weights = {x(weight_x_), h(weight_h_)};
    const bool join_them = joined_ && weight_x_.defined();
    return {
        result(join_them ? join(cell, weights) : weights.ih),
        join_them ? Tensor() : result(weights.hh),
        result(bias_ih),
        result(h(bias_h_))};
  }

 private:
  static void sum(Tensor& total, const Tensor& part) {
    total = total.defined() ? total + part : part;
  }

  const Projections& projections_;
  const OutputMask mask_;
  const bool joined_;
  Tensor weight_x_, weight_h_, bias_x_, bias_h_, parameters_;
};

// The parts of (rows, count * H), each widened.
template <size_t count>
void unpack(const Tensor& packed, Value (&parts)[count]) {
  const std::vector<Tensor> chunks = packed.chunk(count, 1);
  std::transform(
      chunks.begin(), chunks.end(), parts, [](const Tensor& part) { return Value{widened(part)}; });
}

// The inverse.
template <size_t count>
Tensor pack(const Value (&parts)[count]) {
  std::vector<Tensor> tensors;
  for (const Value& part : parts) tensors.push_back(part.tensor);
  return at::cat(tensors, 1);
}

// The gradient of what engines call c.
template <typename Args>
Tensor grad_of_c(const Args& args) {
  const Tensor& given = args.grad_of_c();
  return given.defined() ? widened(given) : widened(at::zeros_like(args.state_c()));
}

// One step, from the pre-activations (rows, S * H), c and the cell's parameters.
StepResult step(
    const CellInfo& cell,
    const Tensor& gates,
    const Tensor& c,
    const Tensor& parameters,
    bool save) {
  if (cell.programs != nullptr) return run_forward(cell, gates, c, parameters, save);
  return visit_cell(cell, [&]<typename Page>(Page) -> StepResult {
    Value z[Page::kSlots];
    unpack(gates, z);
    const at::ScalarType dtype = c.scalar_type();
    const auto [h_next, c_next, saved] = Page::forward(z, Value{widened(c)});
    return {
        h_next.tensor.to(dtype), c_next.tensor.to(dtype), save ? pack(saved).to(dtype) : Tensor()};
  });
}

// Gradients of the pre-activations and parameters (rows, (S + P) * H) and of c, not rounded.
std::tuple<Tensor, Tensor> step_backward(
    const CellInfo& cell,
    const Tensor& activations,
    const Tensor& grad_h,
    const Tensor& grad_c,
    const Tensor& parameters) {
  if (cell.programs != nullptr) return run_backward(cell, activations, grad_h, grad_c, parameters);
  return visit_cell(cell, [&]<typename Page>(Page) -> std::tuple<Tensor, Tensor> {
    Value saved[Page::kSaved];
    unpack(activations, saved);
    const auto [dz, dc] = Page::backward(saved, Value{grad_h}, Value{grad_c});
    return {pack(dz), dc.tensor};
  });
}

// `state` with its first rows replaced by `rows`.
Tensor with_rows(const Tensor& rows, const Tensor& state) {
  return rows.size(0) == state.size(0) ? rows : at::cat({rows, state.slice(0, rows.size(0))}, 0);
}

// The rows of step k that start anew, (rows), of `reset` (T, B) or (N); undefined without it.
Tensor reset_of(const Tensor& reset, const Step& step) {
  return reset.defined() ? reset.reshape(-1).narrow(0, step.offset, step.rows) : reset;
}

// The gradient of a state before a step.
Tensor cut(const Tensor& gradient, const Tensor& reset) {
  return reset.defined() ? restarted_h(gradient, reset) : gradient;
}

// The states before step k: rows of the output of the step before, and of the initial state
// where a row starts at step k.
Tensor state_before(
    const std::vector<Step>& steps, size_t k, const Tensor& h_0, const Tensor& output_rows) {
  const Tensor initial = h_0.narrow(0, 0, steps[k].rows);
  if (k == 0) return initial;
  const int64_t carried = carried_rows(steps, k);
  return with_rows(output_rows.narrow(0, steps[k - 1].offset, carried), initial);
}

}  // namespace

StepResult step_forward(const StepArgs& args) {
  const Projections project(args);
  const Tensor gates = project.with_h(project.of_x(widened(args.input)), widened(args.h));
  return step(*args.cell, gates, args.state_c(), project.parameters, args.save);
}

Gradients step_backward(const StepBackwardArgs& args) {
  const Tensor& h = args.h;
  const at::ScalarType dtype = args.input.scalar_type();
  const Projections project(args);
  const auto [dz, dc] = step_backward(
      *args.cell,
      args.activations,
      widened_or_zeros(args.grad_h, h),
      grad_of_c(args),
      project.parameters);
  ParameterGradients parameters(project, args.output_mask, !args.weight_hh.defined());
  parameters.add(dz, args.input, h);
  const auto [weight_ih, weight_hh, bias_ih, bias_hh] = parameters.finish(dtype);
  const auto& mask = args.output_mask;
  return {
      mask[0] ? at::matmul(project.dz_x(dz), project.weight_x).to(dtype) : Tensor(),
      mask[1] ? at::matmul(project.dz_h(dz), project.weight_h).to(dtype) : Tensor(),
      mask[2] ? dc.to(dtype) : Tensor(),
      weight_ih,
      weight_hh,
      bias_ih,
      bias_hh};
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  const Tensor& input = args.input;
  const int64_t hidden = args.h_0.size(1);
  const Projections project(args);
  const Tensor projected = project.of_x(widened(flat_rows(input)));
  std::vector<Step> steps = plan_steps(input, args.batch_sizes, args.reverse);
  // Without steps, one of no rows: so every result depends on every argument, as those of the
  // kernels do for autograd.
  const bool none = steps.empty();
  if (none) steps.push_back({0, 0});

  Tensor h = args.h_0;
  Tensor c = args.state_c();
  std::vector<Tensor> outputs;
  std::vector<Tensor> activations;
  std::vector<Tensor> checkpoints;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    if (!none && has_checkpoint(k, args.saved_checkpoint_steps())) checkpoints.push_back(c);
    Tensor step_h = h.narrow(0, 0, rows);
    Tensor step_c = c.narrow(0, 0, rows);
    if (const Tensor reset = reset_of(args.reset, steps[k]); reset.defined()) {
      step_h = restarted_h(step_h, reset);
      step_c = restarted_c(*args.cell, step_c, reset);
    }
    const Tensor operand = masked_h(widened(step_h), args.recurrent_mask);
    const Tensor gates = project.with_h(projected.narrow(0, offset, rows), operand);
    const auto [h_next, c_next, saved] =
        step(*args.cell, gates, step_c, project.parameters, args.saves_activations());
    outputs.push_back(h_next);
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
  std::vector<int64_t> output_shape = input.sizes().vec();
  output_shape.back() = hidden;
  return {at::cat(outputs, 0).view(output_shape), h, c, saved()};
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  const Tensor& input = args.input;
  const Tensor& h_0 = args.h_0;
  const at::ScalarType dtype = input.scalar_type();
  const at::ScalarType carried_dtype = args.carried_dtype();
  const Projections project(args);
  const Tensor x = flat_rows(input);
  const Tensor output_rows = flat_rows(args.output);
  const Tensor grad_rows = flat_rows(widened_or_zeros(args.grad_output, args.output));
  const std::vector<Step> steps = plan_steps(input, args.batch_sizes, args.reverse);
  const auto& mask = args.output_mask;

  Tensor dh = widened_or_zeros(args.grad_h_n, h_0);
  Tensor dc = grad_of_c(args);
  ParameterGradients parameters(project, mask, !args.weight_hh.defined());
  std::vector<Tensor> dx(steps.size());
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    const auto [dz, dc_prev] = step_backward(
        *args.cell,
        args.saved.narrow(0, offset, rows),
        dh.narrow(0, 0, rows) + grad_rows.narrow(0, offset, rows),
        dc.narrow(0, 0, rows),
        project.parameters);
    const Tensor reset = reset_of(args.reset, steps[k]);
    const Tensor d_operand = at::matmul(project.dz_h(dz), project.weight_h);
    dh = with_rows(cut(masked_h(d_operand, args.recurrent_mask), reset), dh);
    dc = with_rows(cut(dc_prev, reset), dc);
    if (mask[0]) dx[k] = at::matmul(project.dz_x(dz), project.weight_x).to(dtype);
    const Tensor h = cut(state_before(steps, k, h_0, output_rows), reset);
    parameters.add(dz, x.narrow(0, offset, rows), masked_h(widened(h), args.recurrent_mask));
  }
  if (steps.empty()) {  // zeros
    parameters.add(
        x.new_zeros({0, args.cell->grad_columns() * h_0.size(1)}, project.weight_x.scalar_type()),
        x,
        h_0.narrow(0, 0, 0));
  }
  if (args.reverse) std::reverse(dx.begin(), dx.end());
  const auto input_gradient = [&] {
    return steps.empty() ? at::zeros_like(input) : at::cat(dx, 0).view(input.sizes());
  };
  const auto state_gradient = [&](const Tensor& gradient) {
    return gradient.to(carried_dtype, /*non_blocking=*/false, /*copy=*/steps.empty());
  };
  const auto [weight_ih, weight_hh, bias_ih, bias_hh] = parameters.finish(carried_dtype);
  return {
      mask[0] ? input_gradient() : Tensor(),
      mask[1] ? state_gradient(dh) : Tensor(),
      mask[2] ? state_gradient(dc) : Tensor(),
      weight_ih,
      weight_hh,
      bias_ih,
      bias_hh};
}

Gradients step_backward_anew(const StepBackwardArgs& args) {
  const auto [h_next, c_next, activations] = step_forward({args, /*save=*/true});
  return step_backward({args, activations, args.grad_h, args.grad_c, args.output_mask});
}

Gradients sequence_backward_anew(const SequenceBackwardArgs& args) {
  SequenceInputs without_checkpoints = args;
  without_checkpoints.checkpoint_steps = 0;
  const auto [output, h_n, c_n, activations] =
      sequence_forward({without_checkpoints, /*save=*/true});
  return sequence_backward(
      {without_checkpoints,
       output,
       activations,
       args.grad_output,
       args.grad_h_n,
       args.grad_c_n,
       args.output_mask});
}

namespace {

struct Composite {
  using DeviceGuard = NoDeviceGuard;
  static constexpr auto step_forward = composite::step_forward;
  static constexpr auto step_backward = composite::step_backward;
  static constexpr auto sequence_forward = composite::sequence_forward;
  static constexpr auto sequence_backward = composite::sequence_backward;

  // The joined matrix.
  static Tensor prepack(
      const CellInfo& cell,
      const Tensor& weight_ih,
      const Tensor& weight_hh,
      std::optional<at::ScalarType> dtype) {
    TORCH_CHECK(
        !dtype.has_value(),
        "lltm::prepack: expected weights on the CPU to quantise, got some on device ",
        weight_ih.device());
    return weight_hh.defined() ? join(cell, {weight_ih, weight_hh})
                               : weight_ih.clone(at::MemoryFormat::Contiguous);
  }

  static SequenceResult sequence_prepacked(const SequenceArgs& args) {
    TORCH_CHECK(
        args.weight_ih.scalar_type() == args.input.scalar_type(),
        "lltm::sequence_prepacked: expected weights prepacked on device ",
        args.input.device(),
        ", got some that were prepacked on the CPU");
    // Through the dispatcher: a device with fused kernels runs those.
    auto [output, h_n, c_n] = op::sequence(args);
    return {output, h_n, c_n, Tensor()};
  }
};

// Without anything that is written in place.
struct Mapped : Composite {
  static constexpr auto checkpointed_backward = composite::sequence_backward_anew;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  register_backend<Composite>(m);
}

// That a tensor can be cut into `parts` pieces of equal width.
void check_parts(const char* name, const Tensor& tensor, int parts) {
  TORCH_CHECK_VALUE(
      tensor.dim() == 2 && tensor.sym_size(1) % parts == 0,
      "lltm: expected ",
      name,
      " of shape (rows, ",
      parts,
      "H), got ",
      tensor.sym_sizes());
}

// For what decomposes the operators.
std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>, bool, int64_t, int64_t>
describe(std::string_view name) {
  const CellInfo& cell = get_cell("lltm::_cell", name);
  std::vector<int64_t> x, h;
  for (int k = 0; k < cell.slots; ++k) {
    x.push_back(cell.x.contains(k) ? cell.x_blocks[k] : -1);
    h.push_back(cell.h.contains(k) ? cell.h_blocks[k] : -1);
  }
  std::vector<double> states;
  for (int k = 0; k < cell.states; ++k) {
    states.push_back(first_value(cell, k + (cell.reads_h ? 1 : 0)));
  }
  return {x, h, states, cell.reads_h, cell.parameters, cell.saved};
}

std::tuple<int64_t, int64_t> instructions(std::string_view name) {
  const CellPrograms* const programs = get_cell("lltm::_instructions", name).programs;
  TORCH_CHECK_VALUE(programs != nullptr, "lltm::_instructions: expected a program, got ", name);
  return {programs->forward.size, programs->backward.size};
}

StepResult elementwise(
    std::string_view name,
    const Tensor& z,
    const Tensor& c,
    const std::optional<Tensor>& parameters) {
  const CellInfo& cell = get_cell("lltm::_elementwise", name);
  check_parts("z", z, cell.slots);
  check_parts("c", c, cell.state_columns());
  return step(cell, z, c, or_undefined(parameters), /*save=*/true);
}

std::tuple<Tensor, Tensor> elementwise_backward(
    std::string_view name,
    const Tensor& activations,
    const Tensor& dh,
    const Tensor& dc,
    const std::optional<Tensor>& parameters) {
  const CellInfo& cell = get_cell("lltm::_elementwise_backward", name);
  check_parts("activations", activations, cell.saved);
  check_parts("dc", dc, cell.state_columns());
  return step_backward(cell, activations, dh, dc, or_undefined(parameters));
}

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_elementwise", TORCH_FN(elementwise));
  m.impl("_elementwise_backward", TORCH_FN(elementwise_backward));
  m.impl("_cell", TORCH_FN(describe));
  m.impl("_instructions", TORCH_FN(instructions));
}

// Under torch.vmap the operators of training run as ATen operations, which have vmap rules.
// vmap.cpp has the rules of the operators that users call.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  register_training<Mapped>(m);
}

}  // namespace lltm::composite
