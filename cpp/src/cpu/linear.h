// The matrix products of the cell, by public ATen, in the compute dtype.
//
// 16-bit products run in float32: that is what keeps their rounding out of the
// pre-activations, and without float16 arithmetic in the CPU it is also the
// faster way.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace lltm::cpu {

// weights (3H, H+I) and bias (3H) in a dtype, by default the compute dtype.
struct Linear {
  Linear(const at::Tensor& w, const std::optional<at::Tensor>& bias);
  Linear(const at::Tensor& w, const std::optional<at::Tensor>& bias, at::ScalarType dtype);

  // (rows, I) -> (rows, 3H): x W_x^T + b.
  at::Tensor project_input(const at::Tensor& x) const;
  // gates (rows, 3H) += h (rows, H) W_h^T.
  void add_recurrent(at::Tensor gates, const at::Tensor& h) const;

  // Both at once, of [h, x] side by side, written to `gates`: rounded as plain PyTorch's.
  void project(at::Tensor gates, const at::Tensor& h, const at::Tensor& x) const;

  // From the gradients of the pre-activations (rows, 3H), written to `out`:
  void input_gradient(at::Tensor out, const at::Tensor& grad_gates) const;  // (rows, I)
  void state_gradient(at::Tensor out, const at::Tensor& grad_gates) const;  // (rows, H)

  at::Tensor weights;    // (3H, H+I), of which
  at::Tensor weights_h;  // (3H, H)
  at::Tensor weights_x;  // (3H, I)
  at::Tensor bias;       // (3H), or undefined
};

// `out` (3H, H+I) from the states and the inputs of the same rows.
void weights_gradient(
    const at::Tensor& out, const at::Tensor& grad_gates, const at::Tensor& h, const at::Tensor& x);

}  // namespace lltm::cpu
