// Biases and parameters of a call in the order of a cell's slots.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm::cpu {

// What is added to the pre-activations, (S * H) in the compute dtype: undefined without biases.
at::Tensor slot_bias(
    const CellInfo& cell, const at::Tensor& bias_ih, const at::Tensor& bias_hh, int64_t hidden);
template <typename Args>
at::Tensor slot_bias(const Args& args, int64_t hidden) {
  return slot_bias(*args.cell, args.bias_ih, args.bias_hh, hidden);
}
// The cell's parameters, (P * H) in the compute dtype; undefined where it has none.
at::Tensor cell_parameters(const CellInfo& cell, const at::Tensor& bias_ih);

}  // namespace lltm::cpu
