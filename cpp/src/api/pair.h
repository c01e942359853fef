// The low-level functions lltm._C.forward and backward: one step of the LLTM in ATen operations.
// Only the LLTM has them. forward returns everything that backward needs.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace lltm::aten_fallback {

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

}  // namespace lltm::aten_fallback
