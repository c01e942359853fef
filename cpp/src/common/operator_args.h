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
#include <ATen/ops/cat.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

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

// What engines call c (cell.h): the user's, with h before it where the cell reads that; or c, of an
// engine that calls another.
inline at::Tensor state_c(const CellInfo& cell, const at::Tensor& h, const at::Tensor& c) {
  if (!cell.reads_h) return c;
  if (!cell.has_c()) return c.defined() ? c : h;
  return c.sym_size(1) == h.sym_size(1) * cell.states ? at::cat({h, c}, 1) : c;
}

// What the k-th of the states in it begins with where nothing is given.
inline double first_value(const CellInfo& cell, int k) {
  const int own = k - (cell.reads_h ? 1 : 0);
  return cell.programs == nullptr || own < 0 ? 0 : cell.programs->initial_states[own];
}

// References, because a copy of every tensor would show in the time of a small step: the
// tensors belong to the caller, and a struct does not outlive the call that it is made for.
//
// Without weight_hh, weight_ih is the joined matrix [weight_hh, weight_ih], and without bias_hh
// there is one bias.
struct StepInputs {
  CellName cell;
  const at::Tensor &input, &h;
  OptionalTensor c;
  const at::Tensor& weight_ih;
  OptionalTensor weight_hh, bias_ih, bias_hh;

  auto flat() const { return std::tie(cell, input, h, c, weight_ih, weight_hh, bias_ih, bias_hh); }

  at::Tensor state_c() const { return lltm::state_c(*cell, h, c); }
};

struct StepArgs : StepInputs {
  // No argument of the operators: whether to return the activations, for backward.
  bool save = false;
};

struct StepBackwardArgs : StepInputs {
  const at::Tensor& activations;
  OptionalTensor grad_h, grad_c;
  OutputMask output_mask;

  auto flat() const {
    return std::tuple_cat(StepInputs::flat(), std::tie(activations, grad_h, grad_c, output_mask));
  }

  const at::Tensor& state_h() const { return h; }
  OptionalTensor& grad_of_c() { return grad_c; }
  const at::Tensor& grad_of_c() const { return grad_c; }
};

// One layer and direction of a sequence.
struct SequenceInputs {
  CellName cell;
  const at::Tensor &input, &h_0;
  OptionalTensor c_0;
  const at::Tensor& weight_ih;
  OptionalTensor weight_hh, bias_ih, bias_hh, batch_sizes;
  bool reverse;
  OptionalTensor reset;
  // 0, or how many steps apart the checkpoints are that are saved in place of the activations.
  int64_t checkpoint_steps;
  OptionalTensor recurrent_mask;

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

  at::Tensor state_c() const { return lltm::state_c(*cell, h_0, c_0); }
  // Whether bytes from prepack stand in the place of weight_ih, without weight_hh.
  bool prepacked() const { return weight_ih.scalar_type() == at::kByte; }
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
        std::tie(output, saved, grad_output, grad_h_n, grad_c_n, output_mask));
  }

  const at::Tensor& state_h() const { return h_0; }
  OptionalTensor& grad_of_c() { return grad_c_n; }
  const at::Tensor& grad_of_c() const { return grad_c_n; }

  at::ScalarType carried_dtype() const {
    return segment ? compute_dtype(input.scalar_type()) : input.scalar_type();
  }
};

// ---- the same call with some arguments replaced ----
//
// References cannot be assigned anew, so these are copies; each lists all members. The tensors
// passed must outlive the result. Two more lists are in vmap.cpp, which replaces every tensor. No
// member has a default, so that a list that lacks one does not compile.

// With other weights.
inline SequenceArgs with_weights(
    const SequenceArgs& args, const at::Tensor& weight_ih, const at::Tensor& weight_hh = {}) {
  return {
      {args.cell,
       args.input,
       args.h_0,
       args.c_0,
       weight_ih,
       weight_hh,
       args.bias_ih,
       args.bias_hh,
       args.batch_sizes,
       args.reverse,
       args.reset,
       args.checkpoint_steps,
       args.recurrent_mask},
      args.save};
}

// With other rows of the batch or other steps, and nothing saved.
inline SequenceInputs for_rows(
    const SequenceInputs& args,
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& batch_sizes,
    const at::Tensor& reset,
    const at::Tensor& recurrent_mask) {
  return {
      args.cell,
      input,
      h_0,
      c_0,
      args.weight_ih,
      args.weight_hh,
      args.bias_ih,
      args.bias_hh,
      batch_sizes,
      args.reverse,
      reset,
      /*checkpoint_steps=*/0,
      recurrent_mask};
}

// One step with the parameters of a sequence.
inline StepInputs as_step(
    const SequenceInputs& args, const at::Tensor& input, const at::Tensor& h, const at::Tensor& c) {
  return {args.cell, input, h, c, args.weight_ih, args.weight_hh, args.bias_ih, args.bias_hh};
}

}  // namespace lltm
