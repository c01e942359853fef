// Derivatives. First order, the common case, runs the fused kernels forward
// and backward. Everything beyond (double backward, forward mode, function
// transforms) runs the composite path, which ATen can differentiate.
#include "check.h"
#include "composite.h"

#include <ATen/core/dispatch/Dispatcher.h>
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

// A handle of an operator, looked up once.
#define LLTM_OP(name, signature)                                                              \
  [] {                                                                                        \
    static const auto handle =                                                                \
        c10::Dispatcher::singleton().findSchemaOrThrow("lltm::" name, "").typed<signature>(); \
    return handle;                                                                            \
  }()

using CellSignature = std::tuple<Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&);
using CellForwardSignature = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&);
using CellBackwardSignature = composite::Gradients(
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    std::array<bool, 5>);
using SequenceSignature = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    bool);
using SequenceForwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    bool);
using SequenceBackwardSignature = composite::Gradients(
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    bool,
    std::array<bool, 5>);

bool is_given(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor or_undefined(const std::optional<Tensor>& tensor) {
  return is_given(tensor) ? *tensor : Tensor();
}

std::optional<Tensor> given(const std::optional<Tensor>& tensor) {
  return is_given(tensor) ? tensor : std::nullopt;
}

std::optional<Tensor> or_nothing(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// Without its required arguments a call is an error, which the checks below the
// dispatcher report.
bool requires_grad(
    const std::array<std::reference_wrapper<const Tensor>, 4>& required,
    const std::optional<Tensor>& bias) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = is_given(bias) && bias->requires_grad();
  for (const Tensor& tensor : required) {
    if (!tensor.defined()) return false;
    any = any || tensor.requires_grad();
  }
  return any;
}

bool is_dual(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Whether a torch.func transform is active: its key in the thread's dispatch
// state says so.
bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// A transform is active, or an argument is a dual number of forward mode: both
// refuse a torch::autograd::Function.
bool needs_composite(
    const std::array<std::reference_wrapper<const Tensor>, 4>& required,
    const std::optional<Tensor>& bias) {
  return is_transformed() || std::any_of(required.begin(), required.end(), is_dual) ||
         (bias.has_value() && is_dual(*bias));
}

// The gradients are to be differentiated in their turn: backward was asked to
// record a graph, or stands itself in a transform or in forward mode.
bool is_differentiated(const variable_list& grads) {
  return at::GradMode::is_enabled() || is_transformed() ||
         std::any_of(grads.begin(), grads.end(), is_dual);
}

// Of input, h, c, weights and, if there is one, bias. Arguments that are not
// given have no place in the numbering of needs_input_grad.
std::array<bool, 5> wanted_gradients(const AutogradContext& context, bool has_bias) {
  std::array<bool, 5> wanted;
  for (size_t k = 0; k < 4; ++k) wanted[k] = context.needs_input_grad(k);
  wanted[4] = has_bias && context.needs_input_grad(4);
  return wanted;
}

struct CellFunction : torch::autograd::Function<CellFunction> {
  // Compiled autograd may trace backward: all that it reads is in the context.
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* context,
      const Tensor& input,
      const Tensor& h,
      const Tensor& c,
      const Tensor& weights,
      const std::optional<Tensor>& bias) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [h_next, c_next, activations] =
        LLTM_OP("cell_forward", CellForwardSignature).call(input, h, c, weights, bias);
    context->set_materialize_grads(false);
    // c and bias are needed only to differentiate again.
    context->save_for_backward({input, h, c, weights, or_undefined(bias), activations});
    return {h_next, c_next};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& input = saved[0];
    const Tensor& h = saved[1];
    const Tensor& c = saved[2];
    const Tensor& weights = saved[3];
    const std::optional<Tensor> bias = or_nothing(saved[4]);
    const auto mask = wanted_gradients(*context, bias.has_value());
    composite::Gradients result;
    if (is_differentiated(grads)) {
      // The saved activations are constants to autograd; computed anew from
      // the arguments, they are differentiable.
      const Tensor activations = std::get<2>(composite::cell_forward(input, h, c, weights, bias));
      result = composite::cell_backward(
          or_nothing(grads[0]), or_nothing(grads[1]), input, h, weights, activations, mask);
    } else {
      result =
          LLTM_OP("cell_backward", CellBackwardSignature)
              .call(or_nothing(grads[0]), or_nothing(grads[1]), input, h, weights, saved[5], mask);
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
      const std::optional<Tensor>& bias,
      const std::optional<Tensor>& batch_sizes,
      bool reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, h_n, c_n, activations] =
        LLTM_OP("sequence_forward", SequenceForwardSignature)
            .call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
    context->set_materialize_grads(false);
    context->saved_data["reverse"] = reverse;
    context->save_for_backward(
        {input,
         h_0,
         c_0,
         weights,
         or_undefined(bias),
         or_undefined(batch_sizes),
         output,
         activations});
    return {output, h_n, c_n};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor& input = saved[0];
    const Tensor& h_0 = saved[1];
    const Tensor& c_0 = saved[2];
    const Tensor& weights = saved[3];
    const std::optional<Tensor> bias = or_nothing(saved[4]);
    const std::optional<Tensor> batch_sizes = or_nothing(saved[5]);
    const bool reverse = context->saved_data["reverse"].toBool();
    const auto mask = wanted_gradients(*context, bias.has_value());
    composite::Gradients result;
    if (is_differentiated(grads)) {
      // As for the cell.
      const auto [output, h_n, c_n, activations] =
          composite::sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse);
      result = composite::sequence_backward(
          or_nothing(grads[0]),
          or_nothing(grads[1]),
          or_nothing(grads[2]),
          input,
          h_0,
          weights,
          output,
          activations,
          batch_sizes,
          reverse,
          mask);
    } else {
      result = LLTM_OP("sequence_backward", SequenceBackwardSignature)
                   .call(
                       or_nothing(grads[0]),
                       or_nothing(grads[1]),
                       or_nothing(grads[2]),
                       input,
                       h_0,
                       weights,
                       saved[6],
                       saved[7],
                       batch_sizes,
                       reverse,
                       mask);
    }
    auto& [d_input, d_h_0, d_c_0, d_weights, d_bias] = result;
    return {d_input, d_h_0, d_c_0, d_weights, d_bias, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  if (needs_composite({input, h, c, weights}, bias)) {
    check_cell(input, h, c, weights, bias);
    const auto [h_next, c_next, activations] = composite::cell_forward(input, h, c, weights, bias);
    return {h_next, c_next};
  }
  if (!requires_grad({input, h, c, weights}, bias)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return LLTM_OP("cell", CellSignature).call(input, h, c, weights, bias);
  }
  const variable_list result = CellFunction::apply(input, h, c, weights, given(bias));
  return {result[0], result[1]};
}

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  if (needs_composite({input, h_0, c_0, weights}, bias)) {
    check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
    const auto [output, h_n, c_n, activations] =
        composite::sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse);
    return {output, h_n, c_n};
  }
  if (!requires_grad({input, h_0, c_0, weights}, bias)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return LLTM_OP("sequence", SequenceSignature)
        .call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
  }
  const variable_list result =
      SequenceFunction::apply(input, h_0, c_0, weights, given(bias), given(batch_sizes), reverse);
  return {result[0], result[1], result[2]};
}

// A copy of the weights as they are now, and nothing to autograd.
Tensor prepack_detached(const Tensor& weights) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return LLTM_OP("prepack", Tensor(const Tensor&)).call(weights);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("prepack", TORCH_FN(prepack_detached));
  m.impl("cell", TORCH_FN(cell));
  m.impl("sequence", TORCH_FN(sequence));
  for (const char* op :
       {"cell_forward",
        "cell_backward",
        "sequence_prepacked",
        "sequence_forward",
        "sequence_backward"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace lltm
