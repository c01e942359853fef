// Shapes, states, layers and directions of modules: for the operators `layer` and `layer_step`,
// which Python modules call, and for the C++ modules (nn.cpp).
#pragma once

#include "api/initial_states.h"
#include "api/packed_rows.h"
#include "cell/cell.h"
#include "common/operator_args.h"
#include "op/interceptors.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace lltm {

// Single-step modules. States are h and the others, in descriptor order; empty means initial.
struct StepModule {
  std::vector<at::Tensor> forward(const at::Tensor& input, at::TensorList states) const;

  const CellInfo& cell;
  int64_t input_size, hidden_size;
  at::TensorList parameters;  // as for layer_step
};

// Layers and their prepacked forms.
struct LayerModule {
  struct Result {
    at::Tensor output;
    std::vector<at::Tensor> states;
    std::vector<at::Tensor> more;  // outputs, of cells that return several

    std::vector<at::Tensor> states_and_more() && {
      states.insert(states.end(), more.begin(), more.end());
      return std::move(states);
    }
  };

  // reset is undefined or has the batch shape of the input: (T, B), (B, T) or (T).
  Result forward(const at::Tensor& input, at::TensorList states, const at::Tensor& reset) const;
  // reset is undefined or (N). The output is packed; states are in the order of the caller's batch.
  Result forward(const PackedRows& input, at::TensorList states, const at::Tensor& reset) const;

  const CellInfo& cell;
  int64_t input_size, hidden_size, num_layers;
  bool batch_first, bidirectional;
  double dropout, recurrent_dropout;  // of this call: 0 outside training
  int64_t checkpoint_steps;
  bool prepacked;
  // Of all directions, in the order of h_0 and h_n, as for the operator layer.
  at::TensorList parameters;
  bool has_bias;

 private:
  // As for the operator sequence: (T, B, I), or (N, I) with batch_sizes.
  struct Rows {
    at::Tensor input;
    std::optional<at::Tensor> batch_sizes;
    at::Tensor reset;
  };

  int64_t directions_each() const { return bidirectional ? 2 : 1; }
  int64_t directions() const { return num_layers * directions_each(); }
  int64_t parameters_each() const;
  // P if the parameters end with weight_hr, otherwise 0.
  int64_t proj_size() const;
  int64_t size_of_h() const;
  void check(const at::Tensor& input) const;
  void check_projection(const at::Tensor& input) const;
  at::TensorList parameters_of(int64_t k) const;
  int64_t columns_of_input(int64_t k) const;
  // Concatenates checked states, (L*D, B, H) each. With a projection, h_0 is (L*D, B, P), or
  // undefined without states.
  ConcatenatedState initial_state(
      const at::Tensor& input, at::TensorList states, const c10::SymInt& batch, bool batched) const;
  // Without interceptors, views are created without the dispatcher.
  Result run(Rows rows, const ConcatenatedState& initial, const Interceptors& interceptors) const;
  // They refer to `rows`.
  SequenceArgs args_of(
      int64_t k,
      bool reverse,
      const ConcatenatedState& initial,
      const Rows& rows,
      bool unobserved) const;
  SequenceOutputs run_direction(
      int64_t k, const SequenceArgs& args, const Interceptors& interceptors) const;
  SequenceOutputs run_projected(
      int64_t k, const SequenceArgs& args, const Interceptors& interceptors) const;
  // Leaves the first of the cell's outputs, and returns the others.
  std::vector<at::Tensor> split_output(at::Tensor& output) const;
};

// Schemas: library.cpp.
std::vector<at::Tensor> layer_step(
    std::string_view cell,
    const at::Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    int64_t input_size,
    int64_t hidden_size);
std::tuple<at::Tensor, std::vector<at::Tensor>> layer(
    std::string_view cell,
    const at::Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    bool has_bias,
    int64_t input_size,
    int64_t hidden_size,
    int64_t num_layers,
    bool batch_first,
    bool bidirectional,
    double dropout,
    double recurrent_dropout,
    int64_t checkpoint_steps,
    bool prepacked,
    const std::optional<at::Tensor>& batch_sizes,
    const std::optional<at::Tensor>& sorted_indices,
    const std::optional<at::Tensor>& unsorted_indices,
    const std::optional<at::Tensor>& reset);

}  // namespace lltm
