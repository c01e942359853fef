#include "composite.h"

#include "check.h"
#include "steps.h"

#include <lltm/ops.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace lltm::composite {
namespace {

using at::Tensor;

struct Activations {
  Tensor i, o, g, tanh_c;
};

// X W^T + b.
Tensor project(const Tensor& X, const Tensor& weights, const std::optional<Tensor>& bias) {
  return at::linear(X, weights, bias);
}

// From the pre-activations (rows, 3H) and c (rows, H).
std::tuple<Tensor, Tensor, Activations> step(const Tensor& gates, const Tensor& c) {
  const auto z = gates.chunk(3, 1);
  Activations a;
  a.i = at::sigmoid(z[0]);
  a.o = at::sigmoid(z[1]);
  a.g = at::elu(z[2]);
  const Tensor c_next = c + a.i * a.g;
  a.tanh_c = at::tanh(c_next);
  return {a.o * a.tanh_c, c_next, a};
}

Tensor pack(const Activations& a) {
  return at::cat({a.i, a.o, a.g, a.tanh_c}, 1);
}

Activations unpack(const Tensor& activations) {
  const auto parts = activations.chunk(4, 1);
  return {parts[0], parts[1], parts[2], parts[3]};
}

// Gradients of the pre-activations (rows, 3H) and of c (rows, H).
std::tuple<Tensor, Tensor> step_backward(
    const Tensor& grad_h, const Tensor& grad_c, const Activations& a) {
  const Tensor dc = grad_c + grad_h * a.o * (1 - a.tanh_c * a.tanh_c);
  const Tensor dz_i = dc * a.g * (a.i * (1 - a.i));
  const Tensor dz_o = grad_h * a.tanh_c * (a.o * (1 - a.o));
  const Tensor dz_g = dc * a.i * at::where(a.g > 0, at::ones_like(a.g), a.g + 1);
  return {at::cat({dz_i, dz_o, dz_g}, 1), dc};
}

Tensor or_zeros(const std::optional<Tensor>& grad, const Tensor& like) {
  return grad.has_value() && grad->defined() ? *grad : at::zeros_like(like);
}

// weights (3H, H+I) as its parts for h, (3H, H), and for the input, (3H, I).
std::tuple<Tensor, Tensor> split_weights(const Tensor& weights) {
  const c10::SymInt hidden = weights.sym_size(0) / 3;
  const auto parts = weights.split_with_sizes_symint({hidden, weights.sym_size(1) - hidden}, 1);
  return {parts[0], parts[1]};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cell_forward(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  auto [h_next, c_next, activations] = step(project(at::cat({h, input}, 1), weights, bias), c);
  return {h_next, c_next, pack(activations)};
}

Gradients cell_backward(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> output_mask) {
  const auto [dz, dc] =
      step_backward(or_zeros(grad_h, h), or_zeros(grad_c, h), unpack(activations));
  const auto [weights_h, weights_x] = split_weights(weights);
  return {
      output_mask[0] ? at::matmul(dz, weights_x) : Tensor(),
      output_mask[1] ? at::matmul(dz, weights_h) : Tensor(),
      output_mask[2] ? dc : Tensor(),
      output_mask[3] ? at::matmul(dz.t(), at::cat({h, input}, 1)) : Tensor(),
      output_mask[4] ? dz.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sequence_forward(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  const int64_t hidden = h_0.size(1);
  const auto [weights_h, weights_x] = split_weights(weights);
  const Tensor projected = project(flat_rows(input), weights_x, bias);
  const std::vector<Step> steps = plan_steps(input, batch_sizes, reverse);

  Tensor h = h_0;
  Tensor c = c_0;
  std::vector<Tensor> outputs;
  std::vector<Tensor> activations;
  for (const auto [offset, rows] : steps) {
    const Tensor gates =
        projected.narrow(0, offset, rows) + at::matmul(h.narrow(0, 0, rows), weights_h.t());
    const auto [h_next, c_next, a] = step(gates, c.narrow(0, 0, rows));
    outputs.push_back(h_next);
    activations.push_back(pack(a));
    h = rows == h.size(0) ? h_next : at::cat({h_next, h.slice(0, rows)}, 0);
    c = rows == c.size(0) ? c_next : at::cat({c_next, c.slice(0, rows)}, 0);
  }
  if (steps.empty()) {
    // Of no rows, but derived from the arguments as all results are.
    const Tensor none = projected.narrow(1, 0, hidden);
    outputs.push_back(none);
    activations.push_back(at::cat({projected, none}, 1));
  }
  if (reverse) {
    std::reverse(outputs.begin(), outputs.end());
    std::reverse(activations.begin(), activations.end());
  }
  std::vector<int64_t> output_shape = input.sizes().vec();
  output_shape.back() = hidden;
  // clone: without steps, the final states are the initial ones, and an
  // operator must not return its arguments.
  return {
      at::cat(outputs, 0).view(output_shape),
      steps.empty() ? h.clone() : h,
      steps.empty() ? c.clone() : c,
      at::cat(activations, 0)};
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
  const int64_t hidden = h_0.size(1);
  const auto [weights_h, weights_x] = split_weights(weights);
  const Tensor x = flat_rows(input);
  const Tensor h_all = flat_rows(output);
  const Tensor dh_all = flat_rows(or_zeros(grad_output, output));
  const std::vector<Step> steps = plan_steps(input, batch_sizes, reverse);

  Tensor dh = or_zeros(grad_h_n, h_0);
  Tensor dc = or_zeros(grad_c_n, h_0);
  Tensor d_weights = at::zeros_like(weights);
  Tensor d_bias = weights.new_zeros({3 * hidden});
  std::vector<Tensor> dx(steps.size());
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    // The state that this step began with: what the step before left in the
    // rows it had, and the initial state in rows that begin here.
    Tensor h_prev = h_0.narrow(0, 0, rows);
    if (k > 0) {
      const int64_t carried = std::min(rows, steps[k - 1].rows);
      h_prev =
          at::cat({h_all.narrow(0, steps[k - 1].offset, carried), h_prev.slice(0, carried)}, 0);
    }
    const auto [dz, dc_prev] = step_backward(
        dh.narrow(0, 0, rows) + dh_all.narrow(0, offset, rows),
        dc.narrow(0, 0, rows),
        unpack(activations.narrow(0, offset, rows)));
    dh = at::cat({at::matmul(dz, weights_h), dh.slice(0, rows)}, 0);
    dc = at::cat({dc_prev, dc.slice(0, rows)}, 0);
    if (output_mask[0]) dx[k] = at::matmul(dz, weights_x);
    if (output_mask[3]) {
      d_weights = d_weights + at::matmul(dz.t(), at::cat({h_prev, x.narrow(0, offset, rows)}, 1));
    }
    if (output_mask[4]) d_bias = d_bias + dz.sum(0);
  }
  if (reverse) std::reverse(dx.begin(), dx.end());
  Tensor d_input;
  if (output_mask[0]) {
    d_input = steps.empty() ? at::zeros_like(input) : at::cat(dx, 0).view(input.sizes());
  }
  return {
      d_input,
      output_mask[1] ? dh : Tensor(),
      output_mask[2] ? dc : Tensor(),
      output_mask[3] ? d_weights : Tensor(),
      output_mask[4] ? d_bias : Tensor()};
}

std::vector<Tensor> forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const Tensor& old_h,
    const Tensor& old_cell) {
  check_pair_forward(input, weights, bias, old_h, old_cell);
  const Tensor X = at::cat({old_h, input}, 1);
  const Tensor gate_weights = project(X, weights, bias);
  const auto [new_h, new_cell, a] = step(gate_weights, old_cell);
  return {new_h, new_cell, a.i, a.o, a.g, X, gate_weights};
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
  const auto [dz, d_old_cell] = step_backward(
      grad_h, grad_cell, {input_gate, output_gate, candidate_cell, at::tanh(new_cell)});
  const Tensor dX = at::matmul(dz, weights);
  const int64_t hidden = new_cell.size(1);
  return {
      dX.narrow(1, 0, hidden), dX.slice(1, hidden), at::matmul(dz.t(), X), dz.sum(0), d_old_cell};
}

namespace {

// The operators of the dispatcher: checked, then computed.

std::tuple<Tensor, Tensor, Tensor> cell_forward_op(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  return cell_forward(input, h, c, weights, bias);
}

std::tuple<Tensor, Tensor> cell_op(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  auto [h_next, c_next, activations] = cell_forward(input, h, c, weights, bias);
  return {h_next, c_next};
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
  return cell_backward(grad_h, grad_c, input, h, weights, activations, output_mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sequence_forward_op(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  return sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse);
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
  auto [output, h_n, c_n, activations] =
      sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse);
  return {output, h_n, c_n};
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
  return sequence_backward(
      grad_output,
      grad_h_n,
      grad_c_n,
      input,
      h_0,
      weights,
      output,
      activations,
      batch_sizes,
      reverse,
      output_mask);
}

Tensor prepack_op(const Tensor& weights) {
  check_prepack(weights);
  return weights.clone(at::MemoryFormat::Contiguous);
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked_op(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  check_sequence_prepacked(input, h_0, c_0, weights, bias, batch_sizes);
  TORCH_CHECK(
      weights.scalar_type() == input.scalar_type(),
      "lltm::sequence_prepacked: expected weights prepacked on device ",
      input.device(),
      ", got some that were prepacked on the CPU");
  return sequence(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("prepack", TORCH_FN(prepack_op));
  m.impl("sequence_prepacked", TORCH_FN(sequence_prepacked_op));
  m.impl("cell", TORCH_FN(cell_op));
  m.impl("cell_forward", TORCH_FN(cell_forward_op));
  m.impl("cell_backward", TORCH_FN(cell_backward_op));
  m.impl("sequence", TORCH_FN(sequence_op));
  m.impl("sequence_forward", TORCH_FN(sequence_forward_op));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_op));
}

// Under torch.vmap every ATen operation has a rule of its own. The operators that
// users call: vmap.cpp.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl("cell_forward", TORCH_FN(cell_forward_op));
  m.impl("cell_backward", TORCH_FN(cell_backward_op));
  m.impl("sequence_forward", TORCH_FN(sequence_forward_op));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_op));
}

}  // namespace lltm::composite
