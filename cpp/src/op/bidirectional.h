// Runs a layer's two directions concurrently on separate CPU threads.
#pragma once

#include "common/operator_args.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace lltm {

// Runs both below autograd.
template <typename Run>
void run_side_by_side(const Run& run) {
  const at::ThreadLocalState state;  // such as inference mode and profilers
  at::parallel_for(0, 2, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    const at::ThreadLocalStateGuard same(state);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t k = begin; k < end; ++k) run(k);
  });
}

// At most autograd may intercept the calls. It records a single node, so backward is concurrent
// too. Prepacked weights have no node.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    SequenceArgs first, SequenceArgs second);

}  // namespace lltm
