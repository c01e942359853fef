// The CPU engines compute the same function; choose_engine.cpp chooses one per call and run.cpp
// runs it. cuda/engine/engine.h has the same interface.
#pragma once

#include "common/operator_args.h"
#include "cpu/schedule.h"

#include <optional>
#include <string>
#include <vector>

namespace lltm::cpu {

// one_step_forward.cpp, one_step_backward.cpp: the one-step engine, for T = 1 and cells with a
// single stage.
SequenceResult one_step_forward(const SequenceArgs& args);
Gradients one_step_backward(const SequenceBackwardArgs& args);

// run.cpp: weights may be prepacked.
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// per_step.cpp: the per-step engine, for all dtypes and sizes.
SequenceResult per_step_forward(const SequenceArgs& args);
Gradients per_step_backward(const SequenceBackwardArgs& args);

// forward_tensors.cpp: the engines of forward_call.h. small_batch_forward and small_layer_forward
// need float32 input and states, and weights in float32 or 16 bits, but not prepacked in bfloat16.
SequenceResult small_batch_forward(const SequenceArgs& args, const SmallBatchSchedule& schedule);

SequenceResult small_layer_forward(const SequenceArgs& args);
// nullopt if values are out of range of the format.
std::optional<SequenceResult> blocked_forward(
    const SequenceArgs& args, const ForwardSchedule& schedule);
struct Int8Result {
  SequenceResult result;
  // Batch elements that cannot be quantized. Their results are invalid.
  std::vector<int64_t> out_of_range;
};
Int8Result blocked_int8_forward(const SequenceArgs& args, const ForwardSchedule& schedule);

// blocked_backward.cpp: the blocked engine, without float64 or empty sizes. nullopt likewise.
std::optional<Gradients> blocked_backward(
    const SequenceBackwardArgs& args, const BackwardSchedule& schedule);

}  // namespace lltm::cpu
