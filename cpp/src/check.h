// The checks on operator arguments: one set, made by every backend below the
// dispatcher, so that Python, C++ and torch.ops see the same errors.
//
// Sizes are symbolic, so that the same checks serve compiled graphs with
// dynamic shapes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>

namespace lltm {

struct CellSizes {
  c10::SymInt batch, input, hidden;
};

// Rows is T * B, or N when packed.
struct SequenceSizes {
  c10::SymInt steps, batch, rows, input, hidden;
};

// For cell and for its training form cell_forward, which users meet as `cell`.
CellSizes check_cell(
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& c,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias);

CellSizes check_cell_backward(
    const std::optional<at::Tensor>& grad_h,
    const std::optional<at::Tensor>& grad_c,
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& weights,
    const at::Tensor& activations);

// For sequence and its training form sequence_forward.
SequenceSizes check_sequence(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& batch_sizes);

// Weights (3H, H+I) of any H and I.
void check_prepack(const at::Tensor& weights);

// As check_sequence; prepacked weights must be a tensor of the device, and
// weights that are not packed, of the shape that h_0 and input ask for.
SequenceSizes check_sequence_prepacked(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& batch_sizes);

SequenceSizes check_sequence_backward(
    const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_h_n,
    const std::optional<at::Tensor>& grad_c_n,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& weights,
    const at::Tensor& output,
    const at::Tensor& activations,
    const std::optional<at::Tensor>& batch_sizes);

// The low-level pair of composite.h. `states` are grad_h, grad_cell, new_cell,
// input_gate, output_gate, candidate_cell, each (B, H).
void check_pair_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell);

void check_pair_backward(
    const std::array<at::Tensor, 6>& states,
    const at::Tensor& X,
    const at::Tensor& gate_weights,
    const at::Tensor& weights);

}  // namespace lltm
