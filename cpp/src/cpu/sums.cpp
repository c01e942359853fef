#include "cpu/sums.h"

#include "cpu/products.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Calls body(k, rows) for the rows [first, last) of the state whose own first
// step in the order of `steps` is k.
template <typename Body>
void for_each_beginning(const std::vector<Step>& steps, Body body) {
  int64_t begun = 0;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (steps[k].rows > begun) {
      body(k, begun, steps[k].rows);
      begun = steps[k].rows;
    }
  }
}

// The gradient of h_0: what flows back from each row's first step.
Tensor initial_state_gradient(
    const BackwardProblem& p,
    const std::vector<Step>& steps,
    const Tensor& dz,
    const Tensor& weights_h) {
  const Tensor grad = at::empty(p.h_0.sizes(), p.h_0.options());
  int64_t begun = 0;
  for_each_beginning(steps, [&](size_t k, int64_t first, int64_t last) {
    grad.slice(0, first, last)
        .copy_(at::mm(dz.narrow(0, steps[k].offset + first, last - first), weights_h));
    begun = last;
  });
  const Tensor rest = grad.slice(0, begun);
  if (p.grad_h_n.defined()) {
    rest.copy_(p.grad_h_n.slice(0, begun));
  } else {
    rest.zero_();
  }
  return grad;
}

// The gradient of the weights, transposed, (H+I, 3H): [h, x]^T dz, where h is
// the state that each row of dz began its step with. Transposed, because that
// takes the transpose of h and x, which are smaller than dz.
Tensor weights_gradient(
    const BackwardProblem& p, const std::vector<Step>& steps, const Tensor& dz) {
  const at::ScalarType dtype = dz.scalar_type();
  const Tensor x = flat_rows(p.input).to(dtype);
  const Tensor output_rows = flat_rows(p.output).to(dtype);
  const int64_t hidden = p.h_0.size(1);
  const Tensor grad = at::empty({hidden + x.size(1), dz.size(1)}, dz.options());
  const Tensor grad_h = grad.slice(0, 0, hidden);
  transposed_product(grad.slice(0, hidden), x, dz, /*accumulate=*/false);
  if (steps.empty()) {
    grad_h.zero_();
    return grad;
  }
  const bool even = std::all_of(
      steps.begin(), steps.end(), [&](const Step& s) { return s.rows == steps[0].rows; });
  if (even) {
    // The states before all steps but the first are the output, moved by one
    // step: no copy is needed.
    const int64_t batch = steps[0].rows;
    const int64_t rest = dz.size(0) - batch;
    const bool reverse = steps.size() > 1 && steps[1].offset < steps[0].offset;
    const Tensor first = dz.narrow(0, steps[0].offset, batch);
    transposed_product(grad_h, p.h_0.to(dtype), first, /*accumulate=*/false);
    if (rest > 0) {
      transposed_product(
          grad_h,
          output_rows.narrow(0, reverse ? batch : 0, rest),
          dz.narrow(0, reverse ? 0 : batch, rest),
          /*accumulate=*/true);
    }
    return grad;
  }
  const Tensor before = at::empty(output_rows.sizes(), dz.options());
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    const int64_t carried = k == 0 ? 0 : std::min(rows, steps[k - 1].rows);
    if (carried > 0) {
      before.narrow(0, offset, carried)
          .copy_(output_rows.narrow(0, steps[k - 1].offset, carried));
    }
    before.narrow(0, offset + carried, rows - carried)
        .copy_(p.h_0.narrow(0, carried, rows - carried));
  }
  transposed_product(grad_h, before, dz, /*accumulate=*/false);
  return grad;
}

}  // namespace

Tensor final_states(
    const std::vector<Step>& steps, const Tensor& h_0, const Tensor& output_rows) {
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

Gradients gradients_of_arguments(
    const BackwardProblem& p,
    const std::vector<Step>& steps,
    const Tensor& dz,
    const Tensor& weights,
    const Tensor& dc) {
  const at::ScalarType dtype = p.input.scalar_type();
  const int64_t hidden = p.h_0.size(1);
  const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] = p.wanted;
  Tensor grad_input, grad_h_0, grad_weights;
  if (d_input) {
    grad_input = product(dz, weights.slice(1, hidden)).to(dtype).view(p.input.sizes());
  }
  if (d_h_0) {
    grad_h_0 = initial_state_gradient(p, steps, dz, weights.slice(1, 0, hidden));
  }
  if (d_weights) {
    grad_weights = transposed(weights_gradient(p, steps, dz)).to(dtype);
  }
  return {
      grad_input,
      grad_h_0,
      d_c_0 ? dc.to(dtype) : Tensor(),
      grad_weights,
      d_bias ? dz.sum(0).to(dtype) : Tensor()};
}

}  // namespace lltm::cpu
