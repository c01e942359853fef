// No GPU has passed the tests yet. So before kernels compute for a user, they compute a small
// problem, and PyTorch's operations the same one: once in a process for each cell, dtype and
// device. To be deleted once a GPU has passed.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

namespace lltm::cuda {

// What a call runs: one step, or a sequence by one of the two engines.
enum class Kernels { step, stepwise, persistent };

// Null where these kernels give what PyTorch's operations give, in the dtype and on the device of
// `input`, or while a CUDA graph is captured, when nothing can be compared; else why not to use
// them, after a warning.
const char* why_not_kernels(const CellInfo& cell, const at::Tensor& input, Kernels kernels);

// For tests: the next calls check again.
void forget_self_checks();

}  // namespace lltm::cuda
