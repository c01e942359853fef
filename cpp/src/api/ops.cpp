// The operators as C++ functions, each of them one typed call into the dispatcher. A function
// looks up the handle of its operator once.
#include "op/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace lltm {
namespace {

using at::Tensor;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

// ---- what users call: lltm/ops.h ----------------------------------------------

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  static const auto op = find_op<decltype(cell)>("lltm::cell");
  return op.call(input, h, c, weights, bias);
}

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op = find_op<decltype(sequence)>("lltm::sequence");
  return op.call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

std::tuple<Tensor, Tensor, Tensor> sequence_checkpointed(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    int64_t checkpoint_steps,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op = find_op<decltype(sequence_checkpointed)>("lltm::sequence_checkpointed");
  return op.call(input, h_0, c_0, weights, bias, checkpoint_steps, batch_sizes, reverse);
}

Tensor prepack(const Tensor& weights, std::optional<at::ScalarType> dtype) {
  static const auto op = find_op<decltype(prepack)>("lltm::prepack");
  return op.call(weights, dtype);
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op = find_op<decltype(sequence_prepacked)>("lltm::sequence_prepacked");
  return op.call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

// ---- what training runs: operators.h ------------------------------------------

CellResult cell_forward(const CellArgs& args) {
  static const auto op = find_op<decltype(cell_op<cell_forward>)>("lltm::cell_forward");
  return op.call(args.input, args.h, args.c, args.weights, or_nullopt(args.bias));
}

Gradients cell_backward(const CellBackwardArgs& args) {
  static const auto op = find_op<decltype(cell_backward_op<cell_backward>)>("lltm::cell_backward");
  return op.call(
      or_nullopt(args.grad_h),
      or_nullopt(args.grad_c),
      args.input,
      args.h,
      args.weights,
      args.activations,
      args.output_mask);
}

SequenceResult sequence_forward(const SequenceArgs& args) {
  static const auto op = find_op<decltype(sequence_op<sequence_forward>)>("lltm::sequence_forward");
  return op.call(
      args.input,
      args.h_0,
      args.c_0,
      args.weights,
      or_nullopt(args.bias),
      or_nullopt(args.batch_sizes),
      args.reverse);
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  static const auto op =
      find_op<decltype(sequence_backward_op<sequence_backward>)>("lltm::sequence_backward");
  return op.call(
      or_nullopt(args.grad_output),
      or_nullopt(args.grad_h_n),
      or_nullopt(args.grad_c_n),
      args.input,
      args.h_0,
      args.weights,
      args.output,
      args.activations,
      or_nullopt(args.batch_sizes),
      args.reverse,
      args.output_mask);
}

SequenceResult sequence_checkpointed_forward(const SequenceArgs& args) {
  static const auto op = find_op<decltype(sequence_checkpointed_op<sequence_checkpointed_forward>)>(
      "lltm::sequence_checkpointed_forward");
  return call_checkpointed([&](const auto&... flat) { return op.call(flat...); }, args);
}

Gradients sequence_checkpointed_backward(const CheckpointedBackwardArgs& args) {
  static const auto op =
      find_op<decltype(sequence_checkpointed_backward_op<sequence_checkpointed_backward>)>(
          "lltm::sequence_checkpointed_backward");
  return op.call(
      or_nullopt(args.grad_output),
      or_nullopt(args.grad_h_n),
      or_nullopt(args.grad_c_n),
      args.input,
      args.h_0,
      args.c_0,
      args.weights,
      or_nullopt(args.bias),
      args.output,
      args.checkpoints,
      args.checkpoint_steps,
      or_nullopt(args.batch_sizes),
      args.reverse,
      args.output_mask);
}

}  // namespace lltm
