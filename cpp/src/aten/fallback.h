// The ATen fallback: the cell in ATen operations, which autograd and transforms can differentiate
// and map. Writes nothing in place and keeps symbolic sizes. Like the kernels, it rounds each
// step's states, the activations and the gradients to float16 or bfloat16. Does not check
// arguments.
#pragma once

#include "aten/run_program.h"
#include "common/operator_args.h"
#include "common/step_io.h"

#include <tuple>

namespace lltm::aten_fallback {

SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// The parts of both, for a loop over steps in a decomposition.

// Weights in the compute dtype and pre-activation order. Biases and parameters may be undefined.
struct Operands {
  explicit Operands(const SequenceInputs& args);
  // Without an input projection.
  Operands(
      const CellInfo& of,
      const at::Tensor& weight_h,
      const at::Tensor& bias_h,
      const at::Tensor& parameters)
      : cell(of), weight_h(weight_h), bias_h(bias_h), parameters(parameters) {}

  const CellInfo& cell;
  at::Tensor weight_x, weight_h, bias_x, bias_h;
  at::Tensor parameters;  // (P * H)
};

// From the input projection z_x.
StepResult forward_of_step(
    const Operands& operands,
    const at::Tensor& z_x,
    const at::Tensor& h,
    const at::Tensor& c,
    const StepIO& io,
    bool save);

// Gradients of pre-activations and parameters, (rows, (S + P) * H), and of the previous h and c,
// not rounded.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_of_step(
    const Operands& operands,
    const at::Tensor& activations,
    const at::Tensor& dh,
    const at::Tensor& dc,
    const StepIO& io);

// From dz of all rows and the gradients of the initial states.
Gradients gradients_of(
    const SequenceBackwardArgs& args,
    const Operands& operands,
    const at::Tensor& dz,
    const at::Tensor& dh,
    const at::Tensor& dc);

}  // namespace lltm::aten_fallback
