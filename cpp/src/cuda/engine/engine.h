// The CUDA engines, with the interface of cpu/engine/engine.h.
//
// All work is queued on the current stream of the arguments' device, which must be current, and
// nothing waits. The engines include no CUDA header: tests link them to host functions and run them
// on the CPU.
#pragma once

#include "common/operator_args.h"
#include "cuda/gemm/gemm.h"
#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace lltm::cuda {

// choose_engine.cpp: one of these engines.
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// Limit for a chunk's pre-activations, unless a step needs more: in the L2 cache they rarely reach
// memory, which costs more than the additional launches of small chunks.
inline int64_t workspace_of_cache() {
  return l2_cache_bytes() / 3 * 2;
}

// step_kernels.cpp: the per-step engine (aten/per_step.h).
SequenceResult per_step_forward(
    const SequenceArgs& args, int64_t workspace_bytes = workspace_of_cache());
Gradients per_step_backward(const SequenceBackwardArgs& args);

// How the persistent engine (persistent.cpp) runs a call, or why it cannot: successive launches of
// a kernel (persistent.h).
struct PersistentPlan {
  const char* why_not = nullptr;
  int64_t hidden = 0;
  int64_t head_units = 0;  // of persistent.h
  PersistentKernel kernel = {};
  int64_t groups = 0;                // maximum per launch
  int directions = 1;                // in the same launches
  std::uint32_t* failure = nullptr;  // set on a timeout, instead of the stream's failure_word

  int64_t rows() const { return groups * kernel.tiles * kTileRows; }  // per launch
};
PersistentPlan plan_persistent(const SequenceArgs& args, int directions = 1);
PersistentPlan plan_persistent(const SequenceBackwardArgs& args, int directions = 1);

// nullopt if the GPU rejects a launch. Backward has a smaller workspace, because the cache also
// holds dz and the activations.
std::optional<SequenceResult> persistent_forward(
    const SequenceArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes = workspace_of_cache());
std::optional<Gradients> persistent_backward(
    const SequenceBackwardArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes = workspace_of_cache() / 2);

// Calls run(0) and run(1), which call an engine for a layer's two directions. The persistent
// kernels run concurrently, in the same launches, if all rows of both fit.
void run_both_directions(const std::function<void(size_t)>& run);

// For the current call: 2 within run_both_directions, while the other call can still join it.
int concurrent_directions();

}  // namespace lltm::cuda
