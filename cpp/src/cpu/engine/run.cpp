#include "cpu/choose_engine.h"
#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"

#include "common/schedule_log.h"
#include "common/tensor_steps.h"
#include "cpu/engine/one_step.h"
#include "cpu/gemm/gemm.h"
#include "cpu/prepack.h"

#include <ATen/Context.h>
#include <ATen/ops/tensor.h>

#include <string>
#include <vector>

namespace lltm::cpu {
namespace {

// True if torch.backends.mkldnn.rnn.fp32_precision or a more general setting allows bfloat16.
bool reduces_float32() {
  at::Context& context = at::globalContext();
  const auto precision = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::RNN);
  return precision == at::Float32Precision::BF16 && context.userEnabledMkldnn() &&
         kernels().fast_bf16;
}

int64_t steps_of(const SequenceInputs& args) {
  if (args.batch_sizes.defined()) return args.batch_sizes->size(0);
  return args.is_step() ? 1 : args.input->size(0);
}

LayerShape shape_of(const SequenceInputs& args) {
  const at::ScalarType dtype = args.input->scalar_type();
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const bool may_reduce = dtype == at::kFloat && !args.prepacked() &&
                          !has_few_elements(batch, hidden) && steps_of(args) > 1;
  const bool bf16 = dtype == at::kBFloat16 || (may_reduce && reduces_float32());
  const int64_t heads = args.prepacked() ? read_header(bytes_of(args.weight_ih)).heads()
                                         : packed_heads_of(args.weight_hh);
  return {
      batch,
      args.input->size(-1),
      hidden,
      flat_size(args.input),
      bf16,
      slots_of(*args.cell),
      heads};
}

template <typename Args>
Call call_of(const Args& args) {
  const CellInfo& cell = *args.cell;
  const at::Tensor &input = args.input, &h_0 = args.h_0, &weight_hh = args.weight_hh;
  Call call = {shape_of(args), steps_of(args), storage_of(input.scalar_type())};
  // Given gates have no columns in weight_ih.
  const bool no_columns = cell.x.count() > 0 && input.size(-1) <= cell.given * h_0.size(1);
  call.empty = input.numel() == 0 || h_0.numel() == 0 || no_columns;
  call.stages = cell.has_stages();
  call.given = cell.given > 0;
  call.forgets = cell.forgets;
  if constexpr (std::is_same_v<Args, SequenceBackwardArgs>) {
    call.backward = true;
    call.wide_gradients = args.has_wide_gradients();
  } else {
    const bool plain = !args.batch_sizes.defined() && !args.reset.defined() &&
                       !args.recurrent_mask.defined() && !has_heads(weight_hh);
    call.small_layer = cell.native != 0 && cell.forgets && !args.save && plain;
  }
  if (args.prepacked()) {
    call.heads = call.packs_heads = call.shape.heads > 1;
    call.prepacked = packed_forms(bytes_of(args.weight_ih));
    return call;
  }
  call.heads = has_heads(weight_hh);
  call.packs_heads = packs_heads(weight_hh);
  call.weights = args.weight_ih->numel();
  if (weight_hh.defined()) call.weights += weight_hh.numel();
  return call;
}

// Prepacked weights as matrices.
SequenceArgs with_matrices(const SequenceArgs& args) {
  const Weights weights = unpack(*args.cell, args.weight_ih);
  const at::ScalarType dtype = args.input->scalar_type();
  SequenceArgs unpacked = args;
  unpacked.weight_ih = weights.ih.to(dtype);
  unpacked.weight_hh = weights.hh.to(dtype);
  return unpacked;
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
    Schedule (*schedule)(const Machine&, const LayerShape&),
    Machine machine) {
  const LayerShape shape = shape_of(args);
  if (auto result = run(engine, args, schedule(machine, shape))) return *std::move(result);
  machine.bf16x3 = false;
  return *run(engine, args, schedule(machine, shape));
}

// In all steps. One batch element does not change the results of others.
void copy_batch_elements(
    const std::vector<int64_t>& elements,
    const SequenceArgs& args,
    const SequenceResult& from,
    const SequenceResult& to) {
  std::vector<int64_t> rows_of_output;
  for (const auto [offset, rows] : plan_steps(args.input, args.batch_sizes, args.reverse)) {
    for (const int64_t element : elements) {
      if (element < rows) rows_of_output.push_back(offset + element);
    }
  }
  const auto copy = [](const at::Tensor& source, const at::Tensor& out, const at::Tensor& rows) {
    out.index_copy_(0, rows, source.index_select(0, rows));
  };
  const at::Tensor batch_rows = at::tensor(elements);
  copy(flat_rows(std::get<0>(from)), flat_rows(std::get<0>(to)), at::tensor(rows_of_output));
  copy(std::get<1>(from), std::get<1>(to), batch_rows);
  copy(std::get<2>(from), std::get<2>(to), batch_rows);
}

SequenceResult int8_forward(const SequenceArgs& args, const Machine& machine) {
  const ForwardSchedule schedule = schedule_forward_int8(machine, shape_of(args));
  auto [result, out_of_range] = run(blocked_int8_forward, args, schedule);
  if (!out_of_range.empty()) {
    copy_batch_elements(out_of_range, args, sequence_forward(with_matrices(args)), result);
  }
  return std::move(result);
}

// The engines for few rows compute in float32, also of 16-bit weights.
template <typename Engine>
SequenceResult in_float32(const SequenceArgs& args, const Engine& engine) {
  const at::ScalarType dtype = args.input->scalar_type();
  if (dtype == at::kFloat) return engine(args);
  const auto convert = [](at::ScalarType to) {
    return [=](auto&... tensors) {
      const auto each = [&](auto& tensor) {
        const at::Tensor& from = tensor;
        if (from.defined()) tensor = converted(from, to);
      };
      (each(tensors), ...);
    };
  };
  SequenceArgs wide = args;
  std::apply(convert(at::kFloat), wide.batched());
  SequenceResult result = engine(wide);
  std::apply(convert(dtype), result);
  return result;
}

// True for any machine: choosing an engine would be noticeable in a small step.
bool has_one_step_engine(const SequenceInputs& args) {
  return args.is_step() && args.cell->is_element_wise() && !has_heads(args.weight_hh);
}

SequenceResult run_forward(const SequenceArgs& args, const Engine& engine) {
  switch (engine.kind) {
    case Engine::kInt8:
      return int8_forward(args, engine.machine);
    case Engine::kSmallBatch:
      return in_float32(args, [&](const SequenceArgs& wide) {
        return run(small_batch_forward, wide, engine.small_batch);
      });
    case Engine::kSmallLayer:
      if (logs_schedules()) log_schedule(args, "forward: small layer");
      return in_float32(args, small_layer_forward);
    case Engine::kOneStep:
      return one_step_forward(args);
    case Engine::kBlocked:
      return run_or_fall_back(blocked_forward, args, schedule_forward, engine.machine);
    default:
      if (logs_schedules()) log_schedule(args, "forward: per-step");
      return per_step_forward(args);
  }
}

Gradients run_backward(const SequenceBackwardArgs& args, const Engine& engine) {
  switch (engine.kind) {
    case Engine::kOneStep:
      return one_step_backward(args);
    case Engine::kBlocked:
      return run_or_fall_back(blocked_backward, args, schedule_backward, engine.machine);
    default:
      if (logs_schedules()) log_schedule(args, "backward: per-step");
      return per_step_backward(args);
  }
}

}  // namespace

SequenceResult sequence_forward(const SequenceArgs& args) {
  if (has_one_step_engine(args)) return one_step_forward(args);
  const Engine engine = choose_engine(current_machine(), call_of(args));
  if (!engine.unpack && !engine.dense) return run_forward(args, engine);
  SequenceArgs changed = engine.unpack ? with_matrices(args) : args;
  if (engine.dense) changed.weight_hh = without_heads(changed.weight_hh);
  return run_forward(changed, engine);
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  if (has_one_step_engine(args) && !args.has_wide_gradients()) return one_step_backward(args);
  const Engine engine = choose_engine(current_machine(), call_of(args));
  if (!engine.dense) return run_backward(args, engine);
  SequenceBackwardArgs changed = args;
  changed.weight_hh = without_heads(args.weight_hh);
  Gradients gradients = run_backward(changed, engine);
  at::Tensor& d_weight_hh = std::get<4>(gradients);
  d_weight_hh = with_heads(d_weight_hh, args.weight_hh);
  return gradients;
}

}  // namespace lltm::cpu
