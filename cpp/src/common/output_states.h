// States in the output: with outputs, (T, B, (1 + outputs) * H) has h and states of each step
// (cell.h).
#pragma once

#include "common/operator_args.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>

#include <vector>

namespace lltm {

// A row of the output: h (rows, H), and states of c.
inline at::Tensor with_output_states(
    const CellInfo& cell, const at::Tensor& h, const at::Tensor& c) {
  if (cell.outputs == 0) return h;
  std::vector<at::Tensor> columns = {h};
  const std::vector<at::Tensor> states = c.chunk(cell.state_columns(), 1);
  for (int k = 0; k < cell.outputs; ++k) columns.push_back(states[cell.output_states[k]]);
  return at::cat(columns, 1);
}

// Adds the gradient of the states in the output (rows, outputs * H), or undefined, to that of c.
inline at::Tensor add_grad_states(
    const CellInfo& cell, const at::Tensor& grad_c, const at::Tensor& grad_states) {
  if (!grad_states.defined()) return grad_c;
  std::vector<at::Tensor> states = grad_c.chunk(cell.state_columns(), 1);
  const std::vector<at::Tensor> gradients = grad_states.chunk(cell.outputs, 1);
  for (int k = 0; k < cell.outputs; ++k) {
    at::Tensor& state = states[cell.output_states[k]];
    state = at::add(state, gradients[k]);
  }
  return at::cat(states, 1);
}

// Divides the output and its gradient into parts of h and of states.
inline SequenceBackwardArgs with_divided_output(const SequenceBackwardArgs& args) {
  SequenceBackwardArgs changed = args;
  const c10::SymInt hidden = args.h_0->sym_size(1);
  changed.output = args.output->slice_symint(-1, 0, hidden);
  if (args.grad_output.defined()) {
    changed.grad_output = args.grad_output->slice_symint(-1, 0, hidden);
    changed.grad_states = args.grad_output->slice_symint(-1, hidden);
  }
  return changed;
}

}  // namespace lltm
