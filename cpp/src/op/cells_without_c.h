// A cell without c, such as the GRU, is one whose c is h (cell.h). Backends and the composite path
// compute every cell with a c; what a user sees of one without is set right here.
#pragma once

#include "op/operator_args.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace lltm {

// Results whose c' or c_n, the one before the last, is empty.
template <typename Args, typename Results>
Results without_c(const Args& args, Results results) {
  if (!args.cell->has_c) {
    constexpr size_t kC = std::tuple_size_v<Results> - 2;
    std::get<kC>(results) = at::empty({0}, args.input.options());
  }
  return results;
}

// backward(args), where the gradient of h holds that of c too.
template <typename Args, typename Backward>
Gradients with_c_in_h(const Args& args, const Backward& backward) {
  if (args.cell->has_c) return backward(args);
  Args both = args;
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = both.output_mask;
  c = h;
  both.grad_of_c() = at::Tensor();
  Gradients gradients = backward(both);
  if (h) std::get<1>(gradients) = at::add(std::get<1>(gradients), std::get<2>(gradients));
  std::get<2>(gradients) = at::Tensor();
  return gradients;
}

}  // namespace lltm
