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

// `weights` may be prepacked.
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

// Weights (3H, H+I) in the form that the forward engine reads them: a tensor of
// bytes, or, where that engine has no such form for their dtype or on this CPU,
// a copy.
at::Tensor prepack(const at::Tensor& weights);
inline bool is_prepacked(const at::Tensor& weights) {
  return weights.scalar_type() == at::kByte;
}
// Whether prepacked weights, perhaps of another CPU, are those of a layer with
// the sizes and the dtype of `input` and `h_0`; throws if not.
void check_prepacked(const at::Tensor& weights, const at::Tensor& input, const at::Tensor& h_0);

// engine_stepwise.cpp: public ATen products, step by step. Always works.
ForwardResult stepwise_forward(const ForwardProblem& problem);
Gradients stepwise_backward(const BackwardProblem& problem);

// engine_blocked.cpp: packed weights, micro-kernel and pointwise work block by
// block in one parallel region. Not for float64.
ForwardResult blocked_forward(const ForwardProblem& problem);
Gradients blocked_backward(const BackwardProblem& problem);
at::Tensor pack_blocks(const at::Tensor& weights);
at::Tensor unpack_blocks(const at::Tensor& packed);
bool has_narrow_blocks(const at::Tensor& packed);  // for products of bfloat16
void check_blocks(
    const at::Tensor& packed, at::ScalarType dtype, int64_t input_size, int64_t hidden);

}  // namespace lltm::cpu
