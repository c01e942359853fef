#include "cuda/engine/sequence_gradients.h"

#include "common/step_io.h"
#include "common/weights.h"
#include "cuda/gemm/split_k.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace lltm::cuda {
namespace {

using at::Tensor;

Tensor input_gradient(const SequenceBackwardArgs& args, const Gemm& gemm, const Tensor& dz) {
  const CellInfo& cell = *args.cell;
  const Tensor dz_x = slot_columns(dz, cell, cell.x, args.h_0->size(1));
  const Tensor weights_x =
      as_padded_operand(x_slots(weights_of(args).ih, cell), dz_x.size(1), args.input->size(-1));
  const Tensor d_input = at::empty(args.input->sizes(), args.input->options());
  SplitKGemm products(gemm, dz.scalar_type(), flat_rows(d_input));
  products.add(dz_x.t(), 0, weights_x, 0, dz_x.size(1));
  products.finish();
  return d_input;
}

// In 16 bits, a GEMM sums in float32 and rounds once.
WeightGradients weight_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const Tensor& dz) {
  const CellInfo& cell = *args.cell;
  const at::ScalarType dtype = args.input->scalar_type();
  WeightGradients d_weights(args, args.input->options().dtype(args.carried_dtype()));
  // A GEMM per run of adjacent rows in `to`.
  const auto compute = [&](const Tensor& to, SlotRange slots, const int* blocks, const Tensor& by) {
    const Tensor b = as_operand(by);
    const int64_t hidden = args.h_0->size(1);
    for_each_run(slots, blocks, [&](int slot, int count) {
      SplitKGemm products(gemm, dtype, to.narrow(0, blocks[slot] * hidden, count * hidden));
      products.add(dz.narrow(1, slot * hidden, count * hidden), 0, b, 0, dz.size(0));
      products.finish();
    });
  };
  const Weights parts = d_weights.parts(cell);
  if (parts.hh.defined()) {
    // A copy costs less than a GEMM for h_0 and another for each run of steps.
    const Tensor h = dz.size(0) == 0 ? *args.h_0 : entering_h(args, steps, 0, steps.size(), dtype);
    if (!has_heads(parts.hh)) {
      compute(parts.hh, cell.h, cell.h_blocks, h);
    } else {  // a GEMM costs less than one per head and gate
      const int64_t hidden = args.h_0->size(1);
      const Tensor all = at::empty({cell.h.count() * hidden, hidden}, parts.hh.options());
      compute(all, cell.h, cell.h_blocks, h);
      d_weights.weight_hh = with_heads(all, parts.hh);
    }
  }
  if (parts.ih.defined()) compute(parts.ih, cell.x, cell.x_blocks, flat_rows(args.input));
  return d_weights;
}

}  // namespace

Gradients sequence_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const BackwardTensors& t) {
  const CellInfo& cell = *args.cell;
  const at::ScalarType carried_dtype = args.carried_dtype();
  const auto [want_input, want_h_0, want_c_0, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  const int64_t hidden = args.h_0->size(1);
  const WeightGradients d_weights = weight_gradients(args, steps, gemm, t.dz);
  // ATen's sum accumulates in float32, in a fixed order.
  const Tensor sums =
      want_bias_ih || want_bias_hh
          ? t.dz.slice(1, 0, cell.grad_columns() * hidden).sum(0, /*keepdim=*/false, carried_dtype)
          : Tensor();
  const auto [bias_ih, bias_hh] = bias_gradients(sums, cell, want_bias_ih, want_bias_hh);
  return {
      want_input ? input_gradient(args, gemm, t.dz) : Tensor(),
      want_h_0 ? unpadded(t.dh, hidden).to(carried_dtype) : Tensor(),
      want_c_0 ? t.dc.to(carried_dtype) : Tensor(),
      d_weights.weight_ih,
      d_weights.weight_hh,
      bias_ih,
      bias_hh};
}

}  // namespace lltm::cuda
