// The operators of library.cpp between the flat arguments that the dispatcher passes and the
// structs of operator_args.h.
#pragma once

#include "op/operator_args.h"

#include <lltm/ops.h>

namespace lltm {

// ---- An operator from `run`, a function of a struct ----------------------------

template <auto run, bool save = false>
auto cell_op(
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& c,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias) {
  return run(CellArgs{input, h, c, weights, or_undefined(bias), save});
}

template <auto run>
Gradients cell_backward_op(
    const std::optional<at::Tensor>& grad_h,
    const std::optional<at::Tensor>& grad_c,
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& weights,
    const at::Tensor& activations,
    OutputMask output_mask) {
  return run(
      CellBackwardArgs{
          or_undefined(grad_h), or_undefined(grad_c), input, h, weights, activations, output_mask});
}

template <auto run, bool save = false>
auto sequence_op(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse) {
  return run(
      SequenceArgs{
          input, h_0, c_0, weights, or_undefined(bias), or_undefined(batch_sizes), reverse, save});
}

template <auto run>
Gradients sequence_backward_op(
    const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_h_n,
    const std::optional<at::Tensor>& grad_c_n,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& weights,
    const at::Tensor& output,
    const at::Tensor& activations,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse,
    OutputMask output_mask) {
  return run(
      SequenceBackwardArgs{
          or_undefined(grad_output),
          or_undefined(grad_h_n),
          or_undefined(grad_c_n),
          input,
          h_0,
          weights,
          output,
          activations,
          or_undefined(batch_sizes),
          reverse,
          output_mask});
}

template <auto run, bool save = false>
auto sequence_checkpointed_op(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    int64_t checkpoint_steps,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse) {
  return run(
      SequenceArgs{
          input,
          h_0,
          c_0,
          weights,
          or_undefined(bias),
          or_undefined(batch_sizes),
          reverse,
          save,
          checkpoint_steps});
}

template <auto run>
Gradients sequence_checkpointed_backward_op(
    const std::optional<at::Tensor>& grad_output,
    const std::optional<at::Tensor>& grad_h_n,
    const std::optional<at::Tensor>& grad_c_n,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias,
    const at::Tensor& output,
    const at::Tensor& checkpoints,
    int64_t checkpoint_steps,
    const std::optional<at::Tensor>& batch_sizes,
    bool reverse,
    OutputMask output_mask) {
  return run(
      CheckpointedBackwardArgs{
          or_undefined(grad_output),
          or_undefined(grad_h_n),
          or_undefined(grad_c_n),
          input,
          h_0,
          c_0,
          weights,
          or_undefined(bias),
          output,
          checkpoints,
          checkpoint_steps,
          or_undefined(batch_sizes),
          reverse,
          output_mask});
}

// ---- An operator called with a struct -----------------------------------------

// `op` takes what lltm::cell takes.
template <typename Op>
auto call(const Op& op, const CellArgs& args) {
  return op(args.input, args.h, args.c, args.weights, or_nullopt(args.bias));
}

// `op` takes what lltm::sequence takes.
template <typename Op>
auto call(const Op& op, const SequenceArgs& args) {
  return op(
      args.input,
      args.h_0,
      args.c_0,
      args.weights,
      or_nullopt(args.bias),
      or_nullopt(args.batch_sizes),
      args.reverse);
}

// `op` takes what lltm::sequence_checkpointed takes.
template <typename Op>
auto call_checkpointed(const Op& op, const SequenceArgs& args) {
  return op(
      args.input,
      args.h_0,
      args.c_0,
      args.weights,
      or_nullopt(args.bias),
      args.checkpoint_steps,
      or_nullopt(args.batch_sizes),
      args.reverse);
}

// The operators that training runs, through the dispatcher as those of lltm/ops.h.
CellResult cell_forward(const CellArgs& args);
Gradients cell_backward(const CellBackwardArgs& args);
SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);
SequenceResult sequence_checkpointed_forward(const SequenceArgs& args);
Gradients sequence_checkpointed_backward(const CheckpointedBackwardArgs& args);

}  // namespace lltm
