// Runs a layer's two directions concurrently, each on half of the CPU threads.
#pragma once

#include "common/operator_args.h"
#include "cpu/parallel.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

namespace lltm {

// Runs both below autograd.
template <typename Run>
void run_side_by_side(const Run& run) {
  const at::ThreadLocalState state;  // such as inference mode and profilers
  const int64_t threads = std::min(cpu::available_threads(), cpu::usable_cpus());
  cpu::run_crews(2, std::max<int64_t>(threads / 2, 1), [&](int64_t k) {
    const at::ThreadLocalStateGuard same(state);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    run(static_cast<size_t>(k));
  });
}

// At most autograd may intercept the calls. It records a single node, so backward is concurrent
// too. Prepacked weights have no node.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    SequenceArgs first, SequenceArgs second);

}  // namespace lltm
