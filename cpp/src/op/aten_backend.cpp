// The operators as ATen operations, for devices without kernels and for torch.vmap, and the
// operators for loops over steps in a decomposition.
#include "op/aten_backend.h"

#include "aten/fallback.h"
#include "cell/program_compiler.h"
#include "cell/program_text.h"
#include "cell/registry.h"
#include "common/device.h"
#include "common/schedule_log.h"
#include "common/steps.h"
#include "common/weights.h"
#include "op/backend.h"

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

namespace lltm::aten_fallback {

using at::Tensor;

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

struct Aten {
  using DeviceGuard = NoDeviceGuard;

  static constexpr auto forward = reported<sequence_forward, SequenceArgs>;
  static constexpr auto backward = reported<sequence_backward, SequenceBackwardArgs>;

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
struct Mapped : Aten {
  static constexpr auto checkpointed_backward = sequence_backward_recomputed;
};

}  // namespace

std::vector<Tensor> unpack_concatenated(std::string_view name, const Tensor& concatenated) {
  const CellName cell(name);
  check_unpack(cell, concatenated);
  const WithoutAutocast without_autocast;
  return matrices_of_layer(*cell, weights_of(*cell, concatenated, Tensor()));
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  register_backend<Aten>(m);
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

using Numbers = c10::Dict<std::string, double>;

Numbers numbers_of(const std::vector<std::string>& names, const std::vector<double>& values) {
  Numbers numbers;
  for (size_t k = 0; k < names.size(); ++k) numbers.insert(names[k], values[k]);
  return numbers;
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
  return {size(cell.forward()), size(cell.backward())};
}

auto header(std::string_view text) {
  get_cell("lltm::_header", text);  // for its errors
  TORCH_CHECK_VALUE(
      text.starts_with("lltm-cell"), "lltm::_header: expected a serialized cell, got '", text, "'");
  const CellText& cell = custom_cell(text);
  std::vector<std::string> products, scalars;
  for (const std::string& gate : cell.gates_h) {
    const auto slot = std::ranges::find(cell.gates, gate) - cell.gates.begin();
    if (!cell.info.direct.contains(static_cast<int>(slot))) products.push_back(gate);
  }
  for (size_t k = 0; k < cell.parameters.size(); ++k) {
    if (cell.info.modules.scalars >> k & 1) scalars.push_back(cell.parameters[k]);
  }
  return std::tuple(
      cell.name,
      cell.gates_x,
      cell.gates_h,
      cell.gates_input,
      std::move(products),
      cell.no_bias,
      numbers_of(cell.states, cell.initial_states),
      numbers_of(cell.parameters, cell.initial_parameters),
      std::move(scalars),
      cell.saved,
      cell.outputs,
      cell.info.bounded,
      cell.info.custom_gradient);
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> limits() {
  return {
      kMostStates,
      kMostParameters,
      CellInfo::kMostSlots,
      int64_t{CellText::kMostBytes},
      int64_t{CellText::kMostNameLength}};
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

Operands operands_of(const LoopStep& step) {
  return {*step.cell, step.weight_h, step.bias_h, step.parameters};
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
  return forward_of_step(operands_of(step), z_x, h, c, io_of(step), /*save=*/true);
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
  return backward_of_step(operands_of(step), activations, dh, dc, io_of(step));
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
  return call_backward(args, [&](const SequenceBackwardArgs& a) {
    return gradients_of(a, Operands(a), flat_rows(dz), dh, dc);
  });
}

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_cell", TORCH_FN(describe));
  m.impl("_instructions", TORCH_FN(instructions));
  m.impl("_header", TORCH_FN(header));
  m.impl("_operations", TORCH_FN(operations));
  m.impl("_limits", TORCH_FN(limits));
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
