#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"

#include "common/schedule_log.h"
#include "common/states.h"
#include "common/steps.h"
#include "cpu/engine/recompute_rows.h"
#include "cpu/engine/step.h"
#include "cpu/gemm/formats.h"
#include "cpu/packed_weights.h"

#include <ATen/Context.h>
#include <ATen/ops/add.h>

#include <string>

namespace lltm::cpu {
namespace {

// True if torch.backends.mkldnn.rnn.fp32_precision or a more general setting allows bfloat16.
bool reduces_float32() {
  at::Context& context = at::globalContext();
  const auto precision = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::RNN);
  return precision == at::Float32Precision::BF16 && context.userEnabledMkldnn() &&
         multiplies_bf16();
}

int64_t steps_of(const SequenceInputs& args) {
  return args.batch_sizes.defined() ? args.batch_sizes->size(0) : args.input->size(0);
}

LayerShape shape_of(const SequenceInputs& args) {
  const at::ScalarType dtype = args.input->scalar_type();
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const bool may_reduce = dtype == at::kFloat && !args.prepacked() &&
                          !has_few_elements(batch, hidden) && steps_of(args) > 1;
  const bool bf16 = dtype == at::kBFloat16 || (may_reduce && reduces_float32());
  return {batch, args.input->size(-1), hidden, flat_size(args.input), bf16, slots_of(*args.cell)};
}

bool can_block(const Machine& machine, const SequenceInputs& args) {
  const at::Tensor& input = args.input;
  const int64_t given = args.cell->given * args.h_0->size(1);
  return machine.f32 && input.scalar_type() != at::kDouble && input.numel() > 0 &&
         args.h_0->numel() > 0 && (args.cell->x.count() == 0 || input.size(-1) > given);
}

// Other cells run only in the blocked engine, without bf16x3, and the per-step engine.
bool is_plain(const SequenceInputs& args) {
  const bool heads =
      args.prepacked() ? packed_heads(args.weight_ih) > 1 : has_heads(args.weight_hh);
  return args.cell->is_plain() && !heads;
}

Machine machine_for(const SequenceInputs& args) {
  Machine machine = current_machine();
  machine.bf16x3 = machine.bf16x3 && is_plain(args);
  return machine;
}

template <typename Result, typename Args, typename Schedule>
Result run(
    Result (*engine)(const Args&, const Schedule&), const Args& args, const Schedule& schedule) {
  if (logs_schedules()) log_schedule(args, to_string(schedule));
  return engine(args, schedule);
}

// Falls back to float32 if values are out of the range of bf16x3.
template <typename Result, typename Args, typename Schedule>
Result run_or_fall_back(
    std::optional<Result> (*engine)(const Args&, const Schedule&),
    const Args& args,
    const LayerShape& shape,
    Schedule (*schedule)(const Machine&, const LayerShape&),
    Machine machine) {
  if (auto result = run(engine, args, schedule(machine, shape))) return *std::move(result);
  machine.bf16x3 = false;
  return *run(engine, args, schedule(machine, shape));
}

// A step with few rows, for which packing would dominate. The per-step engine reads float32 weights
// in place, but its ATen operations take as long as packing this many weights a row.
bool is_faster_in_place(const SequenceInputs& args) {
  constexpr int64_t kWeightsPerRow = 3 * 256 * 256;
  const int64_t rows = args.h_0->size(0);
  if (steps_of(args) > 1 || rows > kMostProductRows || args.prepacked() || is_plain(args) ||
      args.input->scalar_type() != at::kFloat) {
    return false;
  }
  if (has_heads(args.weight_hh) && !packs_heads(args.weight_hh)) return true;
  const int64_t weights =
      args.weight_ih->numel() + (args.weight_hh.defined() ? args.weight_hh->numel() : 0);
  return weights >= rows * kWeightsPerRow;
}

SequenceResult forward_with_unpacked_weights(const SequenceArgs& args) {
  const Weights weights = unpack(*args.cell, args.weight_ih);
  const at::ScalarType dtype = args.input->scalar_type();
  SequenceArgs unpacked = args;
  unpacked.weight_ih = weights.ih.to(dtype);
  unpacked.weight_hh = weights.hh.to(dtype);
  return sequence_forward(unpacked);
}

// Recomputes batch elements that cannot be quantized, with the dequantized weights.
SequenceResult int8_forward(const SequenceArgs& args, const LayerShape& shape) {
  if (args.input->numel() == 0 || args.h_0->numel() == 0)
    return forward_with_unpacked_weights(args);
  const ForwardSchedule schedule = schedule_forward_int8(current_machine(), shape);
  auto [result, out_of_range] = run(blocked_int8_forward, args, schedule);
  if (!out_of_range.empty()) {
    recompute_rows(args, out_of_range, result, forward_with_unpacked_weights);
  }
  return std::move(result);
}

// Mask and reset are applied.
StepInputs only_step(const SequenceInputs& args) {
  StepInputs step = {
      args.cell,
      flat_rows(args.input),
      args.h_0,
      args.c_0,
      args.weight_ih,
      args.weight_hh,
      args.bias_ih,
      args.bias_hh};
  if (args.recurrent_mask.defined()) step.h = masked_h(args.h_0, args.recurrent_mask);
  if (args.reset.defined()) {
    const at::Tensor reset = args.reset->reshape(-1);
    step.h = restarted_h(step.h, reset);
    step.c = restarted_c(*args.cell, step.c, reset);
  }
  return step;
}

// For a step, reading the weights in place is faster than packing.
SequenceResult one_step_forward(const SequenceArgs& args, const StepArgs& step) {
  auto [h_next, c_next, activations] = step_forward(step);
  const int64_t columns = args.cell->output_columns() * args.h_0->size(1);
  const at::Tensor rows = with_output_states(*args.cell, h_next, c_next);
  const at::Tensor output = rows.view(output_sizes(args.input, columns));
  if (args.saves_checkpoints()) {  // only the initial c
    activations = args.c_0->clone(at::MemoryFormat::Contiguous).unsqueeze(0);
  }
  return {output, h_next.clone(), c_next, activations};
}

Gradients one_step_backward(const SequenceBackwardArgs& args) {
  StepBackwardArgs step = {only_step(args), args.saved};
  if (args.grad_output.defined()) step.grad_h = flat_rows(args.grad_output);
  if (args.grad_h_n.defined()) {
    step.grad_h = step.grad_h.defined() ? at::add(step.grad_h, args.grad_h_n) : *args.grad_h_n;
  }
  step.grad_c = args.grad_c_n;
  if (args.grad_states.defined()) {
    const at::Tensor grad_c = copy_or_zeros(args.grad_c_n, args.c_0->sizes(), args.c_0->options());
    step.grad_c = add_grad_states(*args.cell, grad_c, flat_rows(args.grad_states));
  }
  step.output_mask = args.output_mask;
  Gradients gradients = step_backward(step);
  auto& [d_input, d_h, d_c, d_weight_ih, d_weight_hh, d_bias_ih, d_bias_hh] = gradients;
  if (d_input.defined()) d_input = d_input.view(args.input->sizes());
  if (args.reset.defined()) {
    const at::Tensor reset = args.reset->reshape(-1);
    for (at::Tensor* const gradient : {&d_h, &d_c}) {
      if (gradient->defined()) *gradient = restarted_h(*gradient, reset);
    }
  }
  if (d_h.defined()) d_h = masked_h(d_h, args.recurrent_mask);
  return gradients;
}

}  // namespace

