// One step, and one layer and direction of a sequence, on the CPU. cuda/engine/engine.h declares
// the same.
//
// The engines behave alike; choose.cpp chooses between them.
#pragma once

#include "common/operator_args.h"
#include "cpu/schedule.h"

#include <optional>
#include <string>
#include <vector>

namespace lltm::cpu {

// step_forward.cpp, step_backward.cpp: one step.
StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);

// choose.cpp: a sequence by one of the engines below. The weights of SequenceArgs may be prepacked
// (packed_weights.h).
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// stepwise.cpp: ATen's GEMMs, step by step. Always works.
SequenceResult stepwise_forward(const SequenceArgs& args);
Gradients stepwise_backward(const SequenceBackwardArgs& args);

// few_rows.cpp: float32 with a float64 state, for has_few_elements. Not for weights
// prepacked in bfloat16.
SequenceResult few_rows_forward(const SequenceArgs& args, const FewRowsSchedule& schedule);

// blocked_forward.cpp, blocked_backward.cpp: packed weights, and GEMM and
// element-wise part block by block in one parallel region. Not for float64 or empty sizes.
// Nothing where values are out of range of the schedule's format.
std::optional<SequenceResult> blocked_forward(
    const SequenceArgs& args, const ForwardSchedule& schedule);
std::optional<Gradients> blocked_backward(
    const SequenceBackwardArgs& args, const BackwardSchedule& schedule);

// The same engine with weights prepacked in int8.
struct Int8Result {
  SequenceResult result;
  // Rows of the batch with a value that cannot be quantised, in ascending order. Their results mean
  // nothing; those of the other rows do not depend on them.
  std::vector<int64_t> out_of_range;
};
Int8Result blocked_int8_forward(const SequenceArgs& args, const ForwardSchedule& schedule);

}  // namespace lltm::cpu
