// The gradients that a sequence computes after its steps, from dz of all rows: of the input, the
// weights and the biases.
#pragma once

#include "aten/device_gemm.h"
#include "common/operator_args.h"
#include "common/tensor_steps.h"

#include <vector>

namespace lltm {

// Outputs of the backward steps. dh and dc are updated in place; a row is final after its first
// step. Rows of dh and dz, which has the GEMM's dtype, may be padded with zeros.
struct BackwardTensors {
  at::Tensor dh, dc, dz;
};

inline at::Tensor unpadded(const at::Tensor& tensor, int64_t cols) {
  return tensor.size(1) == cols ? tensor : tensor.slice(1, 0, cols).contiguous();
}

// Of any cell and weights, with heads too.
Gradients row_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const DeviceGemm& gemm,
    const BackwardTensors& tensors);

}  // namespace lltm
