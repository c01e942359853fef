#include "op/composite.h"

#include "cell/cell.h"
#include "common/checkpoints.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "op/backend.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <vector>

namespace lltm::composite {
namespace {

using at::Tensor;

// The tensor in its compute dtype.
Tensor widened(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(compute_dtype(tensor.scalar_type())) : tensor;
}

Tensor widened_or_zeros(const Tensor& grad, const Tensor& like) {
  return widened(grad.defined() ? grad : at::zeros_like(like));
}

// X W^T + b.
Tensor project(const Tensor& X, const Tensor& weights, const Tensor& bias) {
  return at::linear(X, weights, or_nullopt(bias));
}

// weights (G * H, H+I) as its parts for h, (G * H, H), and for the input, (G * H, I).
std::tuple<Tensor, Tensor> split_weights(const Tensor& weights) {
  const c10::SymInt hidden = weights.sym_size(0) / Cell::kGates;
  const auto parts = weights.split_with_sizes_symint({hidden, weights.sym_size(1) - hidden}, 1);
  return {parts[0], parts[1]};
}

// The parts of (rows, count * H), each widened.
template <size_t count>
void unpack(const Tensor& packed, Tensor (&parts)[count]) {
  const std::vector<Tensor> chunks = packed.chunk(count, 1);
  std::transform(chunks.begin(), chunks.end(), parts, widened);
}

// One step, from the pre-activations (rows, G * H) and c (rows, H).
CellResult step(const Tensor& gates, const Tensor& c, bool save) {
  Tensor z[Cell::kGates];
  unpack(gates, z);
  const at::ScalarType dtype = c.scalar_type();
  const auto [h_next, c_next, saved] = Cell::forward(z, widened(c));
  return {
      h_next.to(dtype),
      c_next.to(dtype),
      save ? at::cat(at::TensorList(saved), 1).to(dtype) : Tensor()};
}

// Gradients of the pre-activations (rows, G * H) and of c (rows, H), not rounded.
std::tuple<Tensor, Tensor> step_backward(
    const Tensor& activations, const Tensor& grad_h, const Tensor& grad_c) {
  Tensor saved[Cell::kSaved];
  unpack(activations, saved);
  const auto [dz, dc] = Cell::backward(saved, grad_h, grad_c);
  return {at::cat(at::TensorList(dz), 1), dc};
}

// `state` with its first rows replaced by `rows`.
Tensor with_rows(const Tensor& rows, const Tensor& state) {
  return rows.size(0) == state.size(0) ? rows : at::cat({rows, state.slice(0, rows.size(0))}, 0);
}

// The states before step k: rows of the output of the step before, and of the initial state
// where a row starts at step k.
Tensor state_before(
    const std::vector<Step>& steps, size_t k, const Tensor& h_0, const Tensor& output_rows) {
  const Tensor initial = h_0.narrow(0, 0, steps[k].rows);
  if (k == 0) return initial;
  const int64_t carried = carried_rows(steps, k);
  return with_rows(output_rows.narrow(0, steps[k - 1].offset, carried), initial);
}

}  // namespace

CellResult cell_forward(const CellArgs& args) {
  const Tensor X = widened(at::cat({args.h, args.input}, 1));
  return step(project(X, widened(args.weights), widened(args.bias)), args.c, args.save);
}

Gradients cell_backward(const CellBackwardArgs& args) {
  const Tensor& input = args.input;
  const Tensor& h = args.h;
  const at::ScalarType dtype = input.scalar_type();
  const auto [dz, dc] = step_backward(
      args.activations, widened_or_zeros(args.grad_h, h), widened_or_zeros(args.grad_c, h));
  const auto [weights_h, weights_x] = split_weights(widened(args.weights));
  const auto [d_input, d_h, d_c, d_weights, d_bias] = args.output_mask;
  return {
      d_input ? at::matmul(dz, weights_x).to(dtype) : Tensor(),
      d_h ? at::matmul(dz, weights_h).to(dtype) : Tensor(),
      d_c ? dc.to(dtype) : Tensor(),
      d_weights ? at::matmul(dz.t(), widened(at::cat({h, input}, 1))).to(dtype) : Tensor(),
      d_bias ? dz.sum(0).to(dtype) : Tensor()};
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  const Tensor& input = args.input;
  const int64_t hidden = args.h_0.size(1);
  const auto [weights_h, weights_x] = split_weights(widened(args.weights));
  const Tensor projected = project(widened(flat_rows(input)), weights_x, widened(args.bias));
  std::vector<Step> steps = plan_steps(input, args.batch_sizes, args.reverse);
  // Without steps, one of no rows: so every result depends on every argument, as those of the
  // kernels do for autograd.
  const bool none = steps.empty();
  if (none) steps.push_back({0, 0});

  Tensor h = args.h_0;
  Tensor c = args.c_0;
  std::vector<Tensor> outputs;
  std::vector<Tensor> activations;
  std::vector<Tensor> checkpoints;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    if (!none && has_checkpoint(k, args.saved_checkpoint_steps())) checkpoints.push_back(c);
    const Tensor gates = projected.narrow(0, offset, rows) +
                         at::matmul(widened(h.narrow(0, 0, rows)), weights_h.t());
    const auto [h_next, c_next, saved] =
        step(gates, c.narrow(0, 0, rows), args.saves_activations());
    outputs.push_back(h_next);
    activations.push_back(saved);
    h = with_rows(h_next, h);
    c = with_rows(c_next, c);
  }
  if (args.reverse) {
    std::reverse(outputs.begin(), outputs.end());
    std::reverse(activations.begin(), activations.end());
  }
  const auto saved = [&] {
    if (args.saves_activations()) return at::cat(activations, 0);
    if (!args.saves_checkpoints()) return Tensor();
    return none ? at::empty({0, c.size(0), hidden}, c.options()) : at::stack(checkpoints);
  };
  std::vector<int64_t> output_shape = input.sizes().vec();
  output_shape.back() = hidden;
  return {at::cat(outputs, 0).view(output_shape), h, c, saved()};
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  const Tensor& input = args.input;
  const Tensor& h_0 = args.h_0;
  const at::ScalarType dtype = input.scalar_type();
  const at::ScalarType carried_dtype = args.carried_dtype();
  const Tensor weights = widened(args.weights);
  const auto [weights_h, weights_x] = split_weights(weights);
  const Tensor x = flat_rows(input);
  const Tensor output_rows = flat_rows(args.output);
  const Tensor grad_rows = flat_rows(widened_or_zeros(args.grad_output, args.output));
  const std::vector<Step> steps = plan_steps(input, args.batch_sizes, args.reverse);
  const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] = args.output_mask;

  Tensor dh = widened_or_zeros(args.grad_h_n, h_0);
  Tensor dc = widened_or_zeros(args.grad_c_n, h_0);
  Tensor dw = at::zeros_like(weights);
  Tensor db = weights.new_zeros({weights.size(0)});
  std::vector<Tensor> dx(steps.size());
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    const auto [dz, dc_prev] = step_backward(
        args.saved.narrow(0, offset, rows),
        dh.narrow(0, 0, rows) + grad_rows.narrow(0, offset, rows),
        dc.narrow(0, 0, rows));
    dh = with_rows(at::matmul(dz, weights_h), dh);
    dc = with_rows(dc_prev, dc);
    if (d_input) dx[k] = at::matmul(dz, weights_x).to(dtype);
    if (d_weights) {
      const Tensor h = state_before(steps, k, h_0, output_rows);
      dw = dw + at::matmul(dz.t(), widened(at::cat({h, x.narrow(0, offset, rows)}, 1)));
    }
    if (d_bias) db = db + dz.sum(0);
  }
  if (args.reverse) std::reverse(dx.begin(), dx.end());
  const auto input_gradient = [&] {
    return steps.empty() ? at::zeros_like(input) : at::cat(dx, 0).view(input.sizes());
  };
  const auto state_gradient = [&](const Tensor& gradient) {
    return gradient.to(carried_dtype, /*non_blocking=*/false, /*copy=*/steps.empty());
  };
  return {
      d_input ? input_gradient() : Tensor(),
      d_h_0 ? state_gradient(dh) : Tensor(),
      d_c_0 ? state_gradient(dc) : Tensor(),
      d_weights ? dw.to(carried_dtype) : Tensor(),
      d_bias ? db.to(carried_dtype) : Tensor()};
}

