// Runs a layer's two directions concurrently, on devices that can (common/device.h).
#pragma once

#include "common/operator_args.h"
#include "op/interceptors.h"

#include <functional>
#include <utility>

namespace lltm {

// True if calls like `call` run concurrently, and take less time so. At most autograd may intercept
// them; prepacked weights have no derivative.
bool fits_side_by_side(const SequenceArgs& call, const Interceptors& interceptors);

// Autograd records a single node, so backward is concurrent too. Prepacked weights have no node.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    SequenceArgs first, SequenceArgs second);

// Calls run(0) and run(1) below autograd, for calls on the device of `input`.
void run_side_by_side(const at::Tensor& input, const std::function<void(size_t)>& run);

}  // namespace lltm
