// A sequence that saves checkpoints instead of activations. Forward writes c before every
// checkpoint_steps-th step, whatever engine runs. For backward the steps are cut into segments of
// checkpoint_steps. From the last segment to the first, forward runs once more from the segment's
// checkpoint and saves its activations, and backward takes them. So activations exist for one
// segment at a time.
#pragma once

#include "common/operator_args.h"

namespace lltm {

// Backward by a backend's sequence_forward and sequence_backward. As in sequence_backward,
// gradients are carried from step to step and accumulated in the compute dtype, and rounded once.
Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&));

}  // namespace lltm
