// Shapes, states, layers and directions of modules: for the operators `layer` and `layer_step`,
// which Python modules call, and for the C++ modules (nn.cpp).
#pragma once

#include "api/packed_rows.h"
#include "cell/cell.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string_view>
#include <tuple>
#include <vector>

namespace lltm {

struct LayerOptions;  // lltm/nn.h

// Checks the options that do not depend on the kind of module.
void check_options(const CellInfo& cell, const LayerOptions& options);
void print_options(std::ostream& stream, const LayerOptions& options);

// Runs a single-step module. States are h and the others, in descriptor order; empty means initial.
// Parameters are as for the operator layer_step.
std::vector<at::Tensor> run_step(
    const CellInfo& cell,
    const at::Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    int64_t input_size,
    int64_t hidden_size);

struct LayerCall {
  const CellInfo& cell;
  const LayerOptions& options;
  bool training, prepacked;
  at::TensorList parameters;  // of all directions, as for the operator layer
  LayerInput input;
  at::TensorList states;  // as for run_step
};
// Returns the output, in the layout of the input, and the states, in the order of the caller's
// batch, followed by the cell's other outputs.
std::tuple<at::Tensor, std::vector<at::Tensor>> run_layer(const LayerCall& call);

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
