// The arguments of the operators in library.cpp, each operator's as one struct. Besides the schema
// this is the only list of them: flat() names what an operator takes, in the order of its schema,
// and operators.h makes the dispatcher's signatures of that. To add an argument: a member, its
// place in flat(), and the schema.
//
// An absent tensor is undefined; an undefined gradient is zero. A backend gets arguments checked
// (backend.h); its results are new contiguous tensors.
#pragma once

#include "common/tensor_views.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace lltm {

// h', c'; output, h_n, c_n.
using CellOutputs = std::tuple<at::Tensor, at::Tensor>;
using SequenceOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Last what backward needs, undefined unless asked for: the activations, of a sequence also
// checkpoints in their place.
using CellResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using SequenceResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, h, c, weights, bias; undefined unless asked for.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Which of them are asked for.
using OutputMask = std::array<bool, 5>;

// For the two forms in which an absent tensor reaches us.
inline const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}
inline std::optional<at::Tensor> or_nullopt(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// An argument that may be absent, to be read as a tensor. An optional is referred to, as tensors
// are below.
class OptionalTensor {
 public:
  OptionalTensor(const std::optional<at::Tensor>& tensor) : given_(&tensor) {}
  OptionalTensor(const at::Tensor& tensor) : own_(or_nullopt(tensor)) {}

  const std::optional<at::Tensor>& optional() const { return given_ != nullptr ? *given_ : own_; }
  operator const at::Tensor&() const { return or_undefined(optional()); }
  const at::Tensor* operator->() const { return &or_undefined(optional()); }
  bool defined() const { return or_undefined(optional()).defined(); }

 private:
  const std::optional<at::Tensor>* given_ = nullptr;
  std::optional<at::Tensor> own_;
};

// References, because a copy of every tensor would show in the time of a small step: the
// tensors belong to the caller, and a struct does not outlive the call that it is made for.
struct CellInputs {
  const at::Tensor &input, &h, &c, &weights;
  OptionalTensor bias;

  auto flat() const { return std::tie(input, h, c, weights, bias); }
};

struct CellArgs : CellInputs {
  // No argument of the operators: whether to return the activations, for backward.
  bool save = false;
};

struct CellBackwardArgs : CellInputs {
  const at::Tensor& activations;
  OptionalTensor grad_h, grad_c;
  OutputMask output_mask;

  auto flat() const {
    return std::tuple_cat(CellInputs::flat(), std::tie(activations, grad_h, grad_c, output_mask));
  }
};

// One layer and direction of a sequence. These alone are the arguments of sequence_prepacked.
struct SequenceInputs {
  const at::Tensor &input, &h_0, &c_0, &weights;
  OptionalTensor bias, batch_sizes;
  bool reverse;

  auto flat() const { return std::tie(input, h_0, c_0, weights, bias, batch_sizes, reverse); }
};

struct SequenceArgs : SequenceInputs {
  // 0, or how many steps apart the checkpoints are that are saved in place of the activations.
  int64_t checkpoint_steps = 0;
  // No argument of the operators: whether to return either of them, for backward.
  bool save = false;

  auto flat() const { return std::tuple_cat(SequenceInputs::flat(), std::tie(checkpoint_steps)); }

  bool saves_activations() const { return save && checkpoint_steps == 0; }
  // What Checkpoints (checkpoints.h) take.
  int64_t saved_checkpoint_steps() const { return save ? checkpoint_steps : 0; }
  bool saves_checkpoints() const { return saved_checkpoint_steps() > 0; }
};

struct SequenceBackwardArgs : SequenceInputs {
  int64_t checkpoint_steps;
  const at::Tensor &output, &saved;
  OptionalTensor grad_output, grad_h_n, grad_c_n;
  OutputMask output_mask;
  // No argument of the operator. One segment of a sequence: the gradients of the states and those
  // of weights and bias, which are carried on to the next segment, are of the compute dtype, both
  // as arguments and results.
  bool segment = false;

  auto flat() const {
    return std::tuple_cat(
        SequenceInputs::flat(),
        std::tie(checkpoint_steps, output, saved, grad_output, grad_h_n, grad_c_n, output_mask));
  }

  at::ScalarType carried_dtype() const {
    return segment ? compute_dtype(input.scalar_type()) : input.scalar_type();
  }
};

// The same call with other weights.
inline SequenceArgs with_weights(const SequenceArgs& args, const at::Tensor& weights) {
  return {
      {args.input, args.h_0, args.c_0, weights, args.bias, args.batch_sizes, args.reverse},
      args.checkpoint_steps,
      args.save};
}

}  // namespace lltm
