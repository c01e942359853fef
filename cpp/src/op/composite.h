// The operators in plain ATen operations: the backend of any device without kernels of its
// own, and, because ATen can differentiate and map it any number of times, the path of
// double backward, forward mode and function transforms.
//
// As the kernels do, it computes float16 and bfloat16 in float32, and rounds the states of
// each step, the activations and the gradients. It does not check arguments.
#pragma once

#include "common/operator_args.h"

namespace lltm::composite {

StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// The same from the arguments of forward alone. To autograd the saved activations are constants;
// computed anew, they can be differentiated. Unlike checkpointed.h, this keeps the activations of
// all steps, and writes nothing in place.
Gradients step_backward_anew(const StepBackwardArgs& args);
Gradients sequence_backward_anew(const SequenceBackwardArgs& args);

}  // namespace lltm::composite
