#include "api/projection.h"

#include "api/initial_states.h"
#include "op/argument_checks.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

namespace lltm {

using at::Tensor;
using c10::SymInt;

void check_projection(
    const CellInfo& cell, int64_t proj_size, int64_t hidden_size, double recurrent_dropout) {
  const char* const where = cell.modules.layer_class;
  TORCH_CHECK_VALUE(
      proj_size == 0 || can_project(cell),
      expected(where, "proj_size to be 0", c10::str(proj_size, ": only an LSTM has a projection")));
  TORCH_CHECK_VALUE(
      proj_size >= 0 && proj_size < hidden_size,
      expected(where, "proj_size to be in [0, hidden_size)", proj_size));
  TORCH_CHECK_VALUE(
      proj_size == 0 || recurrent_dropout == 0,
      expected(where, "recurrent_dropout to be 0 with proj_size", recurrent_dropout));
}

Tensor project(const Tensor& x, const Tensor& weight, [[maybe_unused]] bool unintercepted) {
#if defined(__aarch64__)
  // ATen's GEMMs add all products in one chain there. Gradients of weights are sums over rows:
  // autograd adds those of short pieces, as it adds those of the steps in PyTorch's LSTM.
  constexpr int64_t kRows = 64;
  if (unintercepted && at::GradMode::is_enabled() && x.numel() > 0) {
    const int64_t rows = x.numel() / (x.size(0) * x.size(-1));
    std::vector<Tensor> parts = x.split(std::max<int64_t>(kRows / rows, 1));
    for (Tensor& part : parts) part = at::linear(part, weight);
    return at::cat(parts);
  }
#endif
  return at::linear(x, weight);
}

ProjectedWeights project_weights(
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    const Tensor& weight_hr,
    bool with_h_0,
    bool unintercepted) {
  return {
      with_h_0 ? cat_without_autocast({weight_ih, weight_hh}, 1) : weight_ih,
      unintercepted ? project(weight_hh, weight_hr.t(), unintercepted)
                    : at::matmul(weight_hh, weight_hr)};
}

namespace {

// Suppresses the warning of at::lstm that it does not use oneDNN.
class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> run_short_call(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    at::TensorList weights,
    bool has_bias,
    bool reverse) {
  NoWarnings handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const auto [output, h_n, c_n] = at::lstm(
      reverse ? input.flip(0) : input,
      {h_0.unsqueeze(0), c_0.unsqueeze(0)},
      weights,
      has_bias,
      /*num_layers=*/1,
      /*dropout=*/0,
      /*train=*/false,
      /*bidirectional=*/false,
      /*batch_first=*/false);
  return {reverse ? output.flip(0) : output, h_n.squeeze(0), c_n.squeeze(0)};
}

RowEnds::RowEnds(const std::optional<Tensor>& batch_sizes, bool reverse)
    : batch_sizes_(batch_sizes), reverse_(reverse) {}

Tensor RowEnds::packed_rows(bool last, const Tensor& rows, const SymInt& batch) const {
  const Tensor row = at::arange(c10::Scalar(batch), at::TensorOptions(at::kLong));
  if (!last) return row.to(rows.device());
  const Tensor steps = at::sum(batch_sizes_->unsqueeze(1) > row, 0);
  const Tensor begins = batch_sizes_->cumsum(0) - *batch_sizes_;
  // The clamps keep invalid batch_sizes in bounds. The operator rejects them later.
  const Tensor found = begins.index_select(0, (steps - 1).clamp_min(0)) + row;
  return found.clamp(at::Scalar(0), at::Scalar(rows.sym_size(0) - 1)).to(rows.device());
}

Tensor RowEnds::append_h_0(const Tensor& input, const Tensor& h_0, const Tensor& reset) const {
  const SymInt count = input.sym_size(0);
  std::vector<SymInt> shape = input.sym_sizes().vec();
  shape.back() = h_0.sym_size(-1);
  const Tensor zeros = h_0.new_zeros_symint(shape);
  Tensor columns;
  if (TORCH_GUARD_OR_FALSE(count.sym_eq(0))) {
    columns = zeros;
  } else if (batch_sizes_.has_value()) {
    columns = zeros.index_copy(0, packed_rows(reverse_, input, h_0.sym_size(0)), h_0);
  } else {  // the extra step is cut off at the other end
    const Tensor step = h_0.unsqueeze(0);
    columns = reverse_ ? cat_without_autocast({zeros, step}, 0).slice_symint(0, 1, count + 1)
                       : cat_without_autocast({step, zeros}, 0).slice_symint(0, 0, count);
  }
  if (reset.defined()) columns = columns.masked_fill(reset.unsqueeze(-1), 0);
  return cat_without_autocast({input, columns}, -1);
}

Tensor RowEnds::last_of(const Tensor& output, const Tensor& h_0) const {
  if (TORCH_GUARD_OR_FALSE(output.sym_size(0).sym_eq(0)))
    return h_0.to(output.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  if (batch_sizes_.has_value()) {
    return output.index_select(0, packed_rows(!reverse_, output, h_0.sym_size(0)));
  }
  return output.select(0, reverse_ ? 0 : -1).clone();
}

}  // namespace lltm
