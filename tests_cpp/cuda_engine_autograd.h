// The CUDA engine on the CPU, with cuda_on_host.cpp, as functions that autograd can go
// through: what autograd.cpp does for the operators, for the engine alone.
#pragma once

#include "cuda/engine/engine.h"
#include "op/checkpointed.h"
#include "testing.h"

#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace lltm_test {

inline lltm::SequenceArgs sequence_args(
    const Arguments& a, bool save, int64_t checkpoint_steps = 0) {
  return {{a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse}, checkpoint_steps, save};
}

// The five differentiable arguments come first. As in autograd.cpp, an undefined gradient is
// one that nobody asked for or gave.
inline lltm::OutputMask output_mask(const torch::autograd::AutogradContext& context, bool bias) {
  lltm::OutputMask mask;
  for (size_t k = 0; k < 4; ++k) mask[k] = context.needs_input_grad(k);
  mask[4] = bias && context.needs_input_grad(4);
  return mask;
}

inline Tensors as_list(const lltm::Gradients& gradients) {
  const auto& [d_input, d_h, d_c, d_weights, d_bias] = gradients;
  return {d_input, d_h, d_c, d_weights, d_bias};
}

struct EngineCell : torch::autograd::Function<EngineCell> {
  static Tensors forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h,
      const at::Tensor& c,
      const at::Tensor& weights,
      const std::optional<at::Tensor>& bias) {
    const auto [h_next, c_next, activations] =
        lltm::cuda::step_forward({{input, h, c, weights, bias}, /*save=*/true});
    context->set_materialize_grads(false);
    context->save_for_backward({input, h, c, weights, lltm::or_undefined(bias), activations});
    return {h_next, c_next};
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    const Tensors saved = context->get_saved_variables();
    return as_list(
        lltm::cuda::step_backward(
            {{saved[0], saved[1], saved[2], saved[3], saved[4]},
             saved[5],
             grads[0],
             grads[1],
             output_mask(*context, saved[4].defined())}));
  }
};

struct EngineSequence : torch::autograd::Function<EngineSequence> {
  static Tensors forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h_0,
      const at::Tensor& c_0,
      const at::Tensor& weights,
      const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& batch_sizes,
      bool reverse,
      int64_t checkpoint_steps) {
    const auto [output, h_n, c_n, for_backward] = lltm::cuda::sequence_forward(
        {{input, h_0, c_0, weights, bias, batch_sizes, reverse}, checkpoint_steps, /*save=*/true});
    context->set_materialize_grads(false);
    context->save_for_backward(
        {input,
         h_0,
         c_0,
         weights,
         lltm::or_undefined(bias),
         lltm::or_undefined(batch_sizes),
         output,
         for_backward});
    context->saved_data["reverse"] = reverse;
    context->saved_data["checkpoint_steps"] = checkpoint_steps;
    return {output, h_n, c_n};
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    const Tensors saved = context->get_saved_variables();
    const lltm::SequenceBackwardArgs args = {
        {saved[0],
         saved[1],
         saved[2],
         saved[3],
         saved[4],
         saved[5],
         context->saved_data["reverse"].toBool()},
        context->saved_data["checkpoint_steps"].toInt(),
        saved[6],
        saved[7],
        grads[0],
        grads[1],
        grads[2],
        output_mask(*context, saved[4].defined())};
    Tensors gradients = as_list(
        args.checkpoint_steps == 0
            ? lltm::cuda::sequence_backward(args)
            : lltm::checkpointed_backward(
                  args, lltm::cuda::sequence_forward, lltm::cuda::sequence_backward));
    gradients.resize(8);
    return gradients;
  }
};

inline Tensors engine_cell(const Arguments& a) {
  return EngineCell::apply(a.input, a.h, a.c, a.weights, a.bias);
}

inline Function engine_checkpointed(int64_t checkpoint_steps) {
  return [checkpoint_steps](const Arguments& a) {
    return EngineSequence::apply(
        a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, checkpoint_steps);
  };
}

inline Tensors engine_sequence(const Arguments& a) {
  return engine_checkpointed(0)(a);
}

}  // namespace lltm_test
