// The parameters of a direction as modules hold them, and as the operators take them.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace lltm {

// How many a module has.
inline int64_t count_parameters(const CellInfo& cell, bool has_bias, bool prepacked) {
  const int64_t matrices = cell.joined || prepacked ? 1 : 2;
  return matrices + (!has_bias ? 0 : cell.joined ? 1 : 2) + cell.parameters;
}

// bias_ih and bias_hh of a cell that has parameters of its own. These stand behind bias_ih; zeros
// stand for biases that there are not.
std::array<at::Tensor, 2> biases_and_parameters(
    const CellInfo& cell,
    bool has_bias,
    size_t matrices,
    int64_t hidden_size,
    at::TensorList given);

// Sets the weights and biases of a call. weight_ih may be joined weights, or prepacked ones.
template <typename Inputs>
void set_parameters(
    Inputs& args, bool has_bias, bool prepacked, int64_t hidden_size, at::TensorList given) {
  const CellInfo& cell = *args.cell;
  const size_t matrices = cell.joined || prepacked ? 1 : 2;
  args.weight_ih = given[0];
  if (matrices == 2) args.weight_hh = given[1];
  if (cell.parameters > 0) {
    auto [bias_ih, bias_hh] = biases_and_parameters(cell, has_bias, matrices, hidden_size, given);
    args.bias_ih = std::move(bias_ih);
    args.bias_hh = std::move(bias_hh);
  } else if (has_bias) {
    args.bias_ih = given[matrices];
    if (!cell.joined) args.bias_hh = given[matrices + 1];
  }
}

// Throws if a bias or a parameter that is concatenated has another shape, dtype or device.
void check_custom_parameters(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList given);

}  // namespace lltm
