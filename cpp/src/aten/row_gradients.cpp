#include "aten/row_gradients.h"

#include "aten/split_k.h"
#include "common/step_io.h"
#include "common/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace lltm {
namespace {

using at::Tensor;

Tensor input_gradient(const SequenceBackwardArgs& args, const DeviceGemm& gemm, const Tensor& dz) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1), columns = args.input->size(-1);
  const int64_t projected = columns - cell.given * hidden;
  const Tensor d_input = at::empty(args.input->sizes(), args.input->options().dtype(gemm.dtype()));
  const Tensor rows = flat_rows(d_input), dz_x = slot_columns(dz, cell, cell.x, hidden);
  const Tensor weights_x = as_padded_operand(
      x_slots(weights_of(args).ih, cell).to(gemm.dtype()),
      dz_x.size(1),
      projected,
      gemm.alignment());
  SplitKGemm products(gemm, gemm.over_gates(), rows.narrow(1, 0, projected));
  products.add(dz_x.t(), 0, weights_x, 0, dz_x.size(1));
  products.finish();
  for_each_given(cell, hidden, columns, [&](int slot, int64_t column) {
    rows.narrow(1, column, hidden).copy_(dz.narrow(1, slot * hidden, hidden));
  });
  return d_input;
}

// In 16 bits, a GEMM sums in float32 and rounds once.
WeightGradients weight_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const DeviceGemm& gemm,
    const Tensor& dz) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1);
  WeightGradients d_weights(args, args.input->options().dtype(gemm.dtype()));
  // A GEMM per run of adjacent rows in `to`.
  const auto compute = [&](const Tensor& to, SlotRange slots, const int* blocks, const Tensor& by) {
    const Tensor b = as_operand(by);
    for_each_run(slots, blocks, [&](int slot, int count) {
      SplitKGemm products(
          gemm, gemm.over_rows(), to.narrow(0, blocks[slot] * hidden, count * hidden));
      products.add(dz.narrow(1, slot * hidden, count * hidden), 0, b, 0, dz.size(0));
      products.finish();
    });
  };
  const Weights parts = d_weights.parts(cell);
  if (parts.hh.defined()) {
    // With heads, one GEMM costs less than one per head and gate.
    const Tensor all = has_heads(parts.hh)
                           ? at::empty({cell.h.count() * hidden, hidden}, parts.hh.options())
                           : parts.hh;
    if (cell.direct.count() > 0) {
      // A copy costs less than a GEMM for h_0 and another for each run of steps.
      const Tensor h =
          dz.size(0) == 0 ? *args.h_0 : entering_h(args, steps, 0, steps.size(), gemm.dtype());
      compute(all, cell.direct, cell.h_blocks, h);
    }
    for (const Operand& operand : cell.operands()) {
      const Tensor v = args.saved->narrow(1, operand.saved * hidden, hidden);
      for (const SlotRange slots : operand.gates) compute(all, slots, cell.h_blocks, v);
    }
    if (has_heads(parts.hh)) d_weights.weight_hh = with_heads(all, parts.hh);
  }
  if (parts.ih.defined()) {
    const Tensor x = flat_rows(args.input).narrow(1, 0, parts.ih.size(1));
    compute(parts.ih, cell.x, cell.x_blocks, x);
  }
  return d_weights;
}

}  // namespace

Gradients row_gradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const DeviceGemm& gemm,
    const BackwardTensors& t) {
  const CellInfo& cell = *args.cell;
  const auto [want_input, want_h_0, want_c_0, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  const int64_t hidden = args.h_0->size(1);
  const WeightGradients d_weights = weight_gradients(args, steps, gemm, t.dz);
  // ATen's sum accumulates in float32, in a fixed order.
  const Tensor sums = want_bias_ih || want_bias_hh
                          ? t.dz.slice(1, 0, cell.grad_columns() * hidden).sum(0)
                          : Tensor();
  const auto [bias_ih, bias_hh] = bias_gradients(sums, cell, want_bias_ih, want_bias_hh);
  return {
      want_input ? input_gradient(args, gemm, t.dz) : Tensor(),
      want_h_0 ? unpadded(t.dh, hidden) : Tensor(),
      want_c_0 ? t.dc : Tensor(),
      d_weights.weight_ih,
      d_weights.weight_hh,
      bias_ih,
      bias_hh};
}

}  // namespace lltm
