// The cell in plain ATen operations: the path of any device without kernels
// of its own, and, because ATen can differentiate and vectorise it any number
// of times, of double backward, forward mode and function transforms.
//
// Shapes as in lltm/ops.h. No argument is checked here.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace lltm::composite {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// One step: (h', c', activations). See library.cpp for the activations.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cell_forward(
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& c,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias);

/// Gradients of input, h, c, weights, bias; those not wanted are undefined.
Gradients cell_backward(
    const std::optional<at::Tensor>& grad_h,
    const std::optional<at::Tensor>& grad_c,
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& weights,
    const at::Tensor& activations,
    std::array<bool, 5> output_mask);

/// A sequence: (output, h_n, c_n, activations).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sequence_forward(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse);

Gradients sequence_backward(
    const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_h_n,
    const std::optional<at::Tensor>& grad_c_n,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& weights,
    const at::Tensor& output,
    const at::Tensor& activations,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse,
    std::array<bool, 5> output_mask);

/// The low-level pair that the Python module exposes.
///
/// @returns new_h, new_cell, input_gate, output_gate, candidate_cell (B, H),
///          X (B, H+I), gate_weights (B, 3H): the pre-activations
LLTM_API std::vector<at::Tensor> forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell);

/// @returns d_old_h (B, H), d_input (B, I), d_weights (3H, H+I), d_bias (3H),
///          d_old_cell (B, H)
LLTM_API std::vector<at::Tensor> backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& input_gate,
    const at::Tensor& output_gate,
    const at::Tensor& candidate_cell,
    const at::Tensor& X,
    const at::Tensor& gate_weights,
    const at::Tensor& weights);

}  // namespace lltm::composite
