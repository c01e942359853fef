// The sequence engine on the CPU: how the steps of one layer and direction are
// worked through. Arguments are those of the operators in library.cpp, already
// checked; results are new contiguous tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace lltm::cpu {

// (output, h_n, c_n, activations); activations is undefined unless `save`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> run_forward(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse,
    bool save);

// Gradients of input, h_0, c_0, weights, bias, where output_mask asks for them.
// A gradient that is undefined is zero.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> run_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_h_n,
    const at::Tensor& grad_c_n,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& weights,
    const at::Tensor& output,
    const at::Tensor& activations,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse,
    std::array<bool, 5> output_mask);

}  // namespace lltm::cpu
