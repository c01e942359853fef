#include "op/aten_fallback.h"

#include "cell/program_compiler.h"
#include "common/checkpoints.h"
#include "common/device.h"
#include "common/schedule_log.h"
#include "common/states.h"
#include "common/step_io.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "op/backend.h"
#include "op/run_program.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
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

// Weights in the compute dtype and pre-activation order. Biases and parameters may be undefined.
struct Operands {
  template <typename Args>
  explicit Operands(const Args& args, StageKernels of_stages = {})
      : cell(*args.cell), kernels(std::move(of_stages)) {
    const auto [ih, hh] = weights_of(args);
    weight_x = widened(x_slots(ih, cell));
    weight_h = widened(h_slots(without_heads(hh), cell));
    if (args.bias_ih.defined()) {
      bias_x = widened(x_slots(biases_of(args.bias_ih, cell), cell));
      if (cell.parameters > 0) parameters = widened(parameters_of(args.bias_ih, cell));
    }
    if (args.bias_hh.defined()) bias_h = widened(h_slots(args.bias_hh, cell));
  }
  explicit Operands(const LoopStep& step)
      : cell(*step.cell),
        weight_h(step.weight_h),
        bias_h(step.bias_h),
        parameters(step.parameters) {}

  const CellInfo& cell;
  Tensor weight_x, weight_h, bias_x, bias_h;
  Tensor parameters;  // (P * H)
  const StageKernels kernels;
};

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

