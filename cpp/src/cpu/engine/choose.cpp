#include "cpu/engine/engine.h"

#include "cpu/gemm/formats.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"
#include "cpu/tune.h"
#include "common/steps.h"

#include <ATen/Context.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
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

// Whether the environment has this variable, and not as 0.
bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && std::string(value) != "0";
}

}  // namespace

bool logs_schedules() {
  static const bool set = is_set("LLTM_SCHEDULE");
  return set;
}

void log_schedule(const LayerShape& shape, const std::string& schedule) {
  std::ostringstream line;
  line << "lltm: N=" << shape.rows << " B=" << shape.batch << " I=" << shape.input
       << " H=" << shape.hidden << ", " << schedule << '\n';
  std::fputs(line.str().c_str(), stderr);
}

namespace {

// ---- schedules by measurement -----------------------------------------------

// Whether LLTM_TUNE asks for it, and this is the place. In a parallel region other threads would
// take part in what is measured. And which schedule wins, and with it the last bits of the results,
// is a matter of timing: nothing for torch.use_deterministic_algorithms.
bool may_tune() {
  static const bool set = is_set("LLTM_TUNE");
  return set && !at::in_parallel_region() && !at::globalContext().deterministicAlgorithms();
}

int64_t steps_of(const at::Tensor& input, const at::Tensor& batch_sizes) {
  return batch_sizes.defined() ? batch_sizes.size(0) : input.size(0);
}

// Steps count by powers of two, so that sequences of many lengths are few kinds of calls.
TuningKey key_of(
    const Machine& machine,
    const LayerShape& shape,
    const at::Tensor& input,
    const at::Tensor& batch_sizes) {
  const int64_t steps = steps_of(input, batch_sizes);
  return {
      static_cast<int64_t>(input.scalar_type()),
      shape.batch,
      shape.input,
      shape.hidden,
      static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(steps))),
      batch_sizes.defined(),
      input.is_contiguous(),
      machine.threads,
      machine.bf16,
      machine.bf16x3};
}

TuningKey key_of(const Machine& machine, const LayerShape& shape, const SequenceArgs& args) {
  TuningKey key = key_of(machine, shape, args.input, args.batch_sizes);
  key.push_back(args.saves_activations());
  key.push_back(args.saves_checkpoints());
  if (is_prepacked(args.weights)) {
    const PackedHeader header = read_header(args.weights);
    key.push_back(header.operand);
    key.push_back(header.width);
  }
  return key;
}

TuningKey key_of(
    const Machine& machine, const LayerShape& shape, const SequenceBackwardArgs& args) {
  TuningKey key = key_of(machine, shape, args.input, args.batch_sizes);
  key.insert(key.end(), args.output_mask.begin(), args.output_mask.end());
  return key;
}

// What decides how results are rounded. No alternative changes it, but calls of otherwise equal
// keys may differ in it.
int64_t variant_of(const FewRowsSchedule& schedule) {
  return 2 * schedule.in_place + schedule.float_operand;
}
template <typename Schedule>
int64_t variant_of(const Schedule& /*schedule*/) {
  return 0;
}

// Whether the blocks are what the weights were packed in.
bool has_fixed_blocks(const SequenceArgs& args) {
  return is_prepacked(args.weights);
}
bool has_fixed_blocks(const SequenceBackwardArgs& /*args*/) {
  return false;
}

// The schedule that is measured to be the fastest, at the first call of its kind by that call.
template <typename Engine, typename Schedule, typename Args>
std::optional<Schedule> tuned(
    const Engine& engine,
    const Schedule& schedule,
    const Machine& machine,
    const LayerShape& shape,
    const Args& args) {
  using Clock = std::chrono::steady_clock;
  static TuningCache<Schedule>& cache = *new TuningCache<Schedule>;  // outlives every thread
  const auto others = [&](const Schedule& present, Aspect aspect) {
    const bool fixed = aspect == Aspect::kBlocks && has_fixed_blocks(args);
    return fixed ? std::vector<Schedule>() : alternatives(machine, shape, present, aspect);
  };
  const auto measure = [&](const Schedule& candidate) -> std::optional<double> {
    const Clock::time_point begin = Clock::now();
    try {
      if (!engine(candidate).has_value()) return {};
    } catch (const std::exception&) {  // one may need more memory than there is
      return {};
    }
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  TuningKey key = key_of(machine, shape, args);
  key.push_back(variant_of(schedule));
  return cache.find_or(key, [&] {
    TuningCost cost;
    const auto best = tune(schedule, kAspects, others, measure, cost);
    if (logs_schedules()) {
      log_schedule(shape, to_string(cost) + ", untuned " + to_string(schedule));
    }
    return best;
  });
}

// Runs an engine by `schedule` or, with LLTM_TUNE, by a faster one.
template <typename Engine, typename Schedule, typename Args>
auto run(
    const Engine& engine,
    Schedule schedule,
    const Machine& machine,
    const LayerShape& shape,
    const Args& args) {
  const char* how = "";
  if (may_tune()) {
    if (const auto best = tuned(engine, schedule, machine, shape, args)) {
      schedule = *best;
      how = ", tuned";
    }
  }
  if (logs_schedules()) log_schedule(shape, to_string(schedule) + how);
  return engine(schedule);
}

// Runs an engine as `schedule` says and, where values are out of range of bf16x3, once more in
// float32.
template <typename Engine, typename Scheduler, typename Args>
auto run_or_fall_back(
    const Engine& engine,
    const Scheduler& schedule,
    Machine machine,
    const LayerShape& shape,
    const Args& args) {
  if (auto result = run(engine, schedule(machine, shape), machine, shape, args)) {
    return *std::move(result);
  }
  machine.bf16x3 = false;
  return *run(engine, schedule(machine, shape), machine, shape, args);
}

}  // namespace

static SequenceResult forward_with_unpacked_weights(const SequenceArgs& args) {
  return sequence_forward(with_weights(args, unpack(args.weights)));
}

// By weights prepacked in int8, or what they stand for where a value is not finite.
static SequenceResult int8_forward(const SequenceArgs& args, const LayerShape& shape) {
  if (args.input.numel() > 0 && args.h_0.numel() > 0) {
    const auto engine = [&](const ForwardSchedule& schedule) {
      return blocked_forward(args, schedule);
    };
    const Machine machine = current_machine();
    const ForwardSchedule schedule = schedule_forward_int8(machine, shape);
    if (auto result = run(engine, schedule, machine, shape, args)) return *std::move(result);
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
    const FewRowsSchedule schedule = schedule_few_rows(
        machine, shape, steps_of(args.input, args.batch_sizes), is_prepacked(args.weights));
    const auto engine = [&](const FewRowsSchedule& chosen) {
      return std::optional(few_rows_forward(args, chosen));
    };
    return *run(engine, schedule, machine, shape, args);
  }
  return run_or_fall_back(
      [&](const ForwardSchedule& schedule) { return blocked_forward(args, schedule); },
      schedule_forward,
      machine,
      shape,
      args);
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
      shape,
      args);
}

}  // namespace lltm::cpu
