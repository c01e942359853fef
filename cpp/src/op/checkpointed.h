// Backward from activation checkpoints: segment by segment, from last to first, forward from a
// checkpoint, then backward.
#pragma once

#include "common/operator_args.h"

namespace lltm {

// Calls a backend's sequence_forward and sequence_backward. Gradients accumulate in the compute
// dtype and are rounded once.
Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&));

}  // namespace lltm
