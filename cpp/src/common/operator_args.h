// The arguments of the operators in library.cpp, each operator's as one struct. Besides the schema
// this is the only list of them: flat() names what an operator takes, in the order of its schema,
// and operators.h makes the dispatcher's signatures of that. To add an argument: a member, its
// place in flat(), and the schema.
//
// An absent tensor is undefined; an undefined gradient is zero. A backend gets arguments checked
// (backend.h); its results are new contiguous tensors.
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

// h', c'; output, h_n, c_n. c' and c_n are empty, (0,), where the cell has no c.
using StepOutputs = std::tuple<at::Tensor, at::Tensor>;
using SequenceOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Last what backward needs, undefined unless asked for: the activations, of a sequence also
// checkpoints in their place.
using StepResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using SequenceResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, h, c, weight_ih, weight_hh, bias_ih, bias_hh; undefined unless asked for.
using Gradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Which of them are asked for.
using OutputMask = std::array<bool, 7>;

// For the two forms in which an absent tensor reaches us.
inline const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}
inline const at::Tensor& or_undefined(const at::Tensor& tensor) {
  return tensor;
}
inline std::optional<at::Tensor> or_nullopt(at::Tensor tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt;
}

// A tensor among the arguments, read as a tensor also where it may be absent. It refers to a tensor
// of the caller's, which outlives it, because a copy of every tensor would show in the time of a
// small step; a temporary it keeps.
template <typename Flat>  // at::Tensor, or an optional one: what the dispatcher passes
class TensorArgument {
 public:
  TensorArgument() = default;
  TensorArgument(const Flat& given) : given_(&given) {}
  TensorArgument(Flat&& temporary) : own_(std::move(temporary)) {}
  TensorArgument(const Flat&&) = delete;
  TensorArgument(at::Tensor tensor)
    requires(!std::is_same_v<Flat, at::Tensor>)
      : own_(or_nullopt(std::move(tensor))) {}

  const Flat& flat() const { return given_ != nullptr ? *given_ : own_; }
  const at::Tensor& operator*() const { return or_undefined(flat()); }
  const at::Tensor* operator->() const { return &**this; }
  operator const at::Tensor&() const { return **this; }
  bool defined() const { return (**this).defined(); }

 private:
  const Flat* given_ = nullptr;
  Flat own_;
};
using RequiredTensor = TensorArgument<at::Tensor>;
using OptionalTensor = TensorArgument<std::optional<at::Tensor>>;

// What the k-th of the states in the c of the engines (cell.h) begins with where nothing is given.
inline double first_value(const CellInfo& cell, int k) {
  const int own = k - (cell.reads_h ? 1 : 0);
  return cell.programs == nullptr || own < 0 ? 0 : cell.programs->initial_states[own];
}

// Of the caller: a struct does not outlive the call that it is made for. The same call with some
// arguments replaced is a copy to which these are assigned.
//
// Without weight_hh, weight_ih is the joined matrix [weight_hh, weight_ih], and without bias_hh
// there is one bias.
struct StepInputs {
  CellName cell;
  RequiredTensor input, h;
  OptionalTensor c;
  RequiredTensor weight_ih;
  OptionalTensor weight_hh = {}, bias_ih = {}, bias_hh = {};

  auto flat() const { return std::tie(cell, input, h, c, weight_ih, weight_hh, bias_ih, bias_hh); }

  // By names that every struct has.
  const RequiredTensor& state_h() const { return h; }
  OptionalTensor& state_c() { return c; }
};

struct StepArgs : StepInputs {
  // No argument of the operators: whether to return the activations, for backward.
  bool save = false;
};

struct StepBackwardArgs : StepInputs {
  RequiredTensor activations;
  OptionalTensor grad_h = {}, grad_c = {};
  OutputMask output_mask = {};

  auto flat() const {
    return std::tuple_cat(StepInputs::flat(), std::tie(activations, grad_h, grad_c, output_mask));
  }

  OptionalTensor& grad_of_c() { return grad_c; }
};

// One layer and direction of a sequence.
struct SequenceInputs {
  CellName cell;
  RequiredTensor input, h_0;
  OptionalTensor c_0;
  RequiredTensor weight_ih;
  OptionalTensor weight_hh = {}, bias_ih = {}, bias_hh = {}, batch_sizes = {};
  bool reverse = false;
  OptionalTensor reset = {};
  // 0, or how many steps apart the checkpoints are that are saved in place of the activations.
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

  const RequiredTensor& state_h() const { return h_0; }
  OptionalTensor& state_c() { return c_0; }
  // Whether bytes from prepack stand in the place of weight_ih, without weight_hh.
  bool prepacked() const { return weight_ih->scalar_type() == at::kByte; }
};

struct SequenceArgs : SequenceInputs {
  // No argument of the operators: whether to return activations or checkpoints, for backward.
  bool save = false;

  bool saves_activations() const { return save && checkpoint_steps == 0; }
  // What Checkpoints (checkpoints.h) take.
  int64_t saved_checkpoint_steps() const { return save ? checkpoint_steps : 0; }
  bool saves_checkpoints() const { return saved_checkpoint_steps() > 0; }
};

struct SequenceBackwardArgs : SequenceInputs {
  RequiredTensor output, saved;
  OptionalTensor grad_output = {}, grad_h_n = {}, grad_c_n = {};
  OutputMask output_mask = {};
  // No argument of the operator. One segment of a sequence: the gradients of the states and those
  // of weights and bias, which are carried on to the next segment, are of the compute dtype, both
  // as arguments and results.
  bool segment = false;

  auto flat() const {
    return std::tuple_cat(
        SequenceInputs::flat(),
        std::tie(output, saved, grad_output, grad_h_n, grad_c_n, output_mask));
  }

  OptionalTensor& grad_of_c() { return grad_c_n; }

  at::ScalarType carried_dtype() const {
    return segment ? compute_dtype(input->scalar_type()) : input->scalar_type();
  }
};

}  // namespace lltm
