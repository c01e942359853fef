#include "cpu/engine/sequence_gradients.h"

#include "cpu/memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

SequenceGradients::SequenceGradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Tensor& weights,
    GemmFormat format)
    : args_(args), steps_(steps) {
  const int64_t hidden = args.h_0.size(1);
  int64_t begun = 0;
  for (const Step& step : steps_) {
    begun_.push_back(begun);
    begun = std::max(begun, step.rows);
  }

  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = args.output_mask;
  output_rows_ = flat_rows(args.output);
  if (want_input) {
    d_input_ = empty_large({flat_size(args.input), args.input.size(-1)}, weights.options());
    input_gemm_ = make_packed_gemm(format, x_columns(weights, hidden));
  }
  if (want_h_0) {
    weights_h_ = h_columns(weights, hidden).to(at::kFloat);
    d_h_0_ = at::empty(args.h_0.sizes(), args.h_0.options().dtype(args.carried_dtype()));
  }
  // The bias is one more row of weights, whose input is 1.
  const int64_t m = (want_weights ? weights.size(1) : 0) + (want_bias ? 1 : 0);
  if (m > 0) {
    weights_gemm_ = make_weight_gradient_gemm(format, m, weights.size(0), weights.options());
  }
}

bool SequenceGradients::add(size_t first, size_t last, const Tensor& dz) {
  const int64_t rows = dz.size(0);
  if (rows == 0) return true;  // steps that reach no row
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = args_.output_mask;
  if (want_h_0) add_initial_state(first, last, dz);
  if (input_gemm_ && !input_gemm_->run(d_input_.narrow(0, begin, rows), dz)) return false;
  if (!weights_gemm_) return true;
  const at::ScalarType dtype = dz.scalar_type();
  std::vector<Tensor> a;
  if (want_weights) {
    a.push_back(initial_states(steps_, first, last, args_.h_0, output_rows_, dtype));
    a.push_back(flat_rows(args_.input, begin, rows).to(dtype));
  }
  if (want_bias) a.push_back(at::ones({rows, 1}, dz.options()));
  return weights_gemm_->add(a, dz);
}

// The gradient of h_0: dz W_h of each row's own first step.
void SequenceGradients::add_initial_state(size_t first, size_t last, const Tensor& dz) {
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  for (size_t k = first; k < last; ++k) {
    const int64_t count = steps_[k].rows - begun_[k];
    if (count <= 0) continue;
    const Tensor dz_first = dz.narrow(0, steps_[k].offset - begin + begun_[k], count);
    d_h_0_.narrow(0, begun_[k], count).copy_(at::mm(dz_first.to(at::kFloat), weights_h_));
  }
}

Gradients SequenceGradients::finish(const Tensor& dc) {
  const at::ScalarType dtype = args_.carried_dtype();
  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = args_.output_mask;
  Tensor d_weights, d_bias;
  const int64_t columns = want_weights ? args_.h_0.size(1) + args_.input.size(-1) : 0;
  if (want_weights) d_weights = weights_gemm_->transposed_rows(0, columns).to(dtype);
  if (want_bias) d_bias = weights_gemm_->transposed_rows(columns, columns + 1).flatten().to(dtype);
  return {
      want_input ? d_input_.to(args_.input.scalar_type()).view(args_.input.sizes()) : Tensor(),
      d_h_0_,
      want_c_0 ? dc.to(dtype) : Tensor(),
      d_weights,
      d_bias};
}

}  // namespace lltm::cpu
