// What backward computes after its steps, by GEMMs over the rows of all of them.
#pragma once

#include "common/operator_args.h"
#include "common/steps.h"
#include "cuda/gemm/gemm.h"

#include <vector>

namespace lltm::cuda {

// What the steps of backward write: the gradients of the state, updated in place and final
// for a row after its first step, and those of the pre-activations, in the tensors' dtype. Rows of
// dh and dz may be filled up with columns of zeros.
struct BackwardTensors {
  at::Tensor dh, dc, dz;
};

// The first `cols` columns, contiguous.
inline at::Tensor unpadded(const at::Tensor& tensor, int64_t cols) {
  return tensor.size(1) == cols ? tensor : tensor.slice(1, 0, cols).contiguous();
}

// Those of output_mask.
Gradients sequence_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const BackwardTensors& tensors);

}  // namespace lltm::cuda
