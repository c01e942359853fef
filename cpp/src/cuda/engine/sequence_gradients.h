#pragma once

#include "common/operator_args.h"
#include "common/steps.h"
#include "cuda/gemm/gemm.h"

#include <vector>

namespace lltm::cuda {

// Outputs of the backward steps. dh and dc are updated in place; a row is final after its first
// step. Rows in dh and dz may be padded with zeros.
struct BackwardTensors {
  at::Tensor dh, dc, dz;
};

inline at::Tensor unpadded(const at::Tensor& tensor, int64_t cols) {
  return tensor.size(1) == cols ? tensor : tensor.slice(1, 0, cols).contiguous();
}

Gradients sequence_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const BackwardTensors& tensors);

}  // namespace lltm::cuda
