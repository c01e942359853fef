// How a step and a sequence are worked through on a GPU. Arguments are those of
// the operators in library.cpp, already checked; results are new contiguous
// tensors. Everything is queued on the current stream of the arguments' device,
// which must be the current device; nothing waits.
//
// The engine knows products.h and pointwise.h, and nothing of CUDA: the tests
// link it to host versions of the two and run its loop on the CPU.
#pragma once

#include "problem.h"

namespace lltm::cuda {

// engine_cell.cpp: one step. h', c', activations; the last is undefined unless
// asked for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cell_forward(
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& c,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    bool save);
Gradients cell_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_c,
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& weights,
    const at::Tensor& activations,
    std::array<bool, 5> wanted);

// What the pre-activations of a sequence take at a time, unless one step needs
// more: a part of what the second-level cache of a data-centre GPU holds, so that
// they hardly reach memory, and rows enough for a product to fill the machine.
constexpr int64_t kWorkspaceBytes = 32 << 20;

// engine_stepwise.cpp: a product and a pointwise kernel per step. It takes every
// dtype and size; an engine for some of them (one kernel for all steps that keeps
// the weights on the chip) stands beside it and is chosen in operators.cpp.
ForwardResult stepwise_forward(
    const ForwardProblem& problem, int64_t workspace_bytes = kWorkspaceBytes);
Gradients stepwise_backward(const BackwardProblem& problem);

}  // namespace lltm::cuda
