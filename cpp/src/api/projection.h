// An LSTM with a projected h (proj_size of torch.nn.LSTM), with the standard engines.
//
// The element-wise part computes y (H), and the next step's gates read h = W_hr y (P). They can
// instead read y through W_hh W_hr (4H, H): the engines run over y, and a single GEMM projects all
// steps to h. Only h_0 has no y: it becomes P additional input columns, multiplied by W_hh and zero
// in all other steps.
#pragma once

#include "cell/cells.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace lltm {

struct ProjectedWeights {
  at::Tensor weight_ih;  // (4H, I+P), or (4H, I) without columns for h_0
  at::Tensor weight_hh;  // (4H, H)
};
ProjectedWeights project_weights(
    const at::Tensor& weight_ih,  // (4H, I)
    const at::Tensor& weight_hh,  // (4H, P)
    const at::Tensor& weight_hr,  // (P, H)
    bool with_h_0,
    bool unintercepted = false);
// x weight^T, as W_hr y. `unintercepted`: on the CPU, and nothing but autograd intercepts the call.
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, bool unintercepted);

constexpr bool can_project(const CellInfo& cell) {
  return cell.native == Cells::native<Lstm>();
}

// Checks options, also if proj_size is 0.
void check_projection(
    const CellInfo& cell, int64_t proj_size, int64_t hidden_size, double recurrent_dropout);

// Multiplying the weights takes longer than PyTorch's loop over so few steps (measured in training
// and inference: batch sizes 1 and 16, H from 128 to 1024, P = H / 2).
constexpr bool is_short_for_product(int64_t steps, int64_t hidden_size) {
  return 0 < steps && 16 * steps < hidden_size;
}

// One direction, with PyTorch's LSTM: output (T, B, P), h_n (B, P), c_n (B, H). Weights: weight_ih,
// weight_hh, biases if present, weight_hr.
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_short_call(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    at::TensorList weights,
    bool has_bias,
    bool reverse);

class RowEnds {
 public:
  // With batch_sizes, tensors are packed (N, .), otherwise (T, B, .).
  RowEnds(const std::optional<at::Tensor>& batch_sizes, bool reverse);

  // Appends the columns for h_0 (B, P), zero if the first step has a reset.
  at::Tensor append_h_0(
      const at::Tensor& input, const at::Tensor& h_0, const at::Tensor& reset) const;
  // h_n (B, P): the output at each last step, or h_0 without steps.
  at::Tensor last_of(const at::Tensor& output, const at::Tensor& h_0) const;

 private:
  // Shape (B).
  at::Tensor packed_rows(bool last, const at::Tensor& rows, const c10::SymInt& batch) const;

  const std::optional<at::Tensor>& batch_sizes_;
  bool reverse_;
};

}  // namespace lltm
