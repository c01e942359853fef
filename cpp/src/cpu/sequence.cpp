// lltm::sequence on the CPU: the glue of check, engine and results.
#include "check.h"
#include "cpu/engine.h"
#include "cpu/packed_weights.h"

#include <torch/library.h>

#include <cstdint>

namespace lltm::cpu {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  auto [output, h_n, c_n, activations] =
      run_forward({input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/false});
  return {output, h_n, c_n};
}

Tensor prepack_weights(const Tensor& weights) {
  check_prepack(weights);
  return prepack(weights);
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence_prepacked(input, h_0, c_0, weights, bias, batch_sizes);
  check_prepacked(weights, input, h_0);
  // Bytes that were read from a file may lie anywhere.
  const bool aligned = reinterpret_cast<std::uintptr_t>(weights.const_data_ptr()) % 64 == 0;
  const Tensor packed = aligned ? weights : weights.clone();
  auto [output, h_n, c_n, activations] =
      run_forward({input, h_0, c_0, packed, bias, batch_sizes, reverse, /*save=*/false});
  return {output, h_n, c_n};
}

ForwardResult sequence_forward(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  return run_forward({input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true});
}

Gradients sequence_backward(
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
  const Tensor none;
  return run_backward(
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

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("sequence", TORCH_FN(sequence));
  m.impl("prepack", TORCH_FN(prepack_weights));
  m.impl("sequence_prepacked", TORCH_FN(sequence_prepacked));
  m.impl("sequence_forward", TORCH_FN(sequence_forward));
  m.impl("sequence_backward", TORCH_FN(sequence_backward));
}

}  // namespace lltm::cpu
