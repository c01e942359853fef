// A sequence that saves checkpoints instead of activations. Forward writes c before every
// checkpoint_steps-th step, whatever engine runs. For backward the steps are cut into segments of
// checkpoint_steps. From the last segment to the first, forward runs once more from the segment's
// checkpoint and saves its activations, and backward takes them. So activations exist for one
// segment at a time.
#pragma once

#include "op/operator_args.h"

#include <ATen/ops/empty.h>

namespace lltm {

// The checkpoints (ceil(T / checkpoint_steps), B, H) of `steps` steps, for forward to fill;
// undefined unless asked for.
inline at::Tensor empty_checkpoints(const SequenceArgs& args, size_t steps) {
  if (!args.saves_checkpoints()) return {};
  const auto n = static_cast<size_t>(args.checkpoint_steps);
  const auto count = static_cast<int64_t>((steps + n - 1) / n);
  return at::empty({count, args.h_0.size(0), args.h_0.size(1)}, args.input.options());
}

// Writes the checkpoint before step k, if there is one; c (B, H) is the state by then.
inline void save_checkpoint(
    const SequenceArgs& args, const at::Tensor& checkpoints, size_t k, const at::Tensor& c) {
  if (!args.saves_checkpoint(k)) return;
  checkpoints.select(0, static_cast<int64_t>(k) / args.checkpoint_steps).copy_(c);
}

// Backward by a backend's sequence_forward and sequence_backward. As in sequence_backward,
// gradients are carried from step to step and accumulated in the compute dtype, and rounded once.
Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&));

}  // namespace lltm
