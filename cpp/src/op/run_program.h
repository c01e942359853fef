// Runs cell programs (cell/program.h) as ATen operations.
#pragma once

#include "common/operator_args.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <tuple>
#include <vector>

namespace lltm::aten_fallback {

// A stage's inputs and outputs (rows, H), in the order of its ports. `dtype` is the tensors'; see
// is_narrow. A mean has a column stride of 0, and a parameter is (H,). Outputs have contiguous
// columns, or are undefined.
struct StageCall {
  const CellInfo& cell;
  const Stage& stage;
  bool backward;
  at::ScalarType dtype;
  const at::Tensor& like;  // (rows, H)
  const std::vector<at::Tensor>&inputs, &outputs;
};
// Returns false if a device has no kernel for the stage. Empty: ATen operations only, which
// autograd can differentiate. With kernels, steps write to their own tensors in place.
using StageKernels = std::function<bool(const StageCall&)>;

// The outputs for inputs in a compute dtype.
std::vector<at::Tensor> run(
    const Program& program, std::vector<at::Tensor> inputs, const at::Tensor& like);

// Reads pre-activations (rows, S * H), c, and parameters (P * H), in the compute dtype or narrower.
// weight_h, in pre-activation order, is for products, which kernels add to `gates`. Results have
// c's dtype. h, c and, if `save`, the activations.
using StepResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

StepResult run_forward(
    const CellInfo& cell,
    const at::Tensor& gates,
    const at::Tensor& c,
    const at::Tensor& parameters,
    const at::Tensor& weight_h,
    bool save,
    const StageKernels& kernels = {});

// Gradients of pre-activations and parameters, (rows, (S + P) * H), and of c, not rounded.
std::tuple<at::Tensor, at::Tensor> run_backward(
    const CellInfo& cell,
    const at::Tensor& activations,
    const at::Tensor& grad_h,
    const at::Tensor& grad_c,
    const at::Tensor& parameters,
    const at::Tensor& weight_h,
    const StageKernels& kernels = {});

}  // namespace lltm::aten_fallback
