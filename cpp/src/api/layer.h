// What the modules do around the operators: shapes, states, the order of layers and directions. The
// modules of C++ (nn.cpp) and those of Python (python/plain_calls.cpp) share it.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace lltm {

// (h, c), as in lltm/nn.h.
using State = std::tuple<at::Tensor, at::Tensor>;

// Weights and bias of a cell, or of one direction of one layer; bias is undefined without bias.
using Parameters = std::pair<at::Tensor, at::Tensor>;

// LLTMCell::forward.
struct LLTM_API StepModule {
  State forward(const at::Tensor& input, const std::optional<State>& state) const;

  int64_t input_size, hidden_size;
  const Parameters& parameters;
};

// LLTM::forward, and that of the prepacked form.
struct LLTM_API LayerModule {
  std::tuple<at::Tensor, State> forward(
      const at::Tensor& input, const std::optional<State>& state) const;

  // Checks that the input is defined, and of the parameters' dtype and device; for packed input
  // too.
  void check_input(const at::Tensor& input) const;
  // (h_0, c_0), each (L*D, B, H), checked.
  State initial_state(
      const at::Tensor& input,
      const std::optional<State>& state,
      int64_t batch,
      bool batched) const;
  // Every layer and direction over (T, B, I), or (N, I) with batch_sizes.
  std::tuple<at::Tensor, State> run(
      at::Tensor input, const State& initial, const std::optional<at::Tensor>& batch_sizes) const;

  int64_t input_size, hidden_size, num_layers;
  bool batch_first, bidirectional;
  double dropout;
  bool training;
  int64_t checkpoint_steps;
  bool prepacked;
  c10::ArrayRef<Parameters> directions;  // in the order of h_0 and h_n

 private:
  // The k-th direction over (T, B, .), or (N, .) with batch_sizes; returns output, h_n, c_n.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> run_direction(
      int64_t k,
      const at::Tensor& input,
      const at::Tensor& h_0,
      const at::Tensor& c_0,
      const std::optional<at::Tensor>& batch_sizes,
      bool reverse) const;
};

}  // namespace lltm
