// Everything that enters or leaves a step in addition to input, weights and states:
//
//   argument          enters                                       leaves
//   reset             h is zero and c initial, where it is true
//   recurrent_mask    multiplies h in the recurrent GEMM
//   given gates       columns of the input, added to z
//   checkpoint_steps  c is stored before every n-th step
//   outputs                                                        h', and states of c'
//
// Backward has their transposes, from the last to the first. StepIO computes on tensors. In the CPU
// engines, threads compute on their rows and units: cpu/engine/step_io.h.
#pragma once

#include "common/checkpoints.h"
#include "common/operator_args.h"
#include "common/tensor_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm {

// Masks h (rows, H) before the recurrent GEMM, or the gradient of its operand.
inline at::Tensor masked_h(const at::Tensor& h, const at::Tensor& recurrent_mask) {
  return recurrent_mask.defined() ? h * recurrent_mask.narrow_symint(0, 0, h.sym_size(0)) : h;
}

class StepIO {
 public:
  // reset is (rows) and recurrent_mask (at least rows, H), or undefined.
  explicit StepIO(
      const CellInfo& cell, const at::Tensor& reset = {}, at::Tensor recurrent_mask = {})
      : cell_(cell),
        reset_(reset.defined() ? reset.unsqueeze(1) : reset),
        mask_(std::move(recurrent_mask)) {}
  // Batch elements [first, rows) of a step.
  StepIO(const SequenceInputs& args, const Step& step, int64_t first = 0);

  // h (rows, H) for the recurrent GEMM, or the gradient of h from that of the GEMM's operand.
  at::Tensor enter_h(const at::Tensor& h) const { return cut(masked_h(h, mask_)); }
  at::Tensor enter_c(const at::Tensor& c) const;
  // A row of the output.
  at::Tensor leave(const at::Tensor& h, const at::Tensor& c) const;

  // Adds the gradient of the states in the output (rows, outputs * H), or undefined, to that of c'.
  at::Tensor leave_backward(const at::Tensor& grad_c, const at::Tensor& grad_states) const;
  at::Tensor enter_backward_c(const at::Tensor& grad_c) const { return cut(grad_c); }

  // In place, in larger buffers of which the first rows and columns change.
  void enter_h_in_place(const at::Tensor& h) const;
  void enter_in_place(const at::Tensor& h, const at::Tensor& c) const;
  void enter_backward_in_place(const at::Tensor& grad_h, const at::Tensor& grad_c) const;

 private:
  at::Tensor cut(const at::Tensor& state) const {
    return reset_.defined() ? state.masked_fill(reset_, 0) : state;
  }

  const CellInfo& cell_;
  at::Tensor reset_, mask_;  // (rows, 1), (at least rows, H)
};

// h (rows, H) as the recurrent GEMMs of steps [first, last) read it, in the order of input rows.
at::Tensor entering_h(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    size_t first,
    size_t last,
    at::ScalarType dtype);
// Of all steps, in the compute dtype, also for differentiable and symbolic arguments.
at::Tensor entering_h(const SequenceBackwardArgs& args);

// The first argument that changes the states between steps, for logs, or null.
inline const char* changes_states(const SequenceInputs& args) {
  if (args.reset.defined()) return "reset is given";
  return args.recurrent_mask.defined() ? "recurrent_mask is given" : nullptr;
}

// The tensors that forward returns, except h_n and c_n.
struct ForwardResults {
  ForwardResults(const SequenceArgs& args, size_t steps);

  // The output's columns of h (N, H).
  at::Tensor output_h() const { return flat_rows(output).narrow(1, 0, hidden); }
  at::Tensor checkpoint(size_t k) const {
    return checkpoints.select(0, static_cast<int64_t>(k) / every);
  }
  void save_checkpoint(size_t k, const at::Tensor& c) const {
    if (has_checkpoint(k, every)) checkpoint(k).copy_(c);
  }
  // Of a step.
  void leave_states(const Step& step, const at::Tensor& c) const;
  const at::Tensor& saved() const { return every > 0 ? checkpoints : activations; }

  const CellInfo& cell;
  at::TensorOptions options;
  int64_t hidden, every;   // steps between checkpoints, or 0
  at::Tensor output;       // (T, B, (1 + outputs) * H), or packed
  at::Tensor activations;  // (N, saved * H), or undefined
  at::Tensor checkpoints;  // (ceil(T / every), B, columns of c), or undefined
};

// Copies states of c' (rows, .) to the output's rows (rows, (1 + outputs) * H), after h'.
void leave_states(const CellInfo& cell, const at::Tensor& c, const at::Tensor& output_rows);
// Adds the gradient of the states in the output (rows, outputs * H) to the first rows of that of
// c'.
void leave_states_backward(
    const CellInfo& cell, const at::Tensor& grad_states, const at::Tensor& grad_c);

// Divides the output and its gradient into parts of h and of states.
SequenceBackwardArgs with_divided_output(const SequenceBackwardArgs& args);

}  // namespace lltm
