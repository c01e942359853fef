// The sequence engine on the CPU: how the steps of one layer and direction are
// worked through. Arguments are those of the operators in library.cpp, already
// checked; results are new contiguous tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace lltm::cpu {

// output, h_n, c_n, activations; activations is undefined unless asked for.
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// `weights` may be prepacked (packed_weights.h).
struct ForwardProblem {
  const at::Tensor& input;
  const at::Tensor& h_0;
  const at::Tensor& c_0;
  const at::Tensor& weights;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& batch_sizes;
  bool reverse;
  bool save;  // the activations, for backward
};

// An undefined gradient is zero. `wanted` is in the order of the results:
// input, h_0, c_0, weights, bias.
struct BackwardProblem {
  const at::Tensor& grad_output;
  const at::Tensor& grad_h_n;
  const at::Tensor& grad_c_n;
  const at::Tensor& input;
  const at::Tensor& h_0;
  const at::Tensor& weights;
  const at::Tensor& output;
  const at::Tensor& activations;
  const std::optional<at::Tensor>& batch_sizes;
  bool reverse;
  std::array<bool, 5> wanted;
};

// The engines below behave alike; these choose between them.
ForwardResult run_forward(const ForwardProblem& problem);
Gradients run_backward(const BackwardProblem& problem);

// engine_stepwise.cpp: public ATen products, step by step. Always works.
ForwardResult stepwise_forward(const ForwardProblem& problem);
Gradients stepwise_backward(const BackwardProblem& problem);

// engine_blocked.cpp: packed weights, micro-kernel and pointwise work block by
// block in one parallel region. Not for float64.
ForwardResult blocked_forward(const ForwardProblem& problem);
Gradients blocked_backward(const BackwardProblem& problem);

}  // namespace lltm::cpu
