// Backward from activation checkpoints, segment by segment from the last: forward from the
// checkpoint, then backward.
#pragma once

#include "common/operator_args.h"

namespace lltm {

// Gradients accumulate in the compute dtype and are rounded once.
Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&));

}  // namespace lltm
