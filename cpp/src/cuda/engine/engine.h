// The CUDA engines, with the interface of cpu/engine/engine.h.
//
// All work is queued on the current stream of the arguments' device, which must be current, and
// nothing waits. The engines include no CUDA header: tests link them to host functions and run them
// on the CPU.
#pragma once

#include "common/operator_args.h"
#include "cuda/kernel/persistent.h"

#include <cstdint>
#include <optional>

namespace lltm::cuda {

// step.cpp: steps (operator_args.h), without an output.
SequenceResult step_forward(const SequenceArgs& args);
Gradients step_backward(const SequenceBackwardArgs& args);

// choose.cpp: one of these engines.
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Limit for a chunk's pre-activations, unless a step needs more: a part of a data-center GPU's L2
// cache, so that they rarely reach memory, but enough rows for a GEMM to use the entire GPU.
constexpr int64_t kWorkspaceBytes = 32 << 20;

// per_step.cpp: the per-step engine.
SequenceResult per_step_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Gradients per_step_backward(const SequenceBackwardArgs& args);

// How the persistent engine (persistent.cpp) runs a call, or why it cannot: successive launches of
// a kernel (persistent.h).
struct PersistentPlan {
  const char* why_not = nullptr;
  int64_t hidden = 0;
  PersistentKernel kernel = {};
  int64_t groups = 0;  // maximum per launch

  int64_t rows() const;  // per launch
};
PersistentPlan plan_persistent(const SequenceArgs& args);
PersistentPlan plan_persistent(const SequenceBackwardArgs& args);

// nullopt if the GPU rejects a launch. Backward has a smaller workspace, because the cache also
// holds dz and the activations.
std::optional<SequenceResult> persistent_forward(
    const SequenceArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes = kWorkspaceBytes);
std::optional<Gradients> persistent_backward(
    const SequenceBackwardArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes = kWorkspaceBytes / 2);

}  // namespace lltm::cuda
