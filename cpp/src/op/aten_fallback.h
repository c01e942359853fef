// The ATen fallback. Like the kernels, it rounds each step's states, the activations and the
// gradients to float16 or bfloat16. Does not check arguments.
#pragma once

#include "common/operator_args.h"

namespace lltm::aten_fallback {

StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Recompute the activations, so that autograd can differentiate them: saved activations are
// constants. Unlike checkpointed.h, these functions keep all activations and write nothing in
// place.
Gradients step_backward_recomputed(const StepBackwardArgs& args);
Gradients sequence_backward_recomputed(const SequenceBackwardArgs& args);

}  // namespace lltm::aten_fallback
