// Converts between the engines' c (cell.h), which the ATen fallback shares, and the user's c, which
// never begins with h.
#pragma once

#include "common/step_io.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

namespace lltm {

template <typename Inputs>
void join_states(Inputs& args) {
  if (!args.cell->reads_h) return;
  const at::Tensor& h = args.state_h();
  args.state_c() = args.cell->has_c() ? at::cat({h, args.state_c()}, 1) : h;
}

// forward uses the engines' c. Its last result but one, c' or c_n, becomes the user's.
template <typename Args, typename Forward>
auto with_own_c(const Args& args, const Forward& forward) {
  if (!args.cell->reads_h) return forward(args);
  Args changed = args;
  join_states(changed);
  auto results = forward(changed);
  at::Tensor& c = std::get<std::tuple_size_v<decltype(results)> - 2>(results);
  c = args.cell->has_c() ? c.slice_symint(1, args.state_h()->sym_size(1)).contiguous()
                         : at::empty({0}, args.input->options());
  return results;
}

// backward uses the engines' c and its gradient, and the parts of the output; the two parts of the
// gradient of h are added.
template <typename Args, typename Backward>
Gradients with_grad_of_h(const Args& args, const Backward& backward) {
  if constexpr (requires { args.grad_states; }) {
    if (args.cell->outputs > 0 && args.output->sym_size(-1) != args.h_0->sym_size(1)) {
      return with_grad_of_h(with_divided_output(args), backward);
    }
  }
  if (!args.cell->reads_h) return backward(args);
  const bool has_c = args.cell->has_c();
  const at::Tensor& state = args.state_h();
  Args changed = args;
  join_states(changed);
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = changed.output_mask;
  const bool want_c = c && has_c;
  c = h || c;
  OptionalTensor& given = changed.grad_of_c();
  given = has_c && given.defined() ? at::cat({at::zeros_like(state), given}, 1) : at::Tensor();
  Gradients gradients = backward(changed);
  auto& [d_input, d_h, d_c, d_weight_ih, d_weight_hh, d_bias_ih, d_bias_hh] = gradients;
  const c10::SymInt hidden = state.sym_size(1);
  if (h) d_h = at::add(d_h, has_c ? d_c.slice_symint(1, 0, hidden) : d_c);
  d_c = want_c ? d_c.slice_symint(1, hidden).contiguous() : at::Tensor();
  return gradients;
}

}  // namespace lltm
