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
//     Gradients sequence_checkpointed_backward(const CheckpointedBackwardArgs&)
#pragma once

#include "op/check.h"
#include "op/checkpointed.h"
#include "op/operators.h"

#include <torch/library.h>

#include <utility>

namespace lltm {

// For a backend without a current device.
struct NoDeviceGuard {
  explicit NoDeviceGuard(at::Device) {}
};

template <typename Backend>
struct CheckedBackend {
  using DeviceGuard = typename Backend::DeviceGuard;

  static CellResult cell_forward(const CellArgs& args) {
    check_cell(args);
    const DeviceGuard guard(args.input.device());
    return Backend::cell_forward(args);
  }

  static Gradients cell_backward(const CellBackwardArgs& args) {
    check_cell_backward(args);
    const DeviceGuard guard(args.input.device());
    return Backend::cell_backward(args);
  }

  static SequenceResult sequence_forward(const SequenceArgs& args) {
    check_sequence(args);
    const DeviceGuard guard(args.input.device());
    return Backend::sequence_forward(args);
  }

  static Gradients sequence_backward(const SequenceBackwardArgs& args) {
    check_sequence_backward(args);
    const DeviceGuard guard(args.input.device());
    return Backend::sequence_backward(args);
  }

  static SequenceResult sequence_checkpointed_forward(const SequenceArgs& args) {
    check_sequence_checkpointed(args);
    const DeviceGuard guard(args.input.device());
    return Backend::sequence_forward(args);
  }

  static Gradients sequence_checkpointed_backward(const CheckpointedBackwardArgs& args) {
    check_sequence_checkpointed_backward(args);
    const DeviceGuard guard(args.input.device());
    if constexpr (requires { Backend::sequence_checkpointed_backward; }) {
      return Backend::sequence_checkpointed_backward(args);
    } else {
      return checkpointed_backward(args, Backend::sequence_forward, Backend::sequence_backward);
    }
  }

  static std::tuple<at::Tensor, at::Tensor> cell(const CellArgs& args) {
    auto [h_next, c_next, activations] = cell_forward(args);
    return {std::move(h_next), std::move(c_next)};
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence(const SequenceArgs& args) {
    auto [output, h_n, c_n, activations] = sequence_forward(args);
    return {std::move(output), std::move(h_n), std::move(c_n)};
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_checkpointed(
      const SequenceArgs& args) {
    auto [output, h_n, c_n, checkpoints] = sequence_checkpointed_forward(args);
    return {std::move(output), std::move(h_n), std::move(c_n)};
  }

  static at::Tensor prepack(const at::Tensor& weights, std::optional<at::ScalarType> dtype) {
    check_prepack(weights, dtype);
    const DeviceGuard guard(weights.device());
    return Backend::prepack(weights, dtype);
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence_prepacked(
      const SequenceArgs& args) {
    check_sequence_prepacked(args);
    const DeviceGuard guard(args.input.device());
    auto [output, h_n, c_n, activations] = Backend::sequence_prepacked(args);
    return {std::move(output), std::move(h_n), std::move(c_n)};
  }
};

// The operators that training runs.
template <typename Backend>
void register_training(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  m.impl("cell_forward", TORCH_FN((cell_op<Checked::cell_forward, /*save=*/true>)));
  m.impl("cell_backward", TORCH_FN(cell_backward_op<Checked::cell_backward>));
  m.impl("sequence_forward", TORCH_FN((sequence_op<Checked::sequence_forward, /*save=*/true>)));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_op<Checked::sequence_backward>));
  m.impl(
      "sequence_checkpointed_forward",
      TORCH_FN((sequence_checkpointed_op<Checked::sequence_checkpointed_forward, /*save=*/true>)));
  m.impl(
      "sequence_checkpointed_backward",
      TORCH_FN(sequence_checkpointed_backward_op<Checked::sequence_checkpointed_backward>));
}

// All operators that the backend implements.
template <typename Backend>
void register_backend(torch::Library& m) {
  using Checked = CheckedBackend<Backend>;
  register_training<Backend>(m);
  m.impl("cell", TORCH_FN(cell_op<Checked::cell>));
  m.impl("sequence", TORCH_FN(sequence_op<Checked::sequence>));
  m.impl(
      "sequence_checkpointed", TORCH_FN(sequence_checkpointed_op<Checked::sequence_checkpointed>));
  if constexpr (requires { Backend::prepack; }) {
    m.impl("prepack", TORCH_FN(Checked::prepack));
    m.impl("sequence_prepacked", TORCH_FN(sequence_op<Checked::sequence_prepacked>));
  }
}

}  // namespace lltm
