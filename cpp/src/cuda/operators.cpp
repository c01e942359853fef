// The operators on CUDA tensors: checked, then handed to an engine, with the
// device of the arguments as the current one.
#include "check.h"
#include "cuda/engine.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace lltm::cuda {
namespace {

using at::Tensor;
using c10::cuda::CUDAGuard;

std::tuple<Tensor, Tensor> cell_op(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  const CUDAGuard guard(input.device());
  auto [h_next, c_next, activations] = cell_forward(input, h, c, weights, bias, /*save=*/false);
  return {h_next, c_next};
}

std::tuple<Tensor, Tensor, Tensor> cell_forward_op(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  const CUDAGuard guard(input.device());
  return cell_forward(input, h, c, weights, bias, /*save=*/true);
}

Gradients cell_backward_op(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> output_mask) {
  check_cell_backward(grad_h, grad_c, input, h, weights, activations);
  const CUDAGuard guard(input.device());
  return cell_backward(
      grad_h.value_or(Tensor()),
      grad_c.value_or(Tensor()),
      input,
      h,
      weights,
      activations,
      output_mask);
}

std::tuple<Tensor, Tensor, Tensor> sequence_op(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  const CUDAGuard guard(input.device());
  auto [output, h_n, c_n, activations] =
      stepwise_forward({input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/false});
  return {output, h_n, c_n};
}

ForwardResult sequence_forward_op(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  const CUDAGuard guard(input.device());
  return stepwise_forward({input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true});
}

Gradients sequence_backward_op(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_h_n,
    const std::optional<Tensor>& grad_c_n,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& weights,
    const Tensor& output,
    const Tensor& activations,
    const std::optional<Tensor>& batch_sizes,
    bool reverse,
    std::array<bool, 5> output_mask) {
  check_sequence_backward(
      grad_output, grad_h_n, grad_c_n, input, h_0, weights, output, activations, batch_sizes);
  const CUDAGuard guard(input.device());
  const Tensor none;
  return stepwise_backward(
      {grad_output.has_value() ? *grad_output : none,
       grad_h_n.has_value() ? *grad_h_n : none,
       grad_c_n.has_value() ? *grad_c_n : none,
       input,
       h_0,
       weights,
       output,
       activations,
       batch_sizes,
       reverse,
       output_mask});
}

}  // namespace

// prepack and sequence_prepacked: the composite ones serve, which call these.
TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("cell", TORCH_FN(cell_op));
  m.impl("cell_forward", TORCH_FN(cell_forward_op));
  m.impl("cell_backward", TORCH_FN(cell_backward_op));
  m.impl("sequence", TORCH_FN(sequence_op));
  m.impl("sequence_forward", TORCH_FN(sequence_forward_op));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_op));
}

}  // namespace lltm::cuda
