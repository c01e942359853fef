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

// Gradients have the compute dtype. h is the state before each step: rows in the output and in h_0.
WeightGradients weight_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Gemm& gemm,
    const Tensor& dz) {
  const CellInfo& cell = *args.cell;
  const at::ScalarType dtype = args.input->scalar_type();
  WeightGradients d_weights(args, compute_options(args.input));
  // add(products, dz) gets the dz columns for adjacent rows in `to`.
  const auto compute = [&](const Tensor& to, SlotRange slots, const int* blocks, const auto& add) {
    const int64_t hidden = args.h_0->size(1);
    for_each_run(slots, blocks, [&](int slot, int count) {
      const Tensor c = to.narrow(0, blocks[slot] * hidden, count * hidden);
      SplitKGemm products(gemm, dtype, c);
      add(products, dz.narrow(1, slot * hidden, count * hidden));
      products.finish();
    });
  };
  const Weights parts = d_weights.parts(cell);
  if (parts.hh.defined()) {
    const Tensor output = as_operand(flat_rows(args.output));
    const Tensor h_0 = as_operand(args.h_0);
    const std::vector<StateSpan> spans = states_before(steps, 0, steps.size());
    const auto add = [&](SplitKGemm& products, const Tensor& dz_h) {
      if ((args.reset.defined() || args.recurrent_mask.defined()) && !steps.empty()) {
        const Tensor h = as_operand(entering_h(args, steps, 0, steps.size(), dtype));
        products.add(dz_h, 0, h, 0, h.size(0));
        return;
      }
      for (const auto [row, source, count, initial] : spans) {
        products.add(dz_h, row, initial ? h_0 : output, source, count);
      }
    };
    compute(parts.hh, cell.h, cell.h_blocks, add);
  }
  if (parts.ih.defined()) {
    const Tensor x = as_operand(flat_rows(args.input));
    const auto add = [&](SplitKGemm& products, const Tensor& dz_x) {
      products.add(dz_x, 0, x, 0, x.size(0));
    };
    compute(parts.ih, cell.x, cell.x_blocks, add);
  }
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
  const auto carried = [&](const Tensor& sum) {
    return sum.defined() ? sum.to(carried_dtype) : Tensor();
  };
  return {
      want_input ? input_gradient(args, gemm, t.dz) : Tensor(),
      want_h_0 ? unpadded(t.dh, hidden).to(carried_dtype) : Tensor(),
      want_c_0 ? t.dc.to(carried_dtype) : Tensor(),
      carried(d_weights.weight_ih),
      carried(d_weights.weight_hh),
      bias_ih,
      bias_hh};
}

}  // namespace lltm::cuda
