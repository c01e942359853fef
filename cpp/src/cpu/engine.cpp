#include "cpu/engine.h"

#include "cpu/micro_kernel.h"

namespace lltm::cpu {
namespace {

// The micro-kernel takes float and bfloat16, and no size may be 0.
bool takes_blocks(const at::Tensor& input, const at::Tensor& h_0) {
  return input.scalar_type() != at::kDouble && input.numel() > 0 && h_0.numel() > 0 &&
         has_micro_kernel<float>();
}

}  // namespace

ForwardResult run_forward(const ForwardProblem& problem) {
  return takes_blocks(problem.input, problem.h_0) ? blocked_forward(problem)
                                                  : stepwise_forward(problem);
}

Gradients run_backward(const BackwardProblem& problem) {
  return takes_blocks(problem.input, problem.h_0) ? blocked_backward(problem)
                                                  : stepwise_backward(problem);
}

}  // namespace lltm::cpu
