#include "api/pair.h"

#include "cell/lltm.h"
#include "op/check.h"
#include "op/tensor_value.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace lltm::composite {

using at::Tensor;

std::vector<Tensor> forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const Tensor& old_h,
    const Tensor& old_cell) {
  check_pair_forward(input, weights, bias, old_h, old_cell);
  const Tensor X = at::cat({old_h, input}, 1);
  const Tensor gate_weights = at::linear(X, weights, bias);
  const std::vector<Tensor> z = gate_weights.chunk(Lltm::kSlots, 1);
  const auto [new_h, new_cell, saved] = Lltm::forward<Value>({{z[0]}, {z[1]}, {z[2]}}, {old_cell});
  const auto& [input_gate, output_gate, candidate_cell, tanh_c] = saved;
  return {
      new_h.tensor,
      new_cell.tensor,
      input_gate.tensor,
      output_gate.tensor,
      candidate_cell.tensor,
      X,
      gate_weights};
}

std::vector<Tensor> backward(
    const Tensor& grad_h,
    const Tensor& grad_cell,
    const Tensor& new_cell,
    const Tensor& input_gate,
    const Tensor& output_gate,
    const Tensor& candidate_cell,
    const Tensor& X,
    const Tensor& gate_weights,
    const Tensor& weights) {
  check_pair_backward(
      {grad_h, grad_cell, new_cell, input_gate, output_gate, candidate_cell},
      X,
      gate_weights,
      weights);
  const auto [dz_gates, d_old_cell] = Lltm::backward<Value>(
      {{input_gate}, {output_gate}, {candidate_cell}, {at::tanh(new_cell)}}, {grad_h}, {grad_cell});
  const auto& [dz_i, dz_o, dz_g] = dz_gates;
  const Tensor dz = at::cat({dz_i.tensor, dz_o.tensor, dz_g.tensor}, 1);
  const Tensor dX = at::matmul(dz, weights);
  const int64_t hidden = new_cell.size(1);
  return {
      dX.narrow(1, 0, hidden),
      dX.slice(1, hidden),
      at::matmul(dz.t(), X),
      dz.sum(0),
      d_old_cell.tensor};
}

}  // namespace lltm::composite

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_pair_forward", lltm::composite::forward);
  m.impl("_pair_backward", lltm::composite::backward);
}
