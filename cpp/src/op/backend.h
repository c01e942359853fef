// How a backend becomes the operators of library.cpp: arguments are checked, their device is
// made the current one, and the backend computes. A backend is a type with
//     DeviceGuard                     constructed from a device
//     CellResult cell_forward(const CellArgs&)
//     Gradients cell_backward(const CellBackwardArgs&)
//     SequenceResult sequence_forward(const SequenceArgs&)
//     Gradients sequence_backward(const SequenceBackwardArgs&)
// and, unless the composite ones are good enough,
//     Tensor prepack(const Tensor& weights, std::optional<ScalarType> dtype)
//     SequenceResult sequence_prepacked(const SequenceArgs&)
// and, unless checkpointed.h is,
//     Gradients checkpointed_backward(const SequenceBackwardArgs&)
// which takes checkpoints: sequence_backward takes activations only.
#pragma once

#include "op/check.h"
#include "op/checkpointed.h"
#include "op/operators.h"

namespace lltm {

// For a backend without a current device.
struct NoDeviceGuard {
  explicit NoDeviceGuard(at::Device) {}
};

template <typename Backend>
struct CheckedBackend {
  using DeviceGuard = typename Backend::DeviceGuard;

  static CellResult cell_saving(bool save, CellArgs args) {
    check_cell(args);
    args.save = save;
    const DeviceGuard guard(args.input.device());
    return Backend::cell_forward(args);
  }

  static CellOutputs cell(const CellArgs& args) { return without_saved(cell_saving(false, args)); }

  static CellResult cell_forward(const CellArgs& args) { return cell_saving(true, args); }

  static Gradients cell_backward(const CellBackwardArgs& args) {
    check_cell_backward(args);
    const DeviceGuard guard(args.input.device());
    return Backend::cell_backward(args);
  }

  static SequenceResult sequence_saving(bool save, SequenceArgs args) {
    check_sequence(args);
    args.save = save;
    const DeviceGuard guard(args.input.device());
    return Backend::sequence_forward(args);
  }

  static SequenceOutputs sequence(const SequenceArgs& args) {
    return without_saved(sequence_saving(false, args));
  }

  static SequenceResult sequence_forward(const SequenceArgs& args) {
    return sequence_saving(true, args);
  }

  static Gradients sequence_backward(const SequenceBackwardArgs& args) {
    check_sequence_backward(args);
    const DeviceGuard guard(args.input.device());
    if (args.checkpoint_steps == 0) return Backend::sequence_backward(args);
    if constexpr (requires { Backend::checkpointed_backward; }) {
      return Backend::checkpointed_backward(args);
    } else {
      return checkpointed_backward(args, Backend::sequence_forward, Backend::sequence_backward);
    }
  }

  static at::Tensor prepack(const at::Tensor& weights, std::optional<at::ScalarType> dtype) {
    check_prepack(weights, dtype);
    const DeviceGuard guard(weights.device());
    return Backend::prepack(weights, dtype);
  }

  static SequenceOutputs sequence_prepacked(const SequenceInputs& args) {
    check_sequence_prepacked(args);
    const DeviceGuard guard(args.input.device());
    return without_saved(Backend::sequence_prepacked({args}));
  }
};

// The operators that training runs.
template <typename Backend>
void register_training(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  implement<Checked::cell_forward>(m, "cell_forward");
  implement<Checked::cell_backward>(m, "cell_backward");
  implement<Checked::sequence_forward>(m, "sequence_forward");
  implement<Checked::sequence_backward>(m, "sequence_backward");
}

// All operators that the backend implements.
template <typename Backend>
void register_backend(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  register_training<Backend>(m);
  implement<Checked::cell>(m, "cell");
  implement<Checked::sequence>(m, "sequence");
  if constexpr (requires { Backend::prepack; }) {
    m.impl("prepack", TORCH_FN(Checked::prepack));
    implement<Checked::sequence_prepacked>(m, "sequence_prepacked");
  }
}

}  // namespace lltm
