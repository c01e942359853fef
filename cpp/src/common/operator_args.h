// The operators' arguments (library.cpp). flat() lists them in schema order, for the signatures in
// operators.h.
//
// An omitted tensor is undefined, an undefined gradient zero. Backends get checked arguments and
// return new contiguous tensors.
#pragma once

#include "cell/cell.h"
#include "cell/registry.h"
#include "common/tensor_views.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lltm {

// (output, h_n, c_n), and activations or checkpoints for backward, undefined unless requested. c_n
// has shape (0,) if the cell has no c. So has the output of a step, whose results are h_n and c_n;
// backends may return any.
using SequenceOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using SequenceResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Gradients of input, h, c, weight_ih, weight_hh, bias_ih, bias_hh; undefined unless requested.
// Backends return them in the arguments' dtype or the compute dtype; backend_call.h rounds them.
using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OutputMask = std::array<bool, 7>;

inline const at::Tensor kUndefined;
inline const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? *tensor : kUndefined;
}
inline const at::Tensor& or_undefined(const at::Tensor& tensor) {
  return tensor;
}
inline std::optional<at::Tensor> or_nullopt(at::Tensor tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt;
}

// An optional or other tensor that reads as a tensor. Refers to the caller's, because copying would
// be noticeable in a small step, but stores temporaries.
template <typename Flat>  // the dispatcher's type: at::Tensor or optional
class TensorArgument {
 public:
  TensorArgument() = default;
  TensorArgument(const Flat& passed) : passed_(&passed) {}
  TensorArgument(Flat&& temporary) : temporary_(std::move(temporary)) {}
  TensorArgument(const Flat&&) = delete;
  TensorArgument(at::Tensor tensor)
    requires(!std::is_same_v<Flat, at::Tensor>)
      : temporary_(or_nullopt(std::move(tensor))) {}

  const Flat& flat() const { return passed_ != nullptr ? *passed_ : temporary_; }
  const at::Tensor& operator*() const { return or_undefined(flat()); }
  const at::Tensor* operator->() const { return &**this; }
  operator const at::Tensor&() const { return **this; }
  bool defined() const { return (**this).defined(); }

 private:
  const Flat* passed_ = nullptr;
  Flat temporary_;
};
using RequiredTensor = TensorArgument<at::Tensor>;
using OptionalTensor = TensorArgument<std::optional<at::Tensor>>;

// Must not outlive the call: refers to the caller's tensors. Without weight_hh, weight_ih is
// [weight_hh, weight_ih]. Without bias_hh there is a single bias. A single step is a sequence with
// T = 1 without that dimension: input (B, I), reset (B).
struct SequenceInputs {
  CellName cell;
  RequiredTensor input, h_0;
  OptionalTensor c_0;
  RequiredTensor weight_ih;
  OptionalTensor weight_hh = {}, bias_ih = {}, bias_hh = {}, batch_sizes = {};
  bool reverse = false;
  OptionalTensor reset = {};
  // 0 saves the activations instead.
  int64_t checkpoint_steps = 0;
  OptionalTensor recurrent_mask = {};

  auto flat() const {
    return std::tie(
        cell,
        input,
        h_0,
        c_0,
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        batch_sizes,
        reverse,
        reset,
        checkpoint_steps,
        recurrent_mask);
  }

  // Tensors with a batch dimension before the last, (..., B, .), and as the last, (..., B).
  auto batched() { return std::tie(input, h_0, c_0, recurrent_mask); }
  auto batched() const { return std::tie(input, h_0, c_0, recurrent_mask); }
  auto batched_elements() { return std::tie(reset); }
  auto batched_elements() const { return std::tie(reset); }

  bool is_step() const { return input.defined() && input->dim() == 2 && !batch_sizes.defined(); }
  bool prepacked() const { return weight_ih->scalar_type() == at::kByte; }
};

struct SequenceArgs : SequenceInputs {
  // Not an operator argument.
  bool save = false;

  bool saves_activations() const { return save && checkpoint_steps == 0; }
  int64_t saved_checkpoint_steps() const { return save ? checkpoint_steps : 0; }
  bool saves_checkpoints() const { return saved_checkpoint_steps() > 0; }
};

struct SequenceBackwardArgs : SequenceInputs {
  RequiredTensor output, saved;
  OptionalTensor grad_output = {}, grad_h_n = {}, grad_c_n = {};
  OutputMask output_mask = {};
  // Not an operator argument: for backends, output and grad_output have only h, and this has the
  // gradients of the states in the output (backend_call.h).
  at::Tensor grad_states = {};

  auto flat() const {
    return std::tuple_cat(
        SequenceInputs::flat(),
        std::tie(output, saved, grad_output, grad_h_n, grad_c_n, output_mask));
  }

  // Between the segments of a sequence (checkpointed.h), gradients of 16-bit states are float32.
  bool has_wide_gradients() const {
    const auto wide = [&](const at::Tensor& gradient) {
      return gradient.defined() && gradient.scalar_type() != input->scalar_type();
    };
    return wide(grad_h_n) || wide(grad_c_n);
  }
};

}  // namespace lltm
