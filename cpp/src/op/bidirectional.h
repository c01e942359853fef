// Two calls at once on the CPU, the directions of a layer, each on a thread of its own: where
// nobody follows the operators but autograd.
#pragma once

#include "common/operator_args.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace lltm {

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

// op::sequence of two calls on a plain thread, whose tensors are plain. What autograd records of
// them is one node, so that they run side by side in backward too; prepacked weights have none.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    SequenceArgs first, SequenceArgs second);

}  // namespace lltm
