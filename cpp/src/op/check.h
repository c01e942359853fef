// Argument checks for all backends, with symbolic sizes for compiled graphs with dynamic shapes.
#pragma once

#include "common/operator_args.h"

#include <optional>

namespace lltm {

// Also used for the operators that save activations, with the same messages. Messages name a single
// step and its arguments as lltm::step does.
void check(const SequenceArgs& args);
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

void check_prepack_int8(
    const at::Tensor& rows_ih,
    const at::Tensor& rows_hh,
    const at::Tensor& scales_ih,
    const at::Tensor& scales_hh);

void check_unpack(const CellName& cell, const at::Tensor& concatenated);

// Checks for the operators of external loops. Of the arguments, the first has only the weights and
// biases.
void check_sequence_operands(const SequenceInputs& args);
struct LoopStep {
  CellName cell;
  const at::Tensor &weight_h, &bias_h, &parameters, &reset, &recurrent_mask;
};
void check_sequence_step(
    const LoopStep& step, const at::Tensor& z_x, const at::Tensor& h, const at::Tensor& c);
void check_sequence_step_backward(
    const LoopStep& step,
    const at::Tensor& activations,
    const at::Tensor& dh,
    const at::Tensor& dc);
void check_sequence_gradients(
    const SequenceBackwardArgs& args,
    const at::Tensor& dz,
    const at::Tensor& dh,
    const at::Tensor& dc);

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
