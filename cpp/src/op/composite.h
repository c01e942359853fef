// The ATen fallback: the operators in ATen operations. It is the backend for devices without
// kernels. It also computes double backward, forward mode and function transforms, because ATen can
// differentiate and map it repeatedly.
//
// Like the kernels, it computes float16 and bfloat16 in float32, and rounds the states of each
// step, the activations and the gradients. It does not check arguments.
#pragma once

#include "common/operator_args.h"

namespace lltm::composite {

StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Backward functions that recompute the activations. Saved activations are constants in autograd;
// recomputed activations can be differentiated. Unlike checkpointed.h, these functions keep the
// activations of all steps and write nothing in place.
Gradients step_backward_anew(const StepBackwardArgs& args);
Gradients sequence_backward_anew(const SequenceBackwardArgs& args);

}  // namespace lltm::composite
