#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace lltm {

// Returns the number per direction.
inline int64_t count_parameters(const CellInfo& cell, bool has_bias, bool prepacked) {
  const int64_t matrices = cell.concatenated || prepacked ? 1 : 2;
  return matrices + (!has_bias ? 0 : cell.concatenated ? 1 : 2) + cell.parameters;
}

// Pre-activations in `slots` with biases in modules.
int64_t count_biases(const CellInfo& cell, const SlotRange& slots);

// The parameters are appended to bias_ih. Missing biases are zero.
std::array<at::Tensor, 2> biases_and_parameters(
    const CellInfo& cell,
    bool has_bias,
    size_t matrices,
    int64_t hidden_size,
    at::TensorList parameters);

// weight_ih may be a concatenated or prepacked matrix.
template <typename Inputs>
void set_parameters(
    Inputs& args, bool has_bias, bool prepacked, int64_t hidden_size, at::TensorList parameters) {
  const CellInfo& cell = *args.cell;
  const size_t matrices = cell.concatenated || prepacked ? 1 : 2;
  args.weight_ih = parameters[0];
  if (matrices == 2) args.weight_hh = parameters[1];
  if (cell.parameters > 0 || (has_bias && cell.without_bias != 0)) {
    auto [bias_ih, bias_hh] =
        biases_and_parameters(cell, has_bias, matrices, hidden_size, parameters);
    args.bias_ih = std::move(bias_ih);
    args.bias_hh = std::move(bias_hh);
  } else if (has_bias) {
    args.bias_ih = parameters[matrices];
    if (!cell.concatenated) args.bias_hh = parameters[matrices + 1];
  }
}

// Biases and custom parameters are concatenated, so their shapes, dtypes and devices must match.
void check_custom_parameters(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList parameters);

}  // namespace lltm
