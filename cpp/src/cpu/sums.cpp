#include "cpu/sums.h"

#include "cpu/dispatch.h"
#include "cpu/memory.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

Tensor final_states(const std::vector<Step>& steps, const Tensor& h_0, const Tensor& output_rows) {
  Tensor h_n = at::empty(h_0.sizes(), h_0.options());
  int64_t done = 0;
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    if (rows <= done) continue;
    h_n.slice(0, done, rows).copy_(output_rows.slice(0, offset + done, offset + rows));
    done = rows;
  }
  h_n.slice(0, done).copy_(h_0.slice(0, done));
  return h_n;
}

GradientSums::GradientSums(
    const BackwardProblem& problem,
    const std::vector<Step>& steps,
    const Tensor& weights,
    bool split)
    : p_(problem), steps_(steps) {
  const int64_t hidden = p_.h_0.size(1);
  const auto options = weights.options();
  const auto sum_options = options.dtype(compute_dtype(weights.scalar_type()));
  weights_h_ = weights.slice(1, 0, hidden);
  int64_t begun = 0;
  for (const Step& step : steps_) {
    begun_.push_back(begun);
    begun = std::max(begun, step.rows);
  }

  const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] = p_.wanted;
  output_rows_ = flat_rows(p_.output);
  initial_rows_ = p_.h_0.contiguous();
  if (d_input) {
    input_ = empty_large({flat_size(p_.input), p_.input.size(-1)}, options);
    weights_x_.emplace(weights.slice(1, hidden), split);
  }
  if (d_h_0) {
    h_0_ = at::empty(p_.h_0.sizes(), p_.h_0.options());
    // Rows that take part in no step.
    const Tensor rest = h_0_.slice(0, begun);
    p_.grad_h_n.defined() ? rest.copy_(p_.grad_h_n.slice(0, begun)) : rest.zero_();
  }
  if (split && d_weights) {
    // The bias is one more row of weights, whose input is 1.
    products_.emplace(weights.size(1) + 1, weights.size(0), options);
    return;
  }
  if (d_weights) weights_ = at::zeros({weights.size(1), weights.size(0)}, sum_options);
  if (d_bias) bias_ = at::zeros({weights.size(0)}, sum_options);
}

void GradientSums::add(size_t first, size_t last, const Tensor& dz) {
  if (dz.size(0) == 0) return;  // steps that reach no row
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  if (input_.defined()) weights_x_->multiply(input_.narrow(0, begin, dz.size(0)), dz);
  if (p_.wanted[3]) {
    const Tensor x = flat_rows(p_.input, begin, dz.size(0)).to(dz.scalar_type());
    const Pieces states = states_before(first, last, dz.scalar_type());
    if (products_.has_value()) {
      const Tensor one = at::ones({dz.size(0), 1}, dz.options());
      products_->add({states.size() == 1 ? states[0] : at::cat(states), x, one}, dz);
    } else {
      add_transposed_product(weights_, {states, {x}}, dz);
    }
  }
  if (bias_.defined()) bias_.add_(dz.sum(0, /*keepdim=*/false, bias_.scalar_type()));
  if (h_0_.defined()) add_initial_state(first, last, dz);
}

// The states that the rows of steps [first, last) began their step with, in the
// order of the rows: what the step before left, or the initial state.
Pieces GradientSums::states_before(size_t first, size_t last, at::ScalarType dtype) const {
  struct Span {
    const Tensor* source;
    int64_t begin, end;
  };
  std::vector<Span> spans;
  const auto append = [&](const Tensor& source, int64_t begin, int64_t end) {
    if (begin >= end) return;
    if (!spans.empty() && spans.back().source == &source && spans.back().end == begin) {
      spans.back().end = end;  // steps of equal size make one span
    } else {
      spans.push_back({&source, begin, end});
    }
  };
  const bool backwards = steps_[last - 1].offset < steps_[first].offset;
  for (size_t n = 0; n < last - first; ++n) {
    const size_t k = backwards ? last - 1 - n : first + n;
    const int64_t rows = steps_[k].rows;
    const int64_t carried = carried_rows(steps_, k);
    if (carried > 0) append(output_rows_, steps_[k - 1].offset, steps_[k - 1].offset + carried);
    append(initial_rows_, carried, rows);
  }
  Pieces pieces;
  for (const Span& span : spans) {
    pieces.push_back(span.source->slice(0, span.begin, span.end).to(dtype));
  }
  return pieces;
}

// What flows back from each row's own first step.
void GradientSums::add_initial_state(size_t first, size_t last, const Tensor& dz) {
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  for (size_t k = first; k < last; ++k) {
    const int64_t count = steps_[k].rows - begun_[k];
    if (count <= 0) continue;
    h_0_.narrow(0, begun_[k], count)
        .copy_(at::mm(dz.narrow(0, steps_[k].offset - begin + begun_[k], count), weights_h_));
  }
}

Gradients GradientSums::finish(const Tensor& dc) {
  const at::ScalarType dtype = p_.input.scalar_type();
  if (products_.has_value()) {
    const Tensor sums = products_->result();
    weights_ = sums.slice(0, 0, sums.size(0) - 1);
    if (p_.wanted[4]) bias_ = sums[sums.size(0) - 1].clone();
  }
  return {
      input_.defined() ? input_.to(dtype).view(p_.input.sizes()) : Tensor(),
      h_0_,
      p_.wanted[2] ? dc.to(dtype) : Tensor(),
      weights_.defined() ? transposed(weights_).to(dtype) : Tensor(),
      bias_.defined() ? bias_.to(dtype) : Tensor()};
}

}  // namespace lltm::cpu
