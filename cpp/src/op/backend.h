// Registers a backend as the operators of library.cpp. A backend is a type with
//     DeviceGuard                     constructed from a device
//     StepResult step_forward(const StepArgs&)
//     Gradients step_backward(const StepBackwardArgs&)
//     SequenceResult sequence_forward(const SequenceArgs&)
//     Gradients sequence_backward(const SequenceBackwardArgs&)
// and optionally, instead of the ATen fallback,
//     Tensor prepack(const CellInfo&, const Tensor& weight_ih, const Tensor& weight_hh, dtype)
// and, instead of checkpointed.h,
//     Gradients checkpointed_backward(const SequenceBackwardArgs&)
// which accepts checkpoints; sequence_backward accepts only activations.
//
// Arguments, results and gradients of a backend contain the engines' c (states.h).
#pragma once

#include "common/states.h"
#include "op/check.h"
#include "op/checkpointed.h"
#include "op/operators.h"

namespace lltm {

struct NoDeviceGuard {
  explicit NoDeviceGuard(at::Device) {}
};

// Omitted arguments have no gradient.
template <typename Args>
void want_gradients_of_given(Args& args) {
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = args.output_mask;
  c = c && args.cell->has_c();
  weight_hh = weight_hh && args.weight_hh.defined();
  bias_ih = bias_ih && args.bias_ih.defined();
  bias_hh = bias_hh && args.bias_hh.defined();
}

template <typename Backend>
struct CheckedBackend {
  using DeviceGuard = typename Backend::DeviceGuard;

  static StepResult forward(const StepArgs& args) {
    check_step(args);
    const DeviceGuard guard(args.input->device());
    return with_own_c(args, Backend::step_forward);
  }

  static StepOutputs step(const StepArgs& args) { return without_saved(forward(args)); }

  static StepResult step_forward(StepArgs args) {
    args.save = true;
    return forward(args);
  }

  static Gradients step_backward(StepBackwardArgs args) {
    check_step_backward(args);
    want_gradients_of_given(args);
    const DeviceGuard guard(args.input->device());
    return with_grad_of_h(args, Backend::step_backward);
  }

  static SequenceResult forward(const SequenceArgs& args) {
    check_sequence(args);
    const DeviceGuard guard(args.input->device());
    return with_own_c(args, Backend::sequence_forward);
  }

  static SequenceOutputs sequence(const SequenceArgs& args) { return without_saved(forward(args)); }

  static SequenceResult sequence_forward(SequenceArgs args) {
    args.save = true;
    return forward(args);
  }

  static Gradients sequence_backward(SequenceBackwardArgs args) {
    check_sequence_backward(args);
    want_gradients_of_given(args);
    const DeviceGuard guard(args.input->device());
    return with_grad_of_h(args, [](const SequenceBackwardArgs& a) {
      if (a.checkpoint_steps == 0) return Backend::sequence_backward(a);
      if constexpr (requires { Backend::checkpointed_backward; }) {
        return Backend::checkpointed_backward(a);
      } else {
        return checkpointed_backward(a, Backend::sequence_forward, Backend::sequence_backward);
      }
    });
  }

  static at::Tensor prepack(
      std::string_view cell,
      const at::Tensor& weight_ih,
      const std::optional<at::Tensor>& weight_hh,
      std::optional<at::ScalarType> dtype) {
    const CellName name(cell);
    check_prepack(name, weight_ih, or_undefined(weight_hh), dtype);
    const DeviceGuard guard(weight_ih.device());
    return Backend::prepack(*name, weight_ih, or_undefined(weight_hh), dtype);
  }
};

template <typename Backend>
void register_training(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  implement<Checked::step_forward>(m, "step_forward");
  implement<Checked::step_backward>(m, "step_backward");
  implement<Checked::sequence_forward>(m, "sequence_forward");
  implement<Checked::sequence_backward>(m, "sequence_backward");
}

template <typename Backend>
void register_backend(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  register_training<Backend>(m);
  implement<Checked::step>(m, "step");
  implement<Checked::sequence>(m, "sequence");
  if constexpr (requires { Backend::prepack; }) m.impl("prepack", TORCH_FN(Checked::prepack));
}

}  // namespace lltm
