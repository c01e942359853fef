// One step, and one layer and direction of a sequence, on a GPU. cpu/engine/engine.h declares the
// same.
//
// Everything is queued on the current stream of the arguments' device, which must be the current
// device; nothing waits. The engines know gemm.h, side_stream.h, elementwise.h and persistent.h,
// and nothing of CUDA: the tests link them to host versions of these and run them on the CPU.
#pragma once

#include "common/operator_args.h"
#include "cuda/tuning.h"

#include <optional>
#include <span>
#include <vector>

namespace lltm::cuda {

// step.cpp: one step.
StepResult step_forward(const StepArgs& args);
Gradients step_backward(const StepBackwardArgs& args);

// choose.cpp: sequences by one of the engines below. Several are of one cell, dtype and size, the
// directions of a layer, and run at once where that can be.
std::vector<SequenceResult> sequences_forward(std::span<const SequenceArgs> calls);
std::vector<Gradients> sequences_backward(std::span<const SequenceBackwardArgs> calls);
inline SequenceResult sequence_forward(const SequenceArgs& args) {
  return sequences_forward({&args, 1}).front();
}
inline Gradients sequence_backward(const SequenceBackwardArgs& args) {
  return sequences_backward({&args, 1}).front();
}

// What the pre-activations of a chunk of steps take, unless one step needs more: a part of
// the second-level cache of a data-centre GPU, so that they hardly reach memory, and rows
// enough for a GEMM to fill the machine.
constexpr int64_t kWorkspaceBytes = 32 << 20;

// stepwise.cpp: a GEMM and an element-wise kernel per step. Always works.
SequenceResult stepwise_forward(
    const SequenceArgs& args, int64_t workspace_bytes = kWorkspaceBytes);
Gradients stepwise_backward(const SequenceBackwardArgs& args);

// What the engine below returns: the result of each call and how they ran, or nothing and why.
template <typename Result>
struct Attempt : std::optional<std::vector<Result>> {
  const char* why_not = nullptr;
  int tiles = 0;       // of a group, see persistent.h
  int64_t groups = 0;  // at most, of a launch and call
};

// persistent.cpp: one kernel for many steps, of all calls. Returns nothing where it cannot run.
// Benchmarks pass a `tuning`, which is then used or nothing is returned; by default tuning_table.h
// decides.
Attempt<SequenceResult> persistent_forward(
    std::span<const SequenceArgs> calls,
    int64_t workspace_bytes = kWorkspaceBytes,
    std::optional<Tuning> tuning = std::nullopt);
Attempt<Gradients> persistent_backward(
    std::span<const SequenceBackwardArgs> calls, std::optional<Tuning> tuning = std::nullopt);

}  // namespace lltm::cuda
