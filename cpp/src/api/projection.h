// An LSTM whose h is projected (torch.nn.LSTM's proj_size), by the engines of the LSTM.
//
// The element-wise part gives y (H), and the gates of the next step read h = W_hr y (P). They may
// as well read y itself, through the product W_hh W_hr (4H, H): so the engines run over y, and one
// GEMM projects all its steps to h. What precedes the first step is no y but h_0: it enters as P
// further columns of the input, which W_hh multiplies, and which are zero in every other step.
#pragma once

#include "cell/cell.h"
#include "cell/lstm.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace lltm {

// The weights of the engines.
struct ProjectedWeights {
  at::Tensor weight_ih;  // (4H, I+P), or without the columns of h_0 (4H, I)
  at::Tensor weight_hh;  // (4H, H)
};
ProjectedWeights project_weights(
    const at::Tensor& weight_ih,  // (4H, I)
    const at::Tensor& weight_hh,  // (4H, P)
    const at::Tensor& weight_hr,  // (P, H)
    bool with_h_0);

constexpr bool can_project(const CellInfo& cell) {
  return cell.programs == nullptr && cell.id == Lstm::kCell.id;
}

// The options of a layer, proj_size 0 included.
void check_projection(
    const CellInfo& cell, int64_t proj_size, int64_t hidden_size, double recurrent_dropout);

// Whether the product of the weights takes longer than PyTorch's own loop over so few steps, in
// training and inference, with one row and with sixteen (H of 128 to 1024, P = H / 2).
constexpr bool is_short_for_product(int64_t steps, int64_t hidden_size) {
  return 0 < steps && 16 * steps < hidden_size;
}

// One direction of a short call by PyTorch's loop: output (T, B, P), h_n (B, P), c_n (B, H). The
// weights are weight_ih, weight_hh, the biases if there are, weight_hr.
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_short_call(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    at::TensorList weights,
    bool has_bias,
    bool reverse);

// Where a row of the batch has its first and its last step, for a direction.
class RowEnds {
 public:
  // batch_sizes are of packed rows (N, .); without them these are (T, B, .).
  RowEnds(const std::optional<at::Tensor>& batch_sizes, bool reverse);

  // The input with the columns of h_0 (B, P), which a reset in the first step empties.
  at::Tensor append_h_0(
      const at::Tensor& input, const at::Tensor& h_0, const at::Tensor& reset) const;
  // h_n (B, P): the last steps of the output; without steps h_0.
  at::Tensor last_of(const at::Tensor& output, const at::Tensor& h_0) const;

 private:
  // (B): the packed row of the first step in order of time, or of the last one.
  at::Tensor packed_rows(bool last, const at::Tensor& rows, const c10::SymInt& batch) const;

  const std::optional<at::Tensor>& batch_sizes_;
  bool reverse_;
};

}  // namespace lltm
