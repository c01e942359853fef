#include "api/pair.h"

#include "aten/run_program.h"
#include "cell/lltm.h"
#include "op/check.h"

#include <ATen/Functions.h>
#include <torch/library.h>

namespace lltm::aten_fallback {

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
  const auto [new_h, new_cell, activations] = run_forward(
      *find_cell(Lltm::kCell.name),
      gate_weights,
      old_cell,
      /*parameters=*/{},
      /*weight_h=*/{},
      /*save=*/true);
  const std::vector<Tensor> saved = activations.chunk(Lltm::kSaved, 1);
  return {new_h, new_cell, saved[0], saved[1], saved[2], X, gate_weights};
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
  const Tensor activations =
      at::cat({input_gate, output_gate, candidate_cell, at::tanh(new_cell)}, 1);
  const auto [wide_dz, d_old_cell] = run_backward(
      *find_cell(Lltm::kCell.name),
      activations,
      grad_h,
      grad_cell,
      /*parameters=*/{},
      /*weight_h=*/{});
  const Tensor dz = wide_dz.to(X.scalar_type());
  const Tensor dX = at::matmul(dz, weights);
  const int64_t hidden = new_cell.size(1);
  return {
      dX.narrow(1, 0, hidden),
      dX.slice(1, hidden),
      at::matmul(dz.t(), X),
      dz.sum(0),
      d_old_cell.to(X.scalar_type())};
}

}  // namespace lltm::aten_fallback

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_pair_forward", lltm::aten_fallback::forward);
  m.impl("_pair_backward", lltm::aten_fallback::backward);
}
