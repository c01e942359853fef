// Shapes and dtypes without data: fake tensors, torch.compile, the meta device.
#include "check.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

Tensor empty(const Tensor& like, std::vector<SymInt> shape) {
  return at::empty_symint(shape, like.options());
}

// Gradients are new contiguous tensors, whatever their tensors' strides.
Tensor grad(bool wanted, const Tensor& of) {
  return wanted ? empty(of, of.sym_sizes().vec()) : Tensor();
}

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const CellSizes s = check_cell(input, h, c, weights, bias);
  return {empty(input, {s.batch, s.hidden}), empty(input, {s.batch, s.hidden})};
}

std::tuple<Tensor, Tensor, Tensor> cell_forward(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const CellSizes s = check_cell(input, h, c, weights, bias);
  return {
      empty(input, {s.batch, s.hidden}),
      empty(input, {s.batch, s.hidden}),
      empty(input, {s.batch, s.hidden * 4})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cell_backward(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> output_mask) {
  const CellSizes s = check_cell_backward(grad_h, grad_c, input, h, weights, activations);
  return {
      grad(output_mask[0], input),
      grad(output_mask[1], h),
      grad(output_mask[2], h),
      grad(output_mask[3], weights),
      output_mask[4] ? empty(weights, {s.hidden * 3}) : Tensor()};
}

Tensor empty_output(const Tensor& input, const SymInt& hidden) {
  std::vector<SymInt> shape = input.sym_sizes().vec();
  shape.back() = hidden;
  return empty(input, std::move(shape));
}

// output, h_n, c_n.
std::tuple<Tensor, Tensor, Tensor> sequence_results(const Tensor& input, const SequenceSizes& s) {
  return {
      empty_output(input, s.hidden),
      empty(input, {s.batch, s.hidden}),
      empty(input, {s.batch, s.hidden})};
}

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool /*reverse*/) {
  return sequence_results(input, check_sequence(input, h_0, c_0, weights, bias, batch_sizes));
}

// What prepack gives depends on the machine that it runs on.
Tensor prepack(const Tensor& weights) {
  check_prepack(weights);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "lltm::prepack: expected weights with data, got a tensor without any: pack them before a"
      " graph is traced, and outside the meta device");
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool /*reverse*/) {
  return sequence_results(
      input, check_sequence_prepacked(input, h_0, c_0, weights, bias, batch_sizes));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sequence_forward(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool /*reverse*/) {
  const SequenceSizes s = check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  return {
      empty_output(input, s.hidden),
      empty(input, {s.batch, s.hidden}),
      empty(input, {s.batch, s.hidden}),
      empty(input, {s.rows, s.hidden * 4})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sequence_backward(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_h_n,
    const std::optional<Tensor>& grad_c_n,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& weights,
    const Tensor& output,
    const Tensor& activations,
    const std::optional<Tensor>& batch_sizes,
    bool /*reverse*/,
    std::array<bool, 5> output_mask) {
  const SequenceSizes s = check_sequence_backward(
      grad_output, grad_h_n, grad_c_n, input, h_0, weights, output, activations, batch_sizes);
  return {
      grad(output_mask[0], input),
      grad(output_mask[1], h_0),
      grad(output_mask[2], h_0),
      grad(output_mask[3], weights),
      output_mask[4] ? empty(weights, {s.hidden * 3}) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("cell", TORCH_FN(cell));
  m.impl("cell_forward", TORCH_FN(cell_forward));
  m.impl("cell_backward", TORCH_FN(cell_backward));
  m.impl("sequence", TORCH_FN(sequence));
  m.impl("prepack", TORCH_FN(prepack));
  m.impl("sequence_prepacked", TORCH_FN(sequence_prepacked));
  m.impl("sequence_forward", TORCH_FN(sequence_forward));
  m.impl("sequence_backward", TORCH_FN(sequence_backward));
}

}  // namespace lltm
