#include "common/step_io.h"

#include "common/tensor_views.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/nonzero.h>

#include <algorithm>

namespace lltm {

using at::Tensor;

StepIO::StepIO(const SequenceInputs& args, const Step& step, int64_t first) : cell_(*args.cell) {
  const int64_t rows = step.rows - first;
  if (args.reset.defined()) {
    reset_ = args.reset->reshape(-1).narrow(0, step.offset + first, rows).unsqueeze(1);
  }
  if (args.recurrent_mask.defined()) mask_ = args.recurrent_mask->narrow(0, first, rows);
}

Tensor StepIO::enter_c(const Tensor& c) const {
  if (!reset_.defined()) return c;
  std::vector<Tensor> states = c.chunk(cell_.state_columns(), 1);
  for (int k = 0; k < cell_.state_columns(); ++k) {
    states[k] = states[k].masked_fill(reset_, first_value(cell_, k));
  }
  return states.size() == 1 ? states.front() : at::cat(states, 1);
}

Tensor StepIO::leave(const Tensor& h, const Tensor& c) const {
  if (cell_.outputs == 0) return h;
  std::vector<Tensor> columns = {h};
  const std::vector<Tensor> states = c.chunk(cell_.state_columns(), 1);
  for (int n = 0; n < cell_.outputs; ++n) columns.push_back(states[cell_.output_states[n]]);
  return at::cat(columns, 1);
}

Tensor StepIO::leave_backward(const Tensor& grad_c, const Tensor& grad_states) const {
  if (!grad_states.defined()) return grad_c;
  std::vector<Tensor> states = grad_c.chunk(cell_.state_columns(), 1);
  const std::vector<Tensor> gradients = grad_states.chunk(cell_.outputs, 1);
  for (int n = 0; n < cell_.outputs; ++n) {
    Tensor& state = states[cell_.output_states[n]];
    state = at::add(state, gradients[n]);
  }
  return at::cat(states, 1);
}

void StepIO::enter_h_in_place(const Tensor& h) const {
  if (mask_.defined()) h.narrow(0, 0, mask_.size(0)).narrow(1, 0, mask_.size(1)).mul_(mask_);
  if (reset_.defined()) h.narrow(0, 0, reset_.size(0)).masked_fill_(reset_, 0);
}

void StepIO::enter_in_place(const Tensor& h, const Tensor& c) const {
  enter_h_in_place(h);
  if (!reset_.defined()) return;
  const std::vector<Tensor> states = c.narrow(0, 0, reset_.size(0)).chunk(cell_.state_columns(), 1);
  for (int k = 0; k < cell_.state_columns(); ++k) {
    states[k].masked_fill_(reset_, first_value(cell_, k));
  }
}

void StepIO::enter_backward_in_place(const Tensor& grad_h, const Tensor& grad_c) const {
  enter_h_in_place(grad_h);
  if (reset_.defined()) grad_c.narrow(0, 0, reset_.size(0)).masked_fill_(reset_, 0);
}

Tensor entering_h(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    size_t first,
    size_t last,
    at::ScalarType dtype) {
  const Tensor output_rows = flat_rows(args.output);
  std::vector<Tensor> pieces;
  for (const auto [row, source, count, initial] : states_before(steps, first, last)) {
    pieces.push_back((initial ? *args.h_0 : output_rows).narrow(0, source, count));
  }
  Tensor states = (pieces.size() == 1 ? pieces[0] : at::cat(pieces)).to(dtype);
  if (args.recurrent_mask.defined()) {
    std::vector<Tensor> masks;
    for (size_t k = first; k < last; ++k) {
      masks.push_back(args.recurrent_mask->narrow(0, 0, steps[k].rows));
    }
    if (args.reverse) std::reverse(masks.begin(), masks.end());
    states = (states * at::cat(masks)).to(dtype);
  }
  if (!args.reset.defined()) return states;
  const int64_t begin = std::min(steps[first].offset, steps[last - 1].offset);
  const Tensor reset = args.reset->reshape(-1).narrow(0, begin, states.size(0));
  // Fills only the rare reset rows. Elsewhere, finding them would synchronize, or is not mapped.
  if (!states.is_cpu() || !reset.has_storage()) return states.masked_fill(reset.unsqueeze(1), 0);
  const Tensor rows = reset.nonzero().squeeze(1);
  return rows.numel() == 0 ? states : states.index_fill(0, rows, 0);
}

Tensor entering_h(const SequenceBackwardArgs& args) {
  const at::ScalarType dtype = compute_dtype(args.output->scalar_type());
  if (args.batch_sizes.defined()) {
    const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
    if (steps.empty()) return args.output->to(dtype);
    return entering_h(args, steps, 0, steps.size(), dtype);
  }
  const Tensor first = args.h_0->unsqueeze(0);
  const Tensor h = args.reverse ? at::cat({args.output->slice(0, 1), first})
                                : at::cat({first, args.output->slice(0, 0, -1)});
  // Without steps, this also removes h_0.
  Tensor read = h.slice_symint(0, 0, args.output->sym_size(0)).to(dtype);
  if (args.recurrent_mask.defined()) read = read * args.recurrent_mask;
  if (args.reset.defined()) read = read.masked_fill(args.reset->unsqueeze(-1), 0);
  return flat_rows(read);
}

ForwardResults::ForwardResults(const SequenceArgs& args, size_t steps)
    : cell(*args.cell),
      options(args.input->options()),
      hidden(args.h_0->size(1)),
      every(args.saved_checkpoint_steps()) {
  output = empty_large(output_sizes(args.input, cell.output_columns() * hidden), options);
  if (args.saves_activations()) {
    activations = empty_large({flat_size(args.input), cell.saved * hidden}, options);
  }
  if (every > 0) {
    const int64_t count = checkpoint_count(static_cast<int64_t>(steps), every);
    checkpoints = at::empty({count, args.c_0->size(0), args.c_0->size(1)}, args.c_0->options());
  }
}

void ForwardResults::leave_states(const Step& step, const Tensor& c) const {
  if (cell.outputs == 0) return;
  const Tensor rows = flat_rows(output).narrow(0, step.offset, step.rows);
  lltm::leave_states(cell, c.narrow(0, 0, step.rows), rows);
}

void leave_states(const CellInfo& cell, const Tensor& c, const Tensor& output_rows) {
  const int64_t hidden = output_rows.size(1) / cell.output_columns();
  for (int n = 0; n < cell.outputs; ++n) {
    output_rows.narrow(1, (1 + n) * hidden, hidden)
        .copy_(c.narrow(1, cell.output_states[n] * hidden, hidden));
  }
}

void leave_states_backward(const CellInfo& cell, const Tensor& grad_states, const Tensor& grad_c) {
  const int64_t hidden = grad_states.size(1) / cell.outputs;
  const Tensor rows = grad_c.narrow(0, 0, grad_states.size(0));
  for (int n = 0; n < cell.outputs; ++n) {
    rows.narrow(1, cell.output_states[n] * hidden, hidden)
        .add_(grad_states.narrow(1, n * hidden, hidden));
  }
}

SequenceBackwardArgs with_divided_output(const SequenceBackwardArgs& args) {
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
