// Registers a backend as the operators of library.cpp. A backend is a type with
//     DeviceGuard                     constructed from a device
//     SequenceResult forward(const SequenceArgs&)
//     Gradients backward(const SequenceBackwardArgs&)
// and optionally, instead of the ATen fallback,
//     Tensor prepack(const CellInfo&, const Tensor& weight_ih, const Tensor& weight_hh, dtype)
// and, instead of checkpointed.h,
//     Gradients checkpointed_backward(const SequenceBackwardArgs&)
// which accepts checkpoints; backward accepts only activations.
//
// Arguments, results and gradients of a backend contain the engines' c (backend_call.h).
#pragma once

#include "common/backend_call.h"
#include "op/check.h"
#include "op/checkpointed.h"
#include "op/operators.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lltm {

struct NoDeviceGuard {
  explicit NoDeviceGuard(at::Device) {}
};

// Omitted arguments have no gradient.
inline void want_gradients_of_passed(SequenceBackwardArgs& args) {
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = args.output_mask;
  c = c && args.cell->has_c();
  weight_hh = weight_hh && args.weight_hh.defined();
  bias_ih = bias_ih && args.bias_ih.defined();
  bias_hh = bias_hh && args.bias_hh.defined();
}

// The ATen operations of a backend have the dtypes of its arguments.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

template <typename Backend>
struct CheckedBackend {
  using DeviceGuard = typename Backend::DeviceGuard;

  static SequenceResult run(const SequenceArgs& args) {
    check(args);
    const WithoutAutocast without_autocast;
    const DeviceGuard guard(args.input->device());
    return call_forward(args, Backend::forward);
  }

  static SequenceOutputs call(const SequenceArgs& args) { return without_saved(run(args)); }

  static SequenceResult forward(SequenceArgs args) {
    args.save = true;
    return run(args);
  }

  static Gradients backward(SequenceBackwardArgs args) {
    check(args);
    want_gradients_of_passed(args);
    const WithoutAutocast without_autocast;
    const DeviceGuard guard(args.input->device());
    return call_backward(args, [](const SequenceBackwardArgs& a) {
      if (a.checkpoint_steps == 0) return Backend::backward(a);
      if constexpr (requires { Backend::checkpointed_backward; }) {
        return Backend::checkpointed_backward(a);
      } else {
        return checkpointed_backward(a, Backend::forward, Backend::backward);
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
    const WithoutAutocast without_autocast;
    const DeviceGuard guard(weight_ih.device());
    return Backend::prepack(*name, weight_ih, or_undefined(weight_hh), dtype);
  }
};

template <typename Backend>
void register_training(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  implement<Checked::forward>(m, "sequence_forward");
  implement<Checked::backward>(m, "sequence_backward");
}

template <typename Backend>
void register_backend(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  register_training<Backend>(m);
  implement<Checked::call>(m, "sequence");
  if constexpr (requires { Backend::prepack; }) m.impl("prepack", TORCH_FN(Checked::prepack));
}

}  // namespace lltm
