// Backward from activation checkpoints. Forward saves c before every checkpoint_steps-th step, in
// all engines. Backward splits the steps into segments of checkpoint_steps. From the last segment
// to the first, it runs forward again from the segment's checkpoint, which saves activations, then
// backward. Activations therefore exist for a single segment at a time.
#pragma once

#include "common/operator_args.h"

namespace lltm {

// Runs backward with a backend's sequence_forward and sequence_backward. Gradients continue between
// segments and accumulate in the compute dtype, and are rounded once, as in sequence_backward.
Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&));

}  // namespace lltm