Gradients cell_backward_anew(const CellBackwardArgs& args) {
  const auto [h_next, c_next, activations] = cell_forward({args, /*save=*/true});
  return cell_backward({args, activations, args.grad_h, args.grad_c, args.output_mask});
}

Gradients sequence_backward_anew(const SequenceBackwardArgs& args) {
  const auto [output, h_n, c_n, activations] =
      sequence_forward({args, /*checkpoint_steps=*/0, /*save=*/true});
  return sequence_backward(
      {args,
       /*checkpoint_steps=*/0,
       output,
       activations,
       args.grad_output,
       args.grad_h_n,
       args.grad_c_n,
       args.output_mask});
}

namespace {

struct Composite {
  using DeviceGuard = NoDeviceGuard;
  static constexpr auto cell_forward = composite::cell_forward;
  static constexpr auto cell_backward = composite::cell_backward;
  static constexpr auto sequence_forward = composite::sequence_forward;
  static constexpr auto sequence_backward = composite::sequence_backward;

  static Tensor prepack(const Tensor& weights, std::optional<at::ScalarType> dtype) {
    TORCH_CHECK(
        !dtype.has_value(),
        "lltm::prepack: expected weights on the CPU to quantise, got some on device ",
        weights.device());
    return weights.clone(at::MemoryFormat::Contiguous);
  }

  static SequenceResult sequence_prepacked(const SequenceArgs& args) {
    TORCH_CHECK(
        args.weights.scalar_type() == args.input.scalar_type(),
        "lltm::sequence_prepacked: expected weights prepacked on device ",
        args.input.device(),
        ", got some that were prepacked on the CPU");
    // Through the dispatcher: a device with fused kernels runs those.
    auto [output, h_n, c_n] = op::sequence(args);
    return {output, h_n, c_n, Tensor()};
  }
};

// Without anything that is written in place.
struct Mapped : Composite {
  static constexpr auto checkpointed_backward = composite::sequence_backward_anew;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  register_backend<Composite>(m);
}

// Under torch.vmap the operators of training run as ATen operations, which have vmap rules.
// vmap.cpp has the rules of the operators that users call.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  register_training<Mapped>(m);
}

}  // namespace lltm::composite
