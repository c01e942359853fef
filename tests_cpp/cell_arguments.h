// Operator arguments, for tests below the operators. They refer to the Arguments.
#pragma once

#include "common/backend_call.h"
#include "testing.h"

#include <ATen/core/Tensor.h>

#include <tuple>

namespace lltm_test {

inline lltm::SequenceInputs operator_inputs(const Arguments& a, int64_t checkpoint_steps = 0) {
  return {
      a.cell,
      a.input,
      a.h,
      a.c,
      a.weights,
      a.weight_hh,
      a.bias,
      a.bias_hh,
      a.batch_sizes,
      a.reverse,
      a.reset,
      checkpoint_steps,
      a.recurrent_mask};
}
// With the engines' c (common/backend_call.h).
inline lltm::SequenceInputs engine_inputs(const Arguments& a, int64_t checkpoint_steps = 0) {
  lltm::SequenceInputs inputs = operator_inputs(a, checkpoint_steps);
  lltm::concatenate_states(inputs);
  return inputs;
}

template <typename... Results>
Tensors as_list(const std::tuple<Results...>& results) {
  return std::apply([](const auto&... tensors) { return Tensors{tensors...}; }, results);
}

}  // namespace lltm_test
