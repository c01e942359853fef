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

// engine_stepwise.cpp: public ATen products, step by step. Always works.
ForwardResult stepwise_forward(const ForwardProblem& problem);
Gradients stepwise_backward(const BackwardProblem& problem);

// engine_few_rows.cpp: float32 with sums in float64, for at most kFewRows rows or
// kFewUnits hidden units. May take prepacked weights that are not narrow.
constexpr int64_t kFewRows = 4;
constexpr int64_t kFewUnits = 16;
ForwardResult few_rows_forward(const ForwardProblem& problem);

// engine_blocked.cpp: packed weights, micro-kernel and pointwise work block by
// block in one parallel region. Not for float64.
ForwardResult blocked_forward(const ForwardProblem& problem);
Gradients blocked_backward(const BackwardProblem& problem);

}  // namespace lltm::cpu