SequenceResult sequence_forward(const SequenceArgs& args) {
  const bool one_step = is_faster_in_place(args);
  const bool blocked = can_block(current_machine(), args) && !one_step;
  if (blocked && has_heads(args.weight_hh) && !packs_heads(args.weight_hh)) {
    SequenceArgs single = args;
    single.weight_hh = without_heads(args.weight_hh);
    return sequence_forward(single);
  }
  const LayerShape shape = shape_of(args);
  const bool prepacked = args.prepacked();
  if (prepacked && has_form(args.weight_ih, GemmFormat::kInt8)) return int8_forward(args, shape);

  Machine machine = machine_for(args);
  if (prepacked) {  // This CPU may have no kernel for the format.
    const bool bf16 = has_form(args.weight_ih, GemmFormat::kBf16);
    if (!blocked || (bf16 && !machine.bf16)) return forward_with_unpacked_weights(args);
    machine.bf16 = bf16;
    machine.bf16x3 = machine.bf16x3 && has_form(args.weight_ih, GemmFormat::kBf16x3);
  }
  if (!blocked) {
    if (logs_schedules()) log_schedule(args, "forward: stepwise");
    return stepwise_forward(args);
  }
  if (args.input->scalar_type() == at::kFloat && is_plain(args)) {
    // If rounding errors decay, float64 is not needed, and the blocked engine is faster on several
    // threads and for many rows, but takes longer to set up.
    constexpr int64_t kShortCall = 64;
    const bool few_elements = has_few_elements(shape.batch, shape.hidden);
    const bool is_short =
        prepacked && shape.rows <= kShortCall && (few_elements || !machine.bf16x3);
    const auto schedule = schedule_few_rows(machine, shape, steps_of(args), prepacked);
    const bool on_one_thread =
        schedule.grid.slots() == 1 && (shape.batch <= kMostProductRows || is_short);
    const bool few =
        args.cell->forgets ? shape.batch == 1 || schedule.in_place || on_one_thread : few_elements;
    if (few) return run(few_rows_forward, args, schedule);
  }
  if (steps_of(args) == 1 && !prepacked && is_plain(args)) {
    const StepArgs step = {only_step(args), args.saves_activations()};
    // A single-step kernel for weights in place, which 16-bit dtypes may lack.
    const bool in_place =
        args.input->scalar_type() == at::kFloat || schedule_of(step).forward != StepGemm::kAten;
    if (in_place) return one_step_forward(args, step);
  }
  return run_or_fall_back(blocked_forward, args, shape, schedule_forward, machine);
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  const LayerShape shape = shape_of(args);
  const Machine machine = machine_for(args);
  const bool blocked = can_block(machine, args);
  if (has_heads(args.weight_hh) && !(packs_heads(args.weight_hh) && blocked)) {
    SequenceBackwardArgs single = args;
    single.weight_hh = without_heads(args.weight_hh);
    Gradients gradients = sequence_backward(single);
    at::Tensor& d_weight_hh = std::get<4>(gradients);
    d_weight_hh = with_heads(d_weight_hh, args.weight_hh);
    return gradients;
  }
  if (!blocked) {
    if (logs_schedules()) log_schedule(args, "backward: stepwise");
    return stepwise_backward(args);
  }
  if (steps_of(args) == 1 && !args.segment && is_plain(args)) {
    return one_step_backward(args);
  }
  return run_or_fall_back(blocked_backward, args, shape, schedule_backward, machine);
}

}  // namespace lltm::cpu
