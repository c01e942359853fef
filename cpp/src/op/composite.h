// The operators in plain ATen operations: the backend of any device without kernels of its
// own, and, because ATen can differentiate and map it any number of times, the path of
// double backward, forward mode and function transforms.
//
// As the kernels do, it computes float16 and bfloat16 in float32, and rounds the states of
// each step, the activations and the gradients. It does not check arguments.
#pragma once

#include "op/operator_args.h"

namespace lltm::composite {

CellResult cell_forward(const CellArgs& args);
Gradients cell_backward(const CellBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);
// For derivatives and vmap only: unlike checkpointed.h, it keeps the activations of all steps.
Gradients sequence_checkpointed_backward(const CheckpointedBackwardArgs& args);

}  // namespace lltm::composite
