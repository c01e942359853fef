// Biases and cell parameters in pre-activation order and the compute dtype; undefined if there are
// none.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lltm::cpu {

// (S * H)
at::Tensor slot_bias(
    const CellInfo& cell, const at::Tensor& bias_ih, const at::Tensor& bias_hh, int64_t hidden);
template <typename Args>
at::Tensor slot_bias(const Args& args, int64_t hidden) {
  return slot_bias(*args.cell, args.bias_ih, args.bias_hh, hidden);
}
// (P * H)
at::Tensor cell_parameters(const CellInfo& cell, const at::Tensor& bias_ih);

}  // namespace lltm::cpu
