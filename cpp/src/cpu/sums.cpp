#include "cpu/sums.h"

#include "cpu/dispatch.h"
#include "cpu/products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
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
    const BackwardProblem& problem, const std::vector<Step>& steps, const Tensor& weights)
    : p_(problem), steps_(steps) {
  const int64_t hidden = p_.h_0.size(1);
  const auto options = weights.options();
  const auto sum_options = options.dtype(compute_dtype(weights.scalar_type()));
  weights_h_ = weights.slice(1, 0, hidden);
  weights_x_ = weights.slice(1, hidden);
  int64_t begun = 0;
  for (const Step& step : steps_) {
    begun_.push_back(begun);
    begun = std::max(begun, step.rows);
  }

  const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] = p_.wanted;
  x_rows_ = flat_rows(p_.input);
  output_rows_ = flat_rows(p_.output);
  if (d_input) input_ = at::empty(x_rows_.sizes(), options);
  if (d_h_0) {
    h_0_ = at::empty(p_.h_0.sizes(), p_.h_0.options());
    // Rows that take part in no step.
    const Tensor rest = h_0_.slice(0, begun);
    p_.grad_h_n.defined() ? rest.copy_(p_.grad_h_n.slice(0, begun)) : rest.zero_();
  }
  if (d_weights) weights_ = at::zeros({weights.size(1), weights.size(0)}, sum_options);
  if (d_bias) bias_ = at::zeros({weights.size(0)}, sum_options);
}

void GradientSums::add(size_t first, size_t last, const Tensor& dz) {
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  if (input_.defined()) product(input_.narrow(0, begin, dz.size(0)), dz, weights_x_);
  if (weights_.defined()) {
    const int64_t hidden = p_.h_0.size(1);
    transposed_product(
        weights_.slice(0, hidden),
        x_rows_.narrow(0, begin, dz.size(0)).to(dz.scalar_type()),
        dz,
        /*accumulate=*/true);
    add_weights(first, last, dz);
  }
  if (bias_.defined()) bias_.add_(dz.sum(0, /*keepdim=*/false, bias_.scalar_type()));
  if (h_0_.defined()) add_initial_state(first, last, dz);
}

// h^T dz, where h is the state that each row of dz began its step with: what
// the step before left, or the initial state.
void GradientSums::add_weights(size_t first, size_t last, const Tensor& dz) {
  const at::ScalarType dtype = dz.scalar_type();
  const Tensor grad_h = weights_.slice(0, 0, p_.h_0.size(1));
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  if (first == 0) {
    const auto [offset, rows] = steps_[0];
    transposed_product(
        grad_h,
        p_.h_0.narrow(0, 0, rows).to(dtype),
        dz.narrow(0, offset - begin, rows),
        /*accumulate=*/true);
    if (++first == last) return;
  }
  // Of these steps each one but the first of all has a step before it.
  const int64_t from = std::min(steps_[first].offset, steps_[last - 1].offset);
  int64_t size = 0;
  for (size_t k = first; k < last; ++k) size += steps_[k].rows;
  const Tensor rows = dz.narrow(0, from - begin, size);
  const bool even = steps_[first - 1].rows == steps_[last - 1].rows;
  Tensor before;
  if (even) {
    // The same rows of the output, one step away: no copy is needed.
    const int64_t moved = steps_[first - 1].offset - steps_[first].offset;
    before = output_rows_.narrow(0, from + moved, size).to(dtype);
  } else {
    before = at::empty({size, grad_h.size(0)}, dz.options());
    for (size_t k = first; k < last; ++k) {
      const int64_t carried = std::min(steps_[k].rows, steps_[k - 1].rows);
      const Tensor part = before.narrow(0, steps_[k].offset - from, steps_[k].rows);
      part.slice(0, 0, carried).copy_(output_rows_.narrow(0, steps_[k - 1].offset, carried));
      part.slice(0, carried).copy_(p_.h_0.slice(0, carried, steps_[k].rows));
    }
  }
  transposed_product(grad_h, before, rows, /*accumulate=*/true);
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
  return {
      input_.defined() ? input_.to(dtype).view(p_.input.sizes()) : Tensor(),
      h_0_,
      p_.wanted[2] ? dc.to(dtype) : Tensor(),
      weights_.defined() ? transposed(weights_).to(dtype) : Tensor(),
      bias_.defined() ? bias_.to(dtype) : Tensor()};
}

}  // namespace lltm::cpu
