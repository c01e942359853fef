// One step: two GEMMs and a kernel; backward a kernel, and a GEMM or two per gradient.
#include "cell/cell.h"
#include "common/tensor_views.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/weight_gradients.h"
#include "cuda/gemm/gemm.h"
#include "cuda/kernel/elementwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace lltm::cuda {

using at::Tensor;

StepResult step_forward(const StepArgs& args) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const auto options = args.input.options();
  const Tensor h_next = at::empty({batch, hidden}, options);
  const Tensor c_next = at::empty({batch, hidden}, options);
  const Tensor activations =
      args.save ? at::empty({batch, Cell::kSaved * hidden}, options) : Tensor();
  const Tensor gates =
      at::empty({batch, Cell::kGates * hidden}, options.dtype(compute_dtype(dtype)));

  const Tensor x = as_operand(args.input);
  const Tensor h = as_operand(args.h);
  const Tensor weights_h = as_operand(h_columns(args.weights, hidden));
  const Tensor weights_x = as_operand(x_columns(args.weights, hidden));
  const Gemm gemm(dtype);
  gemm(operand(x), transposed(operand(weights_x)), result(gates), /*accumulate=*/false);
  gemm(operand(h), transposed(operand(weights_h)), result(gates), /*accumulate=*/true);

  visit_dtype<c10::Half, c10::BFloat16>(dtype, [&]<typename T>(T*) {
    ForwardArgs<T> step;
    step.rows = batch;
    step.hidden = hidden;
    step.gates = read<compute_t<T>>(gates);
    step.bias = read_row<T>(args.bias);
    step.c = read<T>(args.c);
    step.h_next = write<T>(h_next);
    step.c_next = write<T>(c_next);
    step.activations = write<T>(activations);
    launch_forward(step, current_stream());
  });
  return {h_next, c_next, activations};
}

Gradients step_backward(const StepBackwardArgs& args) {
  const int64_t hidden = args.h.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const auto [want_input, want_h, want_c, want_weights, want_bias] = args.output_mask;
  const auto empty_if = [](bool want, const Tensor& like) {
    return want ? at::empty(like.sizes(), like.options()) : Tensor();
  };
  const Tensor d_input = empty_if(want_input, args.input);
  const Tensor d_h = empty_if(want_h, args.h);
  const Tensor d_c = empty_if(want_c, args.h);
  const Tensor d_weights = empty_if(want_weights, args.weights);
  const Tensor dz = at::empty({args.h.size(0), Cell::kGates * hidden}, args.input.options());

  visit_dtype<c10::Half, c10::BFloat16>(dtype, [&]<typename T>(T*) {
    BackwardArgs<T, T> step;
    step.rows = args.h.size(0);
    step.hidden = hidden;
    step.activations = read<T>(args.activations);
    step.grad_h = read<T>(args.grad_h);
    step.grad_c = read<T>(args.grad_c);
    step.grad_gates = write<T>(dz);
    step.grad_c_prev = write<T>(d_c);
    launch_backward(step, current_stream());
  });

  const Gemm gemm(dtype);
  if (want_input) {
    const Tensor weights_x = as_operand(x_columns(args.weights, hidden));
    gemm(operand(dz), operand(weights_x), result(d_input), /*accumulate=*/false);
  }
  if (want_h) {
    const Tensor weights_h = as_operand(h_columns(args.weights, hidden));
    gemm(operand(dz), operand(weights_h), result(d_h), /*accumulate=*/false);
  }
  if (want_weights) {
    const auto multiply_by = [&](const Tensor& tensor, const Tensor& to) {
      WeightGradientGemm products(gemm, dtype, to);
      products.add(dz, 0, as_operand(tensor), 0, tensor.size(0));
      products.finish();
    };
    multiply_by(args.h, h_columns(d_weights, hidden));
    multiply_by(args.input, x_columns(d_weights, hidden));
  }
  // ATen's sum adds in a fixed order, in float32.
  return {d_input, d_h, d_c, d_weights, want_bias ? dz.sum(0) : Tensor()};
}

}  // namespace lltm::cuda
