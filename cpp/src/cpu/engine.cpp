#include "cpu/engine.h"

#include "cpu/micro_kernel.h"
#include "cpu/packed_weights.h"

namespace lltm::cpu {
namespace {

// The micro-kernel takes float and bfloat16, and no size may be 0.
bool takes_blocks(const at::Tensor& input, const at::Tensor& h_0) {
  return input.scalar_type() != at::kDouble && input.numel() > 0 && h_0.numel() > 0 &&
         has_micro_kernel<float>();
}

}  // namespace

ForwardResult run_forward(const ForwardProblem& p) {
  const bool blocks = takes_blocks(p.input, p.h_0);
  if (blocks && p.input.scalar_type() == at::kFloat && has_few_elements(p.h_0)) {
    return few_rows_forward(p);
  }
  if (!is_prepacked(p.weights)) return blocks ? blocked_forward(p) : stepwise_forward(p);
  const bool readable = !has_narrow_blocks(p.weights) || has_micro_kernel<BFloat16>();
  if (blocks && readable) return blocked_forward(p);
  const at::Tensor weights = unpack(p.weights);
  return run_forward({p.input, p.h_0, p.c_0, weights, p.bias, p.batch_sizes, p.reverse, p.save});
}

Gradients run_backward(const BackwardProblem& problem) {
  return takes_blocks(problem.input, problem.h_0) ? blocked_backward(problem)
                                                  : stepwise_backward(problem);
}

}  // namespace lltm::cpu
