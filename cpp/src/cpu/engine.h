// The sequence engine on the CPU: how the steps of one layer and direction are
// worked through.
#pragma once

#include "problem.h"

namespace lltm::cpu {

// In a ForwardProblem, `weights` may be prepacked (packed_weights.h).
//
// The engines below behave alike; these choose between them.
ForwardResult run_forward(const ForwardProblem& problem);
Gradients run_backward(const BackwardProblem& problem);

// Whether a state (B, H) has so few elements that nothing averages rounding errors out:
// whose are larger, ours or plain PyTorch's, is then a matter of luck, unless ours are
// smaller by design.
inline bool has_few_elements(const at::Tensor& h_0) {
  return h_0.size(0) <= 4 || h_0.size(1) <= 16;
}

// engine_stepwise.cpp: public ATen products, step by step. Always works.
ForwardResult stepwise_forward(const ForwardProblem& problem);
Gradients stepwise_backward(const BackwardProblem& problem);

// engine_few_rows.cpp: float32 with sums in float64, for few elements. May take prepacked
// weights that are not narrow.
ForwardResult few_rows_forward(const ForwardProblem& problem);

// engine_blocked.cpp: packed weights, micro-kernel and pointwise work block by
// block in one parallel region. Not for float64.
ForwardResult blocked_forward(const ForwardProblem& problem);
Gradients blocked_backward(const BackwardProblem& problem);

}  // namespace lltm::cpu
