// Argument checks for all backends, with symbolic sizes for compiled graphs with dynamic shapes.
#pragma once

#include "common/operator_args.h"

#include <optional>

namespace lltm {

// Also used for the operators that save activations, with the same messages.
void check(const StepArgs& args);
void check(const SequenceArgs& args);
void check(const StepBackwardArgs& args);
void check(const SequenceBackwardArgs& args);

// Checks the values of batch_sizes against the rows of an input on `device`. If h_0 is given,
// `batch` is its batch size. On the meta device, batch_sizes has no values.
void check_batch_sizes(
    const char* where,
    const at::Tensor& batch_sizes,
    const std::optional<c10::SymInt>& batch,
    const c10::SymInt& rows,
    const at::Device& device);

// Any layout, or undefined.
void check_reset(const char* where, const at::Tensor& input, const at::Tensor& reset);

// H and I are arbitrary. The dtype must be qint8 (quantizes) or omitted.
void check_prepack(
    const CellName& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

// Checks for pair.h. `states` are grad_h, grad_cell, new_cell, input_gate, output_gate and
// candidate_cell, (B, H) each.
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
