// An operator's call as a call of a backend, and the results back: the engines' c (cell.h) instead
// of the user's, which never begins with h; the parts of the output; gradients, which backends need
// not round; a step, whose output is empty.
#pragma once

#include "common/device.h"
#include "common/step_io.h"
#include "common/tensor_views.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

namespace lltm {

// (0,), without the dispatcher if possible: noticeable in a step.
inline at::Tensor empty_small(const at::Tensor& like) {
  return like.is_cpu() && is_unwrapped(like) ? new_tensor({0}, like.options())
                                             : at::empty({0}, like.options());
}

inline void concatenate_states(SequenceInputs& args) {
  if (!args.cell->reads_h) return;
  const at::Tensor& h = args.h_0;
  args.c_0 = args.cell->has_c() ? at::cat({h, args.c_0}, 1) : h;
}

// forward uses the engines' c. c_n becomes the user's, and the output of a step empty.
template <typename Forward>
SequenceResult call_forward(const SequenceArgs& args, const Forward& forward) {
  const auto run = [&](const SequenceArgs& changed) {
    SequenceResult results = forward(changed);
    if (args.is_step()) std::get<0>(results) = empty_small(args.input);
    return results;
  };
  if (!args.cell->reads_h) return run(args);
  SequenceArgs changed = args;
  concatenate_states(changed);
  SequenceResult results = run(changed);
  at::Tensor& c = std::get<2>(results);
  c = args.cell->has_c() ? c.slice_symint(1, args.h_0->sym_size(1)).contiguous()
                         : empty_small(args.input);
  return results;
}

// backward uses the engines' c and its gradient; the two parts of the gradient of h are added.
template <typename Backward>
Gradients with_engines_c(const SequenceBackwardArgs& args, const Backward& backward) {
  if (!args.cell->reads_h) return backward(args);
  const bool has_c = args.cell->has_c();
  const at::Tensor& state = args.h_0;
  SequenceBackwardArgs changed = args;
  concatenate_states(changed);
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = changed.output_mask;
  const bool want_c = c && has_c;
  c = h || c;
  OptionalTensor& grad_c = changed.grad_c_n;
  grad_c = has_c && grad_c.defined() ? at::cat({at::zeros_like(state), grad_c}, 1) : at::Tensor();
  Gradients gradients = backward(changed);
  auto& [d_input, d_h, d_c, d_weight_ih, d_weight_hh, d_bias_ih, d_bias_hh] = gradients;
  const c10::SymInt hidden = state.sym_size(1);
  if (h) d_h = at::add(d_h, has_c ? d_c.slice_symint(1, 0, hidden) : d_c);
  d_c = want_c ? d_c.slice_symint(1, hidden).contiguous() : at::Tensor();
  return gradients;
}

// Also divides the output and its gradient into their parts, and rounds the gradients to the dtype
// of the arguments. A step has no output: backends read a tensor of h.
template <typename Backward>
Gradients call_backward(const SequenceBackwardArgs& args, const Backward& backward) {
  const auto run = [&] {
    if (args.is_step()) {
      SequenceBackwardArgs step = args;
      step.output = *args.h_0;
      step.grad_output = at::Tensor();
      return with_engines_c(step, backward);
    }
    return args.cell->outputs > 0 ? with_engines_c(with_divided_output(args), backward)
                                  : with_engines_c(args, backward);
  };
  Gradients gradients = run();
  const at::ScalarType dtype = args.input->scalar_type();
  const auto round = [&](at::Tensor& gradient) {
    if (gradient.defined() && gradient.scalar_type() != dtype) gradient = gradient.to(dtype);
  };
  std::apply([&](auto&... each) { (round(each), ...); }, gradients);
  return gradients;
}

}  // namespace lltm
