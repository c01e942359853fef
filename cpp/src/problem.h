// One layer and direction of a sequence, as an engine takes it: the arguments of
// the operators in library.cpp, already checked. Results are new contiguous
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace lltm {

// output, h_n, c_n, activations; activations is undefined unless asked for.
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, h_0, c_0, weights, bias; undefined unless asked for.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct ForwardProblem {
  const at::Tensor& input;
  const at::Tensor& h_0;
  const at::Tensor& c_0;
  const at::Tensor& weights;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& batch_sizes;
  bool reverse;
  bool save;  // the activations, for backward
};

// An undefined gradient is zero. `wanted` is in the order of Gradients.
struct BackwardProblem {
  const at::Tensor& grad_output;
  const at::Tensor& grad_h_n;
  const at::Tensor& grad_c_n;
  const at::Tensor& input;
  const at::Tensor& h_0;
  const at::Tensor& weights;
  const at::Tensor& output;
  const at::Tensor& activations;
  const std::optional<at::Tensor>& batch_sizes;
  bool reverse;
  std::array<bool, 5> wanted;
};

}  // namespace lltm
