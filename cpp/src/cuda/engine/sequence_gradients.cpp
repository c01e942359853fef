#include "cuda/engine/sequence_gradients.h"

#include "cuda/engine/weight_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace lltm::cuda {
namespace {

using at::Tensor;

Tensor input_gradient(const SequenceBackwardArgs& args, const Gemm& gemm, const Tensor& dz) {
  const Tensor weights_x =
      as_padded_operand(x_columns(args.weights, args.h_0.size(1)), dz.size(1), args.input.size(-1));
  const Tensor d_input = at::empty(args.input.sizes(), args.input.options());
  gemm(operand(dz), operand(weights_x), result(flat_rows(d_input)), /*accumulate=*/false);
  return d_input;
}

// dz^T [h, x] in the compute dtype, where h are the states before each step: rows of the output,
// and of h_0.
Tensor weight_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const Tensor& dz) {
  const int64_t hidden = args.h_0.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const Tensor x = as_operand(flat_rows(args.input));
  const Tensor output = as_operand(flat_rows(args.output));
  const Tensor h_0 = as_operand(args.h_0);
  const Tensor d_weights = at::empty(args.weights.sizes(), compute_options(args.input));
  WeightGradientGemm d_weights_h(gemm, dtype, h_columns(d_weights, hidden));
  WeightGradientGemm d_weights_x(gemm, dtype, x_columns(d_weights, hidden));

  for (const auto [row, source, count, initial] : states_before(steps, 0, steps.size())) {
    d_weights_h.add(dz, row, initial ? h_0 : output, source, count);
  }
  d_weights_x.add(dz, 0, x, 0, x.size(0));
  d_weights_h.finish();
  d_weights_x.finish();
  return d_weights;
}

}  // namespace

Gradients sequence_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const BackwardTensors& t) {
  const at::ScalarType carried_dtype = args.carried_dtype();
  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = args.output_mask;
  const int64_t hidden = args.h_0.size(1);
  const Tensor dz = t.dz.slice(1, 0, args.weights.size(0));
  return {
      want_input ? input_gradient(args, gemm, t.dz) : Tensor(),
      want_h_0 ? unpadded(t.dh, hidden).to(carried_dtype) : Tensor(),
      want_c_0 ? t.dc.to(carried_dtype) : Tensor(),
      want_weights ? weight_gradients(args, steps, gemm, dz).to(carried_dtype) : Tensor(),
      // ATen's sum adds in a fixed order, in float32.
      want_bias ? dz.sum(0, /*keepdim=*/false, carried_dtype) : Tensor()};
}

}  // namespace lltm::cuda
