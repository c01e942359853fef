// Only an H100 has passed the tests, with earlier kernels. Before kernels are used, they compute a
// small problem and are compared with the ATen fallback, once per process for each cell, dtype and
// device. Each kernel of the persistent engine is checked separately, with the H of its first call.
// Delete this when GPUs of other architectures have passed.
#pragma once

#include "cell/cell.h"
#include "cuda/engine/engine.h"

#include <ATen/core/Tensor.h>

namespace lltm::cuda {

enum class Engine { step, per_step, persistent_forward, persistent_backward };

// Null if the kernels match the ATen fallback, otherwise, after a warning, the reason not to use
// them. Also null during CUDA graph capture, when results cannot be compared. The persistent engine
// needs the call's plan.
const char* why_not_kernels(
    const CellInfo& cell, const at::Tensor& input, Engine engine, const PersistentPlan& plan = {});

// For tests: the next calls check again.
void forget_self_checks();

}  // namespace lltm::cuda
