// One step, and one layer and direction of a sequence, on a GPU. cpu/engine/engine.h declares the
// same.
//
// Everything is queued on the current stream of the arguments' device, which must be the current
// device; nothing waits. The engines know gemm.h, elementwise.h and persistent.h, and nothing of
// CUDA: the tests link them to host versions of these and run them on the CPU.
#pragma once

#include "common/operator_args.h"

#include <cstdint>
#include <optional>

namespace lltm::cuda {

// step.cpp: one step.
StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);

// choose.cpp: a sequence by one of the engines below.
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// What the pre-activations of a chunk of steps take, unless one step needs more: a part of
// the second-level cache of a data-centre GPU, so that they hardly reach memory, and rows
// enough for a GEMM to fill the machine.
constexpr int64_t kWorkspaceBytes = 32 << 20;

// stepwise.cpp: a GEMM and an element-wise kernel per step. Always works.
SequenceResult stepwise_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Gradients stepwise_backward(const SequenceBackwardArgs& args);

// What the engine below returns: the result and how it ran, or nothing and why.
template <typename Result>
struct Attempt : std::optional<Result> {
  const char* why_not = nullptr;
  int tiles = 0;       // of a group, see persistent.h
  int64_t groups = 0;  // at most, of a launch
};

// persistent.cpp: one kernel for many steps. Returns nothing where it cannot run. Backward, what it
// has in the cache are the gradients of pre-activations, beside the activations that it reads.
Attempt<SequenceResult> persistent_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Attempt<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, int64_t workspace_bytes = kWorkspaceBytes / 2);

}  // namespace lltm::cuda
