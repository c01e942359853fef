#include "cpu/engine.h"

#include "cpu/gemm_formats.h"
#include "cpu/packed_weights.h"
#include "steps.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace lltm::cpu {
namespace {

// The GEMM kernels take float and bfloat16, and no size may be 0.
bool can_block(const at::Tensor& input, const at::Tensor& h_0) {
  return input.scalar_type() != at::kDouble && input.numel() > 0 && h_0.numel() > 0 &&
         F32Format::available();
}

LayerShape shape_of(const at::Tensor& input, const at::Tensor& h_0) {
  const bool bf16 = input.scalar_type() == at::kBFloat16;
  return {h_0.size(0), input.size(-1), h_0.size(1), flat_size(input), bf16};
}

}  // namespace

bool logs_schedules() {
  static const bool set = [] {
    const char* const value = std::getenv("LLTM_SCHEDULE");
    return value != nullptr && std::string(value) != "0";
  }();
  return set;
}

void log_schedule(const LayerShape& shape, const std::string& schedule) {
  std::ostringstream line;
  line << "lltm: N=" << shape.rows << " B=" << shape.batch << " I=" << shape.input
       << " H=" << shape.hidden << ", " << schedule << '\n';
  std::fputs(line.str().c_str(), stderr);
}

// Runs an engine as `schedule` says and, where values are out of range of bf16x3, once more in
// float32.
template <typename Engine, typename Schedule>
auto run_or_fall_back(
    const Engine& engine, const Schedule& schedule, Machine machine, const LayerShape& shape) {
  const auto run = [&] {
    const auto chosen = schedule(machine, shape);
    if (logs_schedules()) log_schedule(shape, to_string(chosen));
    return engine(chosen);
  };
  if (auto result = run()) return *std::move(result);
  machine.bf16x3 = false;
  return *run();
}

static SequenceResult forward_with_unpacked_weights(const SequenceArgs& args) {
  const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, steps] = args;
  return sequence_forward(
      {input, h_0, c_0, unpack(weights), bias, batch_sizes, reverse, save, steps});
}

// By weights prepacked in int8, or what they stand for where a value is not finite.
static SequenceResult int8_forward(const SequenceArgs& args, const LayerShape& shape) {
  if (args.input.numel() > 0 && args.h_0.numel() > 0) {
    const ForwardSchedule schedule = schedule_forward_int8(current_machine(), shape);
    if (logs_schedules()) log_schedule(shape, to_string(schedule));
    if (auto result = blocked_forward(args, schedule)) return *std::move(result);
  }
  return forward_with_unpacked_weights(args);
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  const LayerShape shape = shape_of(args.input, args.h_0);
  if (is_prepacked(args.weights) && has_form(args.weights, GemmFormat::kInt8)) {
    return int8_forward(args, shape);
  }
  const bool blocked = can_block(args.input, args.h_0);
  Machine machine = current_machine();
  if (is_prepacked(args.weights)) {
    const bool bf16 = has_form(args.weights, GemmFormat::kBf16);
    if (!blocked || (bf16 && !machine.bf16)) return forward_with_unpacked_weights(args);
    machine.bf16 = bf16;
    machine.bf16x3 = machine.bf16x3 && has_form(args.weights, GemmFormat::kBf16x3);
  }
  if (!blocked) {
    if (logs_schedules()) log_schedule(shape, "forward: stepwise");
    return stepwise_forward(args);
  }
  if (args.input.scalar_type() == at::kFloat && has_few_elements(shape.batch, shape.hidden)) {
    const FewRowsSchedule schedule = schedule_few_rows(machine, shape, is_prepacked(args.weights));
    if (logs_schedules()) log_schedule(shape, to_string(schedule));
    return few_rows_forward(args, schedule);
  }
  return run_or_fall_back(
      [&](const ForwardSchedule& schedule) { return blocked_forward(args, schedule); },
      schedule_forward,
      machine,
      shape);
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  const LayerShape shape = shape_of(args.input, args.h_0);
  if (!can_block(args.input, args.h_0)) {
    if (logs_schedules()) log_schedule(shape, "backward: stepwise");
    return stepwise_backward(args);
  }
  return run_or_fall_back(
      [&](const BackwardSchedule& schedule) { return blocked_backward(args, schedule); },
      schedule_backward,
      current_machine(),
      shape);
}

}  // namespace lltm::cpu
