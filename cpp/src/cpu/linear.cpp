#include "cpu/linear.h"

#include "cpu/dispatch.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>

namespace lltm::cpu {

using at::Tensor;

Linear::Linear(const Tensor& w, const std::optional<Tensor>& bias_or_none)
    : Linear(w, bias_or_none, compute_dtype(w.scalar_type())) {}

Linear::Linear(const Tensor& w, const std::optional<Tensor>& bias_or_none, at::ScalarType dtype)
    : weights(w.to(dtype)) {
  const int64_t hidden = weights.size(0) / 3;
  weights_h = weights.slice(1, 0, hidden);
  weights_x = weights.slice(1, hidden);
  if (bias_or_none.has_value() && bias_or_none->defined()) bias = bias_or_none->to(dtype);
}

Tensor Linear::project_input(const Tensor& x) const {
  const Tensor input = x.to(weights_x.scalar_type());
  return bias.defined() ? at::addmm(bias, input, weights_x.t()) : at::mm(input, weights_x.t());
}

void Linear::add_recurrent(Tensor gates, const Tensor& h) const {
  gates.addmm_(h, weights_h.t());
}

void Linear::project(Tensor gates, const Tensor& h, const Tensor& x) const {
  const Tensor both = at::cat({h, x}, 1);
  bias.defined() ? at::addmm_out(gates, bias, both, weights.t())
                 : at::mm_out(gates, both, weights.t());
}

void Linear::input_gradient(Tensor out, const Tensor& grad_gates) const {
  at::mm_out(out, grad_gates, weights_x);
}

void Linear::state_gradient(Tensor out, const Tensor& grad_gates) const {
  at::mm_out(out, grad_gates, weights_h);
}

void weights_gradient(
    const Tensor& out, const Tensor& grad_gates, const Tensor& h, const Tensor& x) {
  const at::ScalarType dtype = grad_gates.scalar_type();
  Tensor grad_h = out.slice(1, 0, h.size(1));
  Tensor grad_x = out.slice(1, h.size(1));
  at::mm_out(grad_h, grad_gates.t(), h.to(dtype));
  at::mm_out(grad_x, grad_gates.t(), x.to(dtype));
}

}  // namespace lltm::cpu
