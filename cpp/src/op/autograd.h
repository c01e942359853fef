// Autograd for two calls that run concurrently (bidirectional.h).
#pragma once

#include "common/operator_args.h"

#include <array>

namespace lltm {

bool records_gradients(const SequenceArgs& args);

// Records a single node.
std::array<SequenceOutputs, 2> sequences_with_autograd(const std::array<SequenceArgs, 2>& calls);

}  // namespace lltm
