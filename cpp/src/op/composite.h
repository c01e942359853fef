// The ATen fallback. Like the kernels, it rounds the states of each step, the activations and the
// gradients to float16 or bfloat16. It does not check arguments.
#pragma once

#include "common/operator_args.h"

namespace lltm::composite {

StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Recompute the activations: saved activations are constants in autograd, recomputed activations
// can be differentiated. Unlike checkpointed.h, these functions keep the activations of all steps
// and write nothing in place.
Gradients step_backward_anew(const StepBackwardArgs& args);
Gradients sequence_backward_anew(const SequenceBackwardArgs& args);

}  // namespace lltm::composite
