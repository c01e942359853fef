// Derivatives. First derivatives, the common case, run the fused kernels forward
// and backward. Double backward, forward mode and function transforms run the
// composite path, which ATen can differentiate.
#include "op/check.h"
#include "op/composite.h"
#include "op/operators.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>

namespace lltm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Required = std::array<std::reference_wrapper<const Tensor>, 4>;

// False if a required argument is missing: that is an error, which the checks of the
// backend report.
bool requires_grad(const Required& required, const Tensor& bias) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = bias.defined() && bias.requires_grad();
  for (const Tensor& tensor : required) {
    if (!tensor.defined()) return false;
    any = any || tensor.requires_grad();
  }
  return any;
}

bool is_dual(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Whether a torch.func transform is active: then the thread's dispatch state has its
// key.
bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether a transform is active or an argument is a dual number of forward mode. A
// torch::autograd::Function supports neither.
bool needs_composite(const Required& required, const Tensor& bias) {
  return is_transformed() || std::any_of(required.begin(), required.end(), is_dual) ||
         is_dual(bias);
}

// Whether the gradients themselves will be differentiated: backward records a graph,
// or runs in a transform or in forward mode.
bool is_differentiated(const variable_list& grads) {
  return at::GradMode::is_enabled() || is_transformed() ||
         std::any_of(grads.begin(), grads.end(), is_dual);
}

// Of input, h, c, weights, bias. needs_input_grad numbers only the tensors that were
// given, so an absent bias has no number.
OutputMask wanted_gradients(const AutogradContext& context, bool has_bias) {
  OutputMask wanted;
  for (size_t k = 0; k < 4; ++k) wanted[k] = context.needs_input_grad(k);
  wanted[4] = has_bias && context.needs_input_grad(4);
  return wanted;
}

struct CellFunction : torch::autograd::Function<CellFunction> {
  // Compiled autograd may trace backward, because backward reads the context only.
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* context,
      const Tensor& input,
      const Tensor& h,
      const Tensor& c,
      const Tensor& weights,
      const std::optional<Tensor>& bias_or_none) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor& bias = or_undefined(bias_or_none);
    auto [h_next, c_next, activations] = cell_forward({input, h, c, weights, bias, /*save=*/true});
    context->set_materialize_grads(false);
    // c and bias are saved for double backward only.
    context->save_for_backward({input, h, c, weights, bias, activations});
    return {h_next, c_next};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &h = saved[1], &c = saved[2], &weights = saved[3];
    const Tensor &bias = saved[4], &activations = saved[5];
    const OutputMask mask = wanted_gradients(*context, bias.defined());
    Gradients result;
    if (is_differentiated(grads)) {
      // To autograd the saved activations are constants. Recomputed from the
      // arguments, they are differentiable.
      const auto [h_next, c_next, anew] =
          composite::cell_forward({input, h, c, weights, bias, /*save=*/true});
      result = composite::cell_backward({grads[0], grads[1], input, h, weights, anew, mask});
    } else {
      result = cell_backward({grads[0], grads[1], input, h, weights, activations, mask});
    }
    auto& [d_input, d_h, d_c, d_weights, d_bias] = result;
    return {d_input, d_h, d_c, d_weights, d_bias};
  }
};

struct SequenceFunction : torch::autograd::Function<SequenceFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* context,
      const Tensor& input,
      const Tensor& h_0,
      const Tensor& c_0,
      const Tensor& weights,
      const std::optional<Tensor>& bias_or_none,
      const std::optional<Tensor>& batch_sizes_or_none,
      bool reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor& bias = or_undefined(bias_or_none);
    const Tensor& batch_sizes = or_undefined(batch_sizes_or_none);
    auto [output, h_n, c_n, activations] =
        sequence_forward({input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true});
    context->set_materialize_grads(false);
    context->saved_data["reverse"] = reverse;
    context->save_for_backward({input, h_0, c_0, weights, bias, batch_sizes, output, activations});
    return {output, h_n, c_n};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &h_0 = saved[1], &c_0 = saved[2], &weights = saved[3];
    const Tensor &bias = saved[4], &batch_sizes = saved[5];
    const bool reverse = context->saved_data["reverse"].toBool();
    const OutputMask mask = wanted_gradients(*context, bias.defined());
    const auto gradients_by = [&](const auto& compute, const Tensor& output, const Tensor& a) {
      return compute(
          SequenceBackwardArgs{
              grads[0],
              grads[1],
              grads[2],
              input,
              h_0,
              weights,
              output,
              a,
              batch_sizes,
              reverse,
              mask});
    };
    Gradients result;
    if (is_differentiated(grads)) {
      // As for the cell.
      const auto [output, h_n, c_n, activations] = composite::sequence_forward(
          {input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true});
      result = gradients_by(composite::sequence_backward, output, activations);
    } else {
      result = gradients_by(sequence_backward, saved[6], saved[7]);
    }
    auto& [d_input, d_h_0, d_c_0, d_weights, d_bias] = result;
    return {d_input, d_h_0, d_c_0, d_weights, d_bias, Tensor(), Tensor()};
  }
};

