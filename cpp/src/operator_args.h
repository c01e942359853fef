// The arguments of the operators in library.cpp as one struct each. An absent tensor is
// undefined; an undefined gradient is zero. A backend gets them checked (backend.h); its
// results are new contiguous tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace lltm {

// h', c', activations; the last is undefined unless asked for.
using CellResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// output, h_n, c_n, activations; the last is undefined unless asked for.
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
};

struct SequenceBackwardArgs {
  const at::Tensor &grad_output, &grad_h_n, &grad_c_n;
  const at::Tensor &input, &h_0, &weights, &output, &activations, &batch_sizes;
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
