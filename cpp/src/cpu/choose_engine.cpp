#include "cpu/choose_engine.h"

namespace lltm::cpu {
namespace {

// A step with stages and few rows, for which packing would dominate. The per-step engine reads
// float32 weights in place, but its GEMMs take as long as packing this many weights a row.
bool is_faster_in_place(const Call& call) {
  constexpr int64_t kWeightsPerRow = 3 * 256 * 256;
  if (!call.stages || call.backward || call.prepacked != 0 || call.storage != Storage::kF32 ||
      call.steps > 1 || call.shape.batch > kMostProductRows) {
    return false;
  }
  return call.weights >= call.shape.batch * kWeightsPerRow;
}

// For few rows of large weights, packing and transposing weights and their gradients would
// dominate. With more steps, ATen's operations take longer on several threads.
bool has_few_rows(const Call& call) {
  constexpr int64_t kMostRows = 16, kMostSteps = 4, kWeightsPerStep = 3 * 256 * 256;
  return call.backward && !call.heads && call.storage == Storage::kF32 && call.steps > 1 &&
         call.steps <= kMostSteps && call.shape.rows <= kMostRows &&
         call.weights >= call.steps * kWeightsPerStep;
}

// If rounding errors decay, float64 is not needed, and the blocked engine is faster on several
// threads and for many rows, but takes longer to set up.
bool prefers_small_batch(
    const Call& call, const Machine& machine, const SmallBatchSchedule& schedule) {
  constexpr int64_t kShortCall = 64;
  const int64_t batch = call.shape.batch;
  const bool few_elements = has_few_elements(batch, call.shape.hidden);
  if (!call.forgets && call.storage == Storage::kF32) return few_elements;
  const bool is_short =
      call.prepacked != 0 && call.shape.rows <= kShortCall && (few_elements || !machine.bf16x3);
  return batch == 1 || schedule.in_place ||
         (schedule.grid.workers() == 1 && (batch <= kMostProductRows || is_short));
}

// Each row reads all weights in each step: from L1 or, for a single row, L2, the smallest of CPUs.
bool prefers_small_layer(
    const Call& call, const Machine& machine, const SmallBatchSchedule& schedule) {
  constexpr int64_t kL1 = 32 << 10, kL2 = 512 << 10, kMostRows = 16;
  constexpr int64_t kFewSteps = 12;  // for which packing costs more than it saves
  if (!call.small_layer || (call.prepacked == 0 && call.steps <= kFewSteps)) return false;
  const auto& [batch, input, hidden, rows, bf16, slots, heads] = call.shape;
  const int64_t bytes =
      (slots.x * input + slots.h * hidden) * hidden * static_cast<int64_t>(sizeof(float));
  if (batch > kMostRows || bytes > (batch == 1 ? kL2 * 3 / 4 : kL1)) return false;
  // It has a single thread, but takes at most this part of the others' time on one.
  const double part = batch == 1 ? 0.5 : 0.7;
  const auto time = [&](const Grid& grid) {
    return predicted_time(machine, call.shape, /*backward=*/false, grid);
  };
  return schedule.grid.workers() == 1 || part * time({}) <= time(schedule.grid);
}

}  // namespace

Engine choose_engine(const Machine& machine, Call call) {
  Engine engine = {Engine::kPerStep, machine};
  const auto has = [&](GemmFormat format) { return (call.prepacked & format_bit(format)) != 0; };
  const bool blocks = machine.f32 && call.storage != Storage::kF64 && !call.empty;
  if (has(GemmFormat::kInt8) && !call.empty) {
    engine.kind = Engine::kInt8;
    return engine;
  }
  if (call.prepacked != 0) {  // this CPU may have no kernel for the format
    engine.unpack = !blocks || has(GemmFormat::kInt8) || (has(GemmFormat::kBf16) && !machine.bf16);
    engine.machine.bf16 = has(GemmFormat::kBf16);
    engine.machine.fast_bf16 = true;
    engine.machine.bf16x3 = machine.bf16x3 && has(GemmFormat::kBf16x3);
    if (engine.unpack) {
      engine.machine = machine;
      call.prepacked = 0;
    }
  }
  const bool per_step = !blocks || is_faster_in_place(call) || has_few_rows(call);
  if (!per_step) engine.kind = Engine::kBlocked;
  const bool in_bf16 = has_bf16_operands(engine.machine, call.shape);
  // Small layers of 16 bits spend more time between GEMMs than in them.
  const bool may_widen =
      !in_bf16 || (call.small_layer && call.storage == Storage::kBf16 && call.prepacked == 0);
  if (!per_step && !call.stages && !call.backward && may_widen) {
    const bool prepacked = call.prepacked != 0;
    engine.small_batch = schedule_small_batch(engine.machine, call.shape, call.steps, prepacked);
    if (!in_bf16 && prefers_small_batch(call, engine.machine, engine.small_batch)) {
      engine.kind = Engine::kSmallBatch;
    }
    if (prefers_small_layer(call, engine.machine, engine.small_batch))
      engine.kind = Engine::kSmallLayer;
  }
  // Without packing, heads may have any size.
  const bool packs =
      !per_step && !(engine.kind == Engine::kSmallBatch && engine.small_batch.in_place);
  engine.dense = call.heads && packs && !call.packs_heads;
  if (engine.kind != Engine::kBlocked) return engine;
  // A product's operand may be out of range.
  if (call.stages) engine.machine.bf16x3 = false;
  const bool one_step = call.steps == 1 && call.prepacked == 0 && !call.wide_gradients;
  const bool has_engine = !call.stages && !call.given && (!call.heads || engine.dense);
  if (one_step && has_engine) engine.kind = Engine::kOneStep;
  return engine;
}

}  // namespace lltm::cpu