struct CheckpointedSequenceFunction : torch::autograd::Function<CheckpointedSequenceFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* context,
      const Tensor& input,
      const Tensor& h_0,
      const Tensor& c_0,
      const Tensor& weights,
      const std::optional<Tensor>& bias_or_none,
      int64_t checkpoint_steps,
      const std::optional<Tensor>& batch_sizes_or_none,
      bool reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor& bias = or_undefined(bias_or_none);
    const Tensor& batch_sizes = or_undefined(batch_sizes_or_none);
    auto [output, h_n, c_n, checkpoints] = sequence_checkpointed_forward(
        {input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true, checkpoint_steps});
    context->set_materialize_grads(false);
    context->saved_data["checkpoint_steps"] = checkpoint_steps;
    context->saved_data["reverse"] = reverse;
    context->save_for_backward({input, h_0, c_0, weights, bias, batch_sizes, output, checkpoints});
    return {output, h_n, c_n};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& bias = saved[4];
    const CheckpointedBackwardArgs args = {
        grads[0],
        grads[1],
        grads[2],
        saved[0],
        saved[1],
        saved[2],
        saved[3],
        bias,
        saved[6],
        saved[7],
        context->saved_data["checkpoint_steps"].toInt(),
        saved[5],
        context->saved_data["reverse"].toBool(),
        wanted_gradients(*context, bias.defined())};
    // As for the cell.
    const auto [d_input, d_h_0, d_c_0, d_weights, d_bias] =
        is_differentiated(grads) ? composite::sequence_checkpointed_backward(args)
                                 : sequence_checkpointed_backward(args);
    return {d_input, d_h_0, d_c_0, d_weights, d_bias, Tensor(), Tensor(), Tensor()};
  }
};

// Takes flat arguments and not CellArgs, so that bias reaches the kernel as the optional
// that it is, without a copy.
std::tuple<Tensor, Tensor> cell_autograd(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias_or_none) {
  const Tensor& bias = or_undefined(bias_or_none);
  if (needs_composite({input, h, c, weights}, bias)) {
    const CellArgs args{input, h, c, weights, bias, /*save=*/false};
    check_cell(args);
    const auto [h_next, c_next, activations] = composite::cell_forward(args);
    return {h_next, c_next};
  }
  if (!requires_grad({input, h, c, weights}, bias)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return cell(input, h, c, weights, bias_or_none);
  }
  const variable_list result = CellFunction::apply(input, h, c, weights, or_nullopt(bias));
  return {result[0], result[1]};
}

std::tuple<Tensor, Tensor, Tensor> sequence_autograd(const SequenceArgs& args) {
  const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, checkpoint_steps] = args;
  if (needs_composite({input, h_0, c_0, weights}, bias)) {
    check_sequence(args);
    const auto [output, h_n, c_n, activations] = composite::sequence_forward(args);
    return {output, h_n, c_n};
  }
  if (!requires_grad({input, h_0, c_0, weights}, bias)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call(sequence, args);
  }
  const variable_list result = SequenceFunction::apply(
      input, h_0, c_0, weights, or_nullopt(bias), or_nullopt(batch_sizes), reverse);
  return {result[0], result[1], result[2]};
}

std::tuple<Tensor, Tensor, Tensor> sequence_checkpointed_autograd(const SequenceArgs& args) {
  const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, checkpoint_steps] = args;
  if (needs_composite({input, h_0, c_0, weights}, bias)) {
    check_sequence_checkpointed(args);
    const auto [output, h_n, c_n, activations] = composite::sequence_forward(args);
    return {output, h_n, c_n};
  }
  if (!requires_grad({input, h_0, c_0, weights}, bias)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_checkpointed(sequence_checkpointed, args);
  }
  const variable_list result = CheckpointedSequenceFunction::apply(
      input,
      h_0,
      c_0,
      weights,
      or_nullopt(bias),
      checkpoint_steps,
      or_nullopt(batch_sizes),
      reverse);
  return {result[0], result[1], result[2]};
}

// Packed weights have no derivative.
Tensor prepack_autograd(const Tensor& weights, std::optional<at::ScalarType> dtype) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return prepack(weights, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("prepack", TORCH_FN(prepack_autograd));
  m.impl("cell", TORCH_FN(cell_autograd));
  m.impl("sequence", TORCH_FN(sequence_op<sequence_autograd>));
  m.impl(
      "sequence_checkpointed", TORCH_FN(sequence_checkpointed_op<sequence_checkpointed_autograd>));
  for (const char* op :
       {"cell_forward",
        "cell_backward",
        "sequence_prepacked",
        "sequence_forward",
        "sequence_backward",
        "sequence_checkpointed_forward",
        "sequence_checkpointed_backward"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace lltm