// For cells with several stages or given gates. Products add to the result, as does h if undefined.
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
    if (h.defined() && cell.direct.contains(slot)) {
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

// Of all steps (N, S * H). Each step adds products and h's part in place.
Tensor pre_activations_of_input(Operands& operands, const Tensor& x) {
  const CellInfo& cell = operands.cell;
  Tensor &bias_x = operands.bias_x, &bias_h = operands.bias_h;
  if (cell.x == cell.h && bias_x.defined() && bias_h.defined()) {
    bias_x = bias_x + bias_h;
    bias_h.reset();
  }
  const Tensor z_x = project_x(operands, x);
  const bool is_complete = cell.x.count() == cell.slots && cell.given == 0 && !bias_h.defined();
  return is_complete ? z_x : pre_activations_by_slot(operands, z_x, {});
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

StepResult forward_of_step(
    const Operands& operands,
    const Tensor& z_x,
    const Tensor& h,
    const Tensor& c,
    const StepIO& io,
    bool save) {
  const CellInfo& cell = operands.cell;
  Tensor z = z_x;
  if (!operands.kernels) {
    z = pre_activations(operands, z_x, io.enter_h(widened(h)));
  } else if (cell.direct.count() > 0) {
    const int64_t hidden = h.size(1);
    z.narrow(1, cell.direct.begin * hidden, cell.direct.count() * hidden)
        .addmm_(io.enter_h(widened(h)), direct_weights(operands).t());
  }
  const Tensor& parameters = operands.parameters;
  return run_forward(cell, z, io.enter_c(c), parameters, operands.weight_h, save, operands.kernels);
}

// Gradients of pre-activations and parameters, (rows, (S + P) * H), and of the previous h and c,
// not rounded.
std::tuple<Tensor, Tensor, Tensor> backward_of_step(
    const Operands& operands,
    const Tensor& activations,
    const Tensor& dh,
    const Tensor& dc,
    const StepIO& io) {
  const CellInfo& cell = operands.cell;
  const auto [dz, dc_before] = run_backward(
      cell, activations, dh, dc, operands.parameters, operands.weight_h, operands.kernels);
  const Tensor dz_h = columns(cell, dz, cell.direct);
  const Tensor dh_before = at::matmul(dz_h, direct_weights(operands));
  return {dz, io.enter_h(dh_before), io.enter_backward_c(dc_before)};
}

// h (N, H) as the recurrent GEMMs read it, in the order of input rows.
Tensor recurrent_rows(const SequenceBackwardArgs& args) {
  return args.is_step() ? widened(args.h_0) : entering_h(args);
}

Gradients gradients_of(
    const SequenceBackwardArgs& args,
    const Operands& operands,
    const Tensor& dz,
    const Tensor& dh,
    const Tensor& dc,
    at::ScalarType dtype) {
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
  const auto wanted = [](bool is_wanted, const auto& compute, at::ScalarType to) {
    return is_wanted ? compute().to(to) : Tensor();
  };
  return {
      wanted(mask[0], of_input, args.input->scalar_type()),
      mask[1] ? dh.to(dtype) : Tensor(),
      mask[2] ? dc.to(dtype) : Tensor(),
      concatenated ? wanted(mask[3], concatenated_weight, dtype)
                   : wanted(mask[3], of_weight_x, dtype),
      with_heads(wanted(mask[4] && !concatenated, of_weight_h, dtype), args.weight_hh),
      wanted(mask[5], of_bias_x, dtype),
      wanted(mask[6], of_bias_h, dtype)};
}

}  // namespace

SequenceResult forward_by_stages(const SequenceArgs& args, const StageKernels& kernels) {
  const Tensor& input = args.input;
  Operands operands(args, kernels);
  const Tensor x = flat_rows(input);
  const Tensor z_x = kernels ? pre_activations_of_input(operands, x) : project_x(operands, x);
  // With kernels, h may be columns of c.
  const auto own = [&](const Tensor& h) { return kernels ? h.contiguous() : h; };
  if (args.is_step()) {  // keeps symbolic sizes
    auto [h, c, activations] =
        forward_of_step(operands, z_x, args.h_0, args.c_0, StepIO(*args.cell), args.save);
    return {Tensor(), own(h), c, activations};
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
  return {at::cat(outputs, 0).view(output_sizes(input, columns)), own(h), c, saved()};
}

Gradients backward_by_stages(const SequenceBackwardArgs& args, const StageKernels& kernels) {
  const Operands operands(args, kernels);
  if (args.is_step()) {
    const auto [dz, dh, dc] = backward_of_step(
        operands,
        args.saved,
        widened_or_zeros(args.grad_h_n, args.h_0),
        widened_or_zeros(args.grad_c_n, args.c_0),
        StepIO(*args.cell));
    return gradients_of(args, operands, dz, dh, dc, args.input->scalar_type());
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
  const at::ScalarType dtype = args.carried_dtype();
  if (steps.empty()) {  // results must not be arguments
    dh = dh.clone();
    dc = dc.clone();
  }
  return gradients_of(args, operands, at::cat(dz), dh, dc, dtype);
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  return forward_by_stages(args, {});
}
Gradients sequence_backward(const SequenceBackwardArgs& args) {
  return backward_by_stages(args, {});
}

Gradients sequence_backward_recomputed(const SequenceBackwardArgs& args) {
  const WithoutAutocast without_autocast;
  SequenceBackwardArgs recomputed = args;
  recomputed.checkpoint_steps = 0;
  const SequenceResult results = sequence_forward({recomputed, /*save=*/true});
  if (!args.is_step()) {
    recomputed.output = std::get<0>(results).slice_symint(-1, 0, args.h_0->sym_size(1));
  }
  recomputed.saved = std::get<3>(results);
  return sequence_backward(recomputed);
}

void report(const SequenceInputs& args, const char* why, bool warns) {
  static std::mutex mutex;
  static auto& warned = *new std::set<std::pair<const CellInfo*, std::string_view>>;
  const CellInfo& cell = *args.cell;
  const std::string device = c10::DeviceTypeName(args.input->device().type());
  if (logs_schedules()) log_schedule(args, "on " + device + ", ATen operations (" + why + ")");
  if (!warns) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!warned.emplace(&cell, why).second) return;
  }
  // Not under the lock: a waiting thread may hold the GIL, which a warning needs.
  TORCH_WARN(
      "lltm: on ",
      device,
      ", the cell ",
      cell.title(),
      " runs as PyTorch's operations, many times slower than kernels (",
      why,
      "); see the page \"On a GPU\" in lltm's documentation");
}

namespace {

template <auto run, typename Args>
auto reported(const Args& args) {
  const Tensor& input = args.input;
  const c10::DispatchKey key = input.options().computeDispatchKey();
  if (!unwrapped_keys.has_backend(c10::toBackendComponent(key)))
    report(args, "this build has no kernels for the device");
  return run(args);
}

struct Composite {
  using DeviceGuard = NoDeviceGuard;

  static constexpr auto forward = reported<aten_fallback::sequence_forward, SequenceArgs>;
  static constexpr auto backward = reported<aten_fallback::sequence_backward, SequenceBackwardArgs>;

  static Tensor prepack(
      const CellInfo& cell,
      const Tensor& weight_ih,
      const Tensor& weight_hh,
      std::optional<at::ScalarType> dtype) {
    TORCH_CHECK(
        !dtype.has_value(),
        "lltm::prepack: expected weight_ih on the CPU to quantize, got device ",
        weight_ih.device());
    return weight_hh.defined() ? concatenate(cell, {weight_ih, weight_hh})
                               : weight_ih.clone(at::MemoryFormat::Contiguous);
  }
};

// Writes nothing in place, as vmap requires.
struct Mapped : Composite {
  static constexpr auto checkpointed_backward = aten_fallback::sequence_backward_recomputed;
};

}  // namespace

std::vector<Tensor> unpack_concatenated(std::string_view name, const Tensor& concatenated) {
  const CellName cell(name);
  check_unpack(cell, concatenated);
  const WithoutAutocast without_autocast;
  return matrices_of_layer(*cell, weights_of(*cell, concatenated, Tensor()));
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  register_backend<Composite>(m);
  m.impl("_unpack", TORCH_FN(unpack_concatenated));
}

std::tuple<
    std::vector<int64_t>,
    std::vector<int64_t>,
    std::vector<double>,
    bool,
    int64_t,
    int64_t,
    std::vector<int64_t>>
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
  const std::vector<int64_t> outputs(cell.output_states, cell.output_states + cell.outputs);
  return {x, h, states, cell.reads_h, cell.parameters, cell.saved, outputs};
}

