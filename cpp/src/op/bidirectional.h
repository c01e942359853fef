// Two calls at once, the directions of a layer, where nobody follows the operators but autograd: on
// the CPU each on a thread of its own, on a GPU by what its backend has for this.
#pragma once

#include "common/operator_args.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace lltm {

// The checked operators of a backend that runs several calls at once; null in another.
struct OperatorsAtOnce {
  std::vector<SequenceResult> (*forward)(bool save, std::span<const SequenceArgs>) = nullptr;
  std::vector<Gradients> (*backward)(std::span<const SequenceBackwardArgs>) = nullptr;
};
inline OperatorsAtOnce& operators_at_once(at::DeviceType device) {
  static std::array<OperatorsAtOnce, at::COMPILE_TIME_MAX_DEVICE_TYPES> operators;
  return operators.at(static_cast<size_t>(device));
}

// run(0) and run(1) on two threads, below autograd.
template <typename Run>
void run_side_by_side(const Run& run) {
  const at::ThreadLocalState state;  // inference mode and profilers, say
  at::parallel_for(0, 2, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    const at::ThreadLocalStateGuard same(state);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t k = begin; k < end; ++k) run(k);
  });
}

// op::sequence of two calls on a plain thread, whose tensors are plain; on a GPU, of a built-in
// cell. What autograd records of
// them is one node, so that they run side by side in backward too.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    const SequenceArgs& first, const SequenceArgs& second);

}  // namespace lltm
