// What engines call c begins with h where a cell reads h element by element (cell.h). Backends and
// the composite path compute with that; what a user sees is set right here.
#pragma once

#include "common/operator_args.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <utility>
#include <vector>

namespace lltm {

// h (rows, H), and what engines call c, of the rows that start anew where `mask` (rows) is true.
inline at::Tensor restarted_h(const at::Tensor& h, const at::Tensor& mask) {
  return h.masked_fill(mask.unsqueeze(1), 0);
}
inline at::Tensor restarted_c(const CellInfo& cell, const at::Tensor& c, const at::Tensor& mask) {
  std::vector<at::Tensor> states = c.chunk(cell.state_columns(), 1);
  for (int k = 0; k < cell.state_columns(); ++k) {
    states[k] = states[k].masked_fill(mask.unsqueeze(1), first_value(cell, k));
  }
  return states.size() == 1 ? states.front() : at::cat(states, 1);
}

// h (rows, H) as the GEMM of a step reads it, with the recurrent mask of a sequence; of the
// gradient of that operand, that of h.
inline at::Tensor masked_h(const at::Tensor& h, const at::Tensor& recurrent_mask) {
  return recurrent_mask.defined() ? h * recurrent_mask.narrow_symint(0, 0, h.sym_size(0)) : h;
}

// Results whose c' or c_n, the one before the last, is the user's: without h, or empty.
template <typename Args, typename Results>
Results with_own_c(const Args& args, Results results) {
  if (!args.cell->reads_h) return results;
  at::Tensor& c = std::get<std::tuple_size_v<Results> - 2>(results);
  const c10::SymInt hidden = std::get<0>(results).sym_size(-1);
  c = args.cell->has_c() ? c.slice_symint(1, hidden).contiguous()
                         : at::empty({0}, args.input.options());
  return results;
}

// backward(args), where the gradient of h has two parts, and c and its gradient begin with h.
template <typename Args, typename Backward>
Gradients with_grad_of_h(const Args& args, const Backward& backward) {
  if (!args.cell->reads_h) return backward(args);
  Args changed = args;
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = changed.output_mask;
  const bool want_c = c;
  c = h || want_c;
  const at::Tensor& given = args.grad_of_c();
  at::Tensor with_h;
  if (args.cell->has_c() && given.defined()) {
    with_h = at::cat({at::zeros_like(args.state_h()), given}, 1);
  }
  changed.grad_of_c() = with_h;
  Gradients gradients = backward(changed);
  at::Tensor& grad_c = std::get<2>(gradients);
  if (h) {
    const c10::SymInt hidden = args.state_h().sym_size(1);
    at::Tensor& grad_h = std::get<1>(gradients);
    grad_h = at::add(grad_h, args.cell->has_c() ? grad_c.slice_symint(1, 0, hidden) : grad_c);
  }
  grad_c = want_c && args.cell->has_c()
               ? grad_c.slice_symint(1, args.state_h().sym_size(1)).contiguous()
               : at::Tensor();
  return gradients;
}

}  // namespace lltm
