// No GPU has passed the tests yet: before kernels are used, they compute a small problem and are
// compared with the ATen fallback, once per process for each cell, dtype and device. Delete this
// when a GPU has passed.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

namespace lltm::cuda {

// The kernels that a call uses: a single step, or a sequence with one of the two engines.
enum class Kernels { step, stepwise, persistent };

// Null if the kernels match the ATen fallback, otherwise the reason not to use them, after a
// warning. Also null during CUDA graph capture, when results cannot be compared.
const char* why_not_kernels(const CellInfo& cell, const at::Tensor& input, Kernels kernels);

// For tests: makes the next calls check again.
void forget_self_checks();

}  // namespace lltm::cuda
