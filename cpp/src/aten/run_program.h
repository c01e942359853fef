// Runs cell programs (cell/program.h) as ATen operations, which autograd can differentiate.
#pragma once

#include "common/operator_args.h"

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace lltm::aten_fallback {

// The outputs for inputs in a compute dtype.
std::vector<at::Tensor> run(
    const Program& program, std::vector<at::Tensor> inputs, const at::Tensor& like);

// Reads pre-activations (rows, S * H), c, and parameters (P * H), in the compute dtype or narrower.
// weight_h, in pre-activation order, is for products. Results have c's dtype. h, c and, if `save`,
// the activations.
using StepResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

StepResult run_forward(
    const CellInfo& cell,
    const at::Tensor& gates,
    const at::Tensor& c,
    const at::Tensor& parameters,
    const at::Tensor& weight_h,
    bool save);

// Gradients of pre-activations and parameters, (rows, (S + P) * H), and of c, not rounded.
std::tuple<at::Tensor, at::Tensor> run_backward(
    const CellInfo& cell,
    const at::Tensor& activations,
    const at::Tensor& grad_h,
    const at::Tensor& grad_c,
    const at::Tensor& parameters,
    const at::Tensor& weight_h);

}  // namespace lltm::aten_fallback