std::tuple<int64_t, int64_t> instructions(std::string_view name) {
  const CellInfo& cell = get_cell("lltm::_instructions", name);
  const auto size = [](const Pass& pass) {
    const std::span stages(pass.stages, pass.count);
    return std::accumulate(
        stages.begin(), stages.end(), int64_t{0}, [](int64_t sum, const Stage& stage) {
          return sum + stage.program.size;
        });
  };
  return {size(programs_of(cell).forward), size(programs_of(cell).backward)};
}

std::tuple<std::vector<std::string>, std::vector<std::string>> operations() {
  std::vector<std::string> words, functions;
  for (const OpInfo& op : kOps) {
    if (op.word.empty()) continue;
    words.emplace_back(op.word);
    if (op.cost == kExpensive && op.operands == 1) functions.emplace_back(op.word);
  }
  return {std::move(words), std::move(functions)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sequence_operands(
    std::string_view name,
    const Tensor& weight_ih,
    const std::optional<Tensor>& weight_hh,
    const std::optional<Tensor>& bias_ih,
    const std::optional<Tensor>& bias_hh) {
  const SequenceInputs args = {name, {}, {}, {}, weight_ih, weight_hh, bias_ih, bias_hh};
  check_sequence_operands(args);
  const Operands of(args);
  return {of.weight_x, of.weight_h, of.bias_x, of.bias_h, of.parameters};
}

StepIO io_of(const LoopStep& step) {
  return StepIO(*step.cell, step.reset, step.recurrent_mask);
}

StepResult sequence_step(
    std::string_view name,
    const Tensor& z_x,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weight_h,
    const std::optional<Tensor>& bias_h,
    const std::optional<Tensor>& parameters,
    const std::optional<Tensor>& reset,
    const std::optional<Tensor>& recurrent_mask) {
  const LoopStep step = {
      name,
      weight_h,
      or_undefined(bias_h),
      or_undefined(parameters),
      or_undefined(reset),
      or_undefined(recurrent_mask)};
  check_sequence_step(step, z_x, h, c);
  return forward_of_step(Operands(step), z_x, h, c, io_of(step), /*save=*/true);
}

std::tuple<Tensor, Tensor, Tensor> sequence_step_backward(
    std::string_view name,
    const Tensor& activations,
    const Tensor& dh,
    const Tensor& dc,
    const Tensor& weight_h,
    const std::optional<Tensor>& parameters,
    const std::optional<Tensor>& reset,
    const std::optional<Tensor>& recurrent_mask) {
  const LoopStep step = {
      name,
      weight_h,
      /*bias_h=*/kUndefined,
      or_undefined(parameters),
      or_undefined(reset),
      or_undefined(recurrent_mask)};
  check_sequence_step_backward(step, activations, dh, dc);
  return backward_of_step(Operands(step), activations, dh, dc, io_of(step));
}

Gradients sequence_gradients(
    std::string_view name,
    const Tensor& input,
    const Tensor& h_0,
    const std::optional<Tensor>& c_0,
    const Tensor& weight_ih,
    const std::optional<Tensor>& weight_hh,
    const std::optional<Tensor>& bias_ih,
    const std::optional<Tensor>& bias_hh,
    bool reverse,
    const std::optional<Tensor>& reset,
    const std::optional<Tensor>& recurrent_mask,
    const Tensor& output,
    const Tensor& saved,
    const Tensor& dz,
    const Tensor& dh,
    const Tensor& dc,
    const OutputMask& output_mask) {
  SequenceBackwardArgs args = {
      {name,
       input,
       h_0,
       c_0,
       weight_ih,
       weight_hh,
       bias_ih,
       bias_hh,
       /*batch_sizes=*/{},
       reverse,
       reset,
       /*checkpoint_steps=*/0,
       recurrent_mask},
      output,
      saved};
  args.output_mask = output_mask;
  check_sequence_gradients(args, dz, dh, dc);
  want_gradients_of_passed(args);
  return with_grad_of_h(args, [&](const SequenceBackwardArgs& a) {
    return gradients_of(a, Operands(a), flat_rows(dz), dh, dc, input.scalar_type());
  });
}

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_cell", TORCH_FN(describe));
  m.impl("_instructions", TORCH_FN(instructions));
  m.impl("_operations", TORCH_FN(operations));
  m.impl("_sequence_operands", TORCH_FN(sequence_operands));
  m.impl("_sequence_step", TORCH_FN(sequence_step));
  m.impl("_sequence_step_backward", TORCH_FN(sequence_step_backward));
  m.impl("_sequence_gradients", TORCH_FN(sequence_gradients));
}

// Under torch.vmap, the training operators run as ATen operations, which have vmap rules. vmap.cpp
// has the other rules.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  register_training<Mapped>(m);
}

}  // namespace lltm::aten_fallback
