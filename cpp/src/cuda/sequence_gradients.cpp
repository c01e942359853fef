#include "cuda/sequence_gradients.h"

#include "cuda/sequence_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace lltm::cuda {
namespace {

using at::Tensor;

Tensor input_gradient(const SequenceBackwardArgs& args, const Gemm& gemm, const Tensor& dz) {
  const Tensor weights_x = as_operand(x_columns(args.weights, args.h_0.size(1)));
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
  const Tensor x = as_operand(flat_rows(args.input));
  const Tensor output = as_operand(flat_rows(args.output));
  const Tensor h_0 = as_operand(args.h_0);
  const Tensor d_weights = at::empty(args.weights.sizes(), compute_options(args.input));
  const Result d_weights_h = result(h_columns(d_weights, hidden));
  const Result d_weights_x = result(x_columns(d_weights, hidden));

  const std::vector<StateSpan> spans = states_before(steps, 0, steps.size());
  if (spans.empty()) d_weights.zero_();
  bool accumulate = false;
  for (const auto [row, source, count, initial] : spans) {
    const Operand h = operand_rows(initial ? h_0 : output, source, count);
    gemm(transposed(operand_rows(dz, row, count)), h, d_weights_h, accumulate);
    accumulate = true;
  }
  gemm(transposed(operand(dz)), operand(x), d_weights_x, /*accumulate=*/false);
  return d_weights;
}

}  // namespace

Gradients sequence_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const BackwardTensors& t) {
  const at::ScalarType dtype = args.input.scalar_type();
  const at::ScalarType carried_dtype = args.segment ? compute_dtype(dtype) : dtype;
  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = args.output_mask;
  return {
      want_input ? input_gradient(args, gemm, t.dz) : Tensor(),
      want_h_0 ? t.dh.to(carried_dtype) : Tensor(),
      want_c_0 ? t.dc.to(carried_dtype) : Tensor(),
      want_weights ? weight_gradients(args, steps, gemm, t.dz).to(carried_dtype) : Tensor(),
      // ATen's sum adds in a fixed order, in float32.
      want_bias ? t.dz.sum(0, /*keepdim=*/false, carried_dtype) : Tensor()};
}

}  // namespace lltm::cuda
