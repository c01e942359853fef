// Operator arguments of any cell, for tests below the operators.
#pragma once

#include "common/states.h"
#include "testing.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace lltm_test {

using OptionalTensor = std::optional<at::Tensor>;

struct CellArguments {
  std::string cell;
  at::Tensor input, h;
  OptionalTensor c;
  at::Tensor weight_ih;
  OptionalTensor weight_hh, bias_ih, bias_hh, batch_sizes = {};
  bool reverse = false;
  int64_t checkpoint_steps = 0;
  OptionalTensor reset = {}, recurrent_mask = {};

  // In gradient order.
  std::array<OptionalTensor, 7> differentiable() const {
    return {input, h, c, weight_ih, weight_hh, bias_ih, bias_hh};
  }
};

inline CellArguments operands(const Arguments& a, int64_t checkpoint_steps = 0) {
  return {
      std::string(a.cell),
      a.input,
      a.h,
      lltm::or_nullopt(a.c),
      a.weights,
      a.weight_hh,
      a.bias,
      a.bias_hh,
      a.batch_sizes,
      a.reverse,
      checkpoint_steps,
      a.reset,
      a.recurrent_mask};
}

inline lltm::SequenceInputs operator_inputs(const CellArguments& a) {
  return {
      std::string_view(a.cell),
      a.input,
      a.h,
      a.c,
      a.weight_ih,
      a.weight_hh,
      a.bias_ih,
      a.bias_hh,
      a.batch_sizes,
      a.reverse,
      a.reset,
      a.checkpoint_steps,
      a.recurrent_mask};
}
inline lltm::SequenceInputs sequence_inputs(const CellArguments& a) {
  lltm::SequenceInputs inputs = operator_inputs(a);
  lltm::concatenate_states(inputs);
  return inputs;
}
inline lltm::SequenceInputs step_inputs(const CellArguments& a) {
  lltm::SequenceInputs inputs = {
      std::string_view(a.cell), a.input, a.h, a.c, a.weight_ih, a.weight_hh, a.bias_ih, a.bias_hh};
  lltm::concatenate_states(inputs);
  return inputs;
}

template <typename... Results>
Tensors as_list(const std::tuple<Results...>& results) {
  return std::apply([](const auto&... tensors) { return Tensors{tensors...}; }, results);
}

}  // namespace lltm_test
