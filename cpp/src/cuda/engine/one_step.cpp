// A single step: GEMMs, then a kernel; in backward, a kernel, then GEMMs.
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/gemm/gemm.h"
#include "cuda/gemm/split_k.h"
#include "cuda/kernel/elementwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace lltm::cuda {

using at::Tensor;

SequenceResult step_forward(const SequenceArgs& args) {
  const CellInfo& cell = *args.cell;
  const int64_t batch = args.h_0->size(0);
  const int64_t hidden = args.h_0->size(1);
  const at::ScalarType dtype = args.input->scalar_type();
  const auto options = args.input->options();
  const Tensor h_next = at::empty({batch, hidden}, options);
  const Tensor c_next = at::empty({batch, cell.state_columns() * hidden}, options);
  const Tensor activations =
      args.save ? at::empty({batch, cell.saved * hidden}, options) : Tensor();
  const Tensor gates = at::empty({batch, cell.slots * hidden}, compute_options(args.input));

  // Each weight is used once: a GEMM per contiguous part costs less than reordering.
  const Gemm gemm(dtype);
  const auto multiply = [&](const Tensor& tensor,
                            const Tensor& weights,
                            SlotRange slots,
                            const int* blocks,
                            bool accumulate) {
    const Tensor a = as_operand(tensor);
    for_each_run(slots, blocks, [&](int slot, int count) {
      const Tensor w = as_operand(weights.narrow(0, blocks[slot] * hidden, count * hidden));
      const Tensor z = gates.narrow(1, slot * hidden, count * hidden);
      gemm(operand(a), transposed(operand(w)), result(z), accumulate);
    });
  };
  const Weights weights = weights_of(args);
  multiply(args.input, weights.ih, cell.x, cell.x_blocks, /*accumulate=*/false);
  if (cell.x.end < cell.slots) zero(result(gates.slice(1, cell.x.end * hidden)));
  multiply(args.h_0, weights.hh, cell.h, cell.h_blocks, /*accumulate=*/true);

  visit_dtype<c10::Half, c10::BFloat16>(dtype, [&]<typename T>(T*) {
    ForwardArgs<T> step;
    step.rows = batch;
    step.hidden = hidden;
    step.gates = read<compute_t<T>>(gates);
    step.bias_ih = read_row<T>(args.bias_ih);
    step.bias_hh = read_row<T>(args.bias_hh);
    step.parameters = step.bias_ih.from(0, cell.x.count() * hidden);
    step.c = read<T>(args.c_0);
    step.h_next = write<T>(h_next);
    step.c_next = write<T>(c_next);
    step.activations = write<T>(activations);
    launch_forward(cell, step, current_stream());
  });
  return {Tensor(), h_next, c_next, activations};
}

Gradients step_backward(const SequenceBackwardArgs& args) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1);
  const at::ScalarType dtype = args.input->scalar_type();
  const auto [want_input, want_h, want_c, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  const auto empty_if = [](bool want, const Tensor& like) {
    return want ? at::empty(like.sizes(), like.options()) : Tensor();
  };
  const Tensor d_input = empty_if(want_input, args.input);
  const Tensor d_h = empty_if(want_h, args.h_0);
  const int64_t batch = args.h_0->size(0);
  const auto options = args.input->options();
  const Tensor d_c = want_c ? at::empty({batch, cell.state_columns() * hidden}, options) : Tensor();
  const Tensor dz = at::empty({batch, cell.grad_columns() * hidden}, options);

  visit_dtype<c10::Half, c10::BFloat16>(dtype, [&]<typename T>(T*) {
    BackwardArgs<T, T> step;
    step.rows = batch;
    step.hidden = hidden;
    step.activations = read<T>(args.saved);
    step.parameters = read_row<T>(args.bias_ih).from(0, cell.x.count() * hidden);
    step.grad_h = read<T>(args.grad_h_n);
    step.grad_c = read<T>(args.grad_c_n);
    step.grad_gates = write<T>(dz);
    step.grad_c_prev = write<T>(d_c);
    launch_backward(cell, step, current_stream());
  });

  const Gemm gemm(dtype);
  const Weights weights = weights_of(args);
  const auto multiply = [&](const Tensor& to, SlotRange slots, const Tensor& slots_weights) {
    const Tensor a = slot_columns(dz, cell, slots, hidden), b = as_operand(slots_weights);
    gemm(operand(a), operand(b), result(to), /*accumulate=*/false);
  };
  if (want_input) multiply(d_input, cell.x, x_slots(weights.ih, cell));
  if (want_h) multiply(d_h, cell.h, h_slots(weights.hh, cell));

  const WeightGradients d_weights(args, options);
  const auto multiply_by =
      [&](const Tensor& tensor, const Tensor& to, SlotRange slots, const int* blocks) {
        if (!to.defined()) return;
        const Tensor b = as_operand(tensor);
        for_each_run(slots, blocks, [&](int slot, int count) {
          const Tensor c = to.narrow(0, blocks[slot] * hidden, count * hidden);
          SplitKGemm products(gemm, dtype, c);
          products.add(dz.narrow(1, slot * hidden, count * hidden), 0, b, 0, b.size(0));
          products.finish();
        });
      };
  const Weights parts = d_weights.parts(cell);
  multiply_by(args.h_0, parts.hh, cell.h, cell.h_blocks);
  multiply_by(args.input, parts.ih, cell.x, cell.x_blocks);
  // ATen's sum accumulates in float32, in a fixed order.
  const Tensor sums = want_bias_ih || want_bias_hh ? dz.sum(0) : Tensor();
  const auto [bias_ih, bias_hh] = bias_gradients(sums, cell, want_bias_ih, want_bias_hh);
  return {d_input, d_h, d_c, d_weights.weight_ih, d_weights.weight_hh, bias_ih, bias_hh};
}

}  // namespace lltm::cuda
