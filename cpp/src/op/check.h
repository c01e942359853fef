// The checks on operator arguments: one set for all backends (backend.h), so that Python, C++
// and torch.ops see the same errors.
//
// Sizes are symbolic, so that the same checks serve compiled graphs with dynamic shapes.
#pragma once

#include "common/operator_args.h"

#include <string>

namespace lltm {

// For step and sequence, and for their training forms step_forward and sequence_forward: error
// messages do not tell them apart.
void check_step(const StepInputs& args);
void check_sequence(const SequenceArgs& args);

void check_step_backward(const StepBackwardArgs& args);
void check_sequence_backward(const SequenceBackwardArgs& args);

// Of a sequence with this input, in any layout of its rows; an undefined mask passes. `op` begins
// the messages.
void check_reset(const std::string& op, const at::Tensor& input, const at::Tensor& reset);

// Weights of any H and I; the dtype to quantise them to is qint8, or none.
void check_prepack(
    const CellName& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

// The low-level pair of pair.h. `states` are grad_h, grad_cell, new_cell, input_gate,
// output_gate, candidate_cell, each (B, H).
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
