#pragma once

#include "cell/cell.h"
#include "common/operator_args.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm {

// Returns the number per direction.
inline int64_t count_parameters(const CellInfo& cell, bool has_bias, bool prepacked) {
  const int64_t matrices = cell.concatenated || prepacked ? 1 : 2;
  return matrices + (!has_bias ? 0 : cell.concatenated ? 1 : 2) + cell.parameters;
}

// Pre-activations in `slots` with biases in modules.
int64_t count_biases(const CellInfo& cell, const SlotRange& slots);

// weight_ih may be a concatenated or prepacked matrix. Custom parameters are appended to bias_ih;
// with them, missing biases are zero.
void set_parameters(
    SequenceInputs& args,
    bool has_bias,
    bool prepacked,
    int64_t hidden_size,
    at::TensorList parameters);

// Biases and custom parameters are concatenated, so their shapes, dtypes and devices must match.
void check_custom_parameters(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList parameters);

}  // namespace lltm
