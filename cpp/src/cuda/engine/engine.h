// The CUDA engines: a single step, and one layer and direction of a sequence. cpu/engine/engine.h
// declares the same interface.
//
// All work is queued on the current stream of the arguments' device, which must be the current
// device, and nothing waits. The engines include only gemm.h, elementwise.h and persistent.h, and
// no CUDA header: tests link them to host versions and run them on the CPU.
#pragma once

#include "common/operator_args.h"

#include <cstdint>
#include <optional>

namespace lltm::cuda {

// step.cpp: a single step.
StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);

// choose.cpp: a sequence, with one of the engines below.
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Maximum size of a chunk's pre-activations, unless a single step needs more. It is a part of a
// data-center GPU's L2 cache, so that they rarely reach memory. A chunk still has enough rows for a
// GEMM to use the entire GPU.
constexpr int64_t kWorkspaceBytes = 32 << 20;

// stepwise.cpp: the per-step engine, a GEMM and an element-wise kernel per step. Supports every
// dtype and size.
SequenceResult stepwise_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Gradients stepwise_backward(const SequenceBackwardArgs& args);

// The persistent engine's result and how it ran, or nullopt and the reason.
template <typename Result>
struct Attempt : std::optional<Result> {
  const char* why_not = nullptr;
  int tiles = 0;       // per group, see persistent.h
  int64_t groups = 0;  // maximum per launch
};

// persistent.cpp: one kernel for many steps. Returns nullopt if it cannot run. In backward, the
// cache holds dz and the activations, so the workspace is smaller.
Attempt<SequenceResult> persistent_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Attempt<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, int64_t workspace_bytes = kWorkspaceBytes / 2);

}  // namespace lltm::cuda
