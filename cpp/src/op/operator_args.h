// The arguments of the operators in library.cpp as one struct each. An absent tensor is
// undefined; an undefined gradient is zero. A backend gets them checked (backend.h); its
// results are new contiguous tensors.
#pragma once

#include "common/tensor_views.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace lltm {

// h', c', activations; the last is undefined unless asked for.
using CellResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// output, h_n, c_n, and what backward needs: activations or checkpoints; the last is undefined
// unless asked for.
using SequenceResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, h, c, weights, bias; undefined unless asked for.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Which of them are asked for.
using OutputMask = std::array<bool, 5>;

// References, because a copy of every tensor would show in the time of a small step: the
// tensors belong to the caller, and a struct does not outlive the call that it is made for.
struct CellArgs {
  const at::Tensor &input, &h, &c, &weights, &bias;
  bool save;  // the activations, for backward
};

struct CellBackwardArgs {
  const at::Tensor &grad_h, &grad_c, &input, &h, &weights, &activations;
  OutputMask output_mask;
};

// One layer and direction of a sequence.
struct SequenceArgs {
  const at::Tensor &input, &h_0, &c_0, &weights, &bias, &batch_sizes;
  bool reverse;
  bool save;
  // 0, or how many steps apart the checkpoints are that are saved in place of the activations.
  int64_t checkpoint_steps = 0;

  bool saves_activations() const { return save && checkpoint_steps == 0; }
  // What Checkpoints (checkpoints.h) take.
  int64_t saved_checkpoint_steps() const { return save ? checkpoint_steps : 0; }
  bool saves_checkpoints() const { return saved_checkpoint_steps() > 0; }
};

struct SequenceBackwardArgs {
  const at::Tensor &grad_output, &grad_h_n, &grad_c_n;
  const at::Tensor &input, &h_0, &weights, &output, &activations, &batch_sizes;
  bool reverse;
  OutputMask output_mask;
  // One segment of a sequence: the gradients of the states and those of weights and bias, which
  // are carried on to the next segment, are of the compute dtype, both as arguments and results.
  bool segment = false;

  at::ScalarType carried_dtype() const {
    return segment ? compute_dtype(input.scalar_type()) : input.scalar_type();
  }
};

struct CheckpointedBackwardArgs {
  const at::Tensor &grad_output, &grad_h_n, &grad_c_n;
  const at::Tensor &input, &h_0, &c_0, &weights, &bias, &output, &checkpoints;
  int64_t checkpoint_steps;
  const at::Tensor& batch_sizes;
  bool reverse;
  OutputMask output_mask;
};

// For the two forms in which an absent tensor reaches us.
inline const at::Tensor& or_undefined(const std::optional<at::Tensor>& tensor) {
  static const at::Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}
inline std::optional<at::Tensor> or_nullopt(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace lltm
