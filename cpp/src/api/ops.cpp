// The functions of lltm/ops.h: the operators, with one tensor for each state.
#include <lltm/ops.h>

#include "api/initial_states.h"
#include "cell/registry.h"
#include "op/operators.h"

#include <utility>

namespace lltm {

using at::Tensor;
using Optional = std::optional<Tensor>;

std::vector<Tensor> step(
    std::string_view cell,
    const Tensor& input,
    at::TensorList states,
    const Tensor& weight_ih,
    const Optional& weight_hh,
    const Optional& bias_ih,
    const Optional& bias_hh) {
  const CellInfo& info = get_cell("lltm::step", cell);
  ConcatenatedState state = concatenate_checked(info, "step", input, states, "");
  auto [output, h, c] = op::call(
      StepArgs{
          {{info, input, state.h, std::move(state.c), weight_ih, weight_hh, bias_ih, bias_hh}}});
  return split(info, std::move(h), std::move(c));
}

std::tuple<Tensor, std::vector<Tensor>> sequence(
    std::string_view cell,
    const Tensor& input,
    at::TensorList states,
    const Tensor& weight_ih,
    const Optional& weight_hh,
    const Optional& bias_ih,
    const Optional& bias_hh,
    const Optional& batch_sizes,
    bool reverse,
    const Optional& reset,
    int64_t checkpoint_steps,
    const Optional& recurrent_mask) {
  const CellInfo& info = get_cell("lltm::sequence", cell);
  ConcatenatedState state = concatenate_checked(info, "sequence", input, states, "_0");
  auto [output, h_n, c_n] = op::call(
      SequenceArgs{
          {info,
           input,
           state.h,
           std::move(state.c),
           weight_ih,
           weight_hh,
           bias_ih,
           bias_hh,
           batch_sizes,
           reverse,
           reset,
           checkpoint_steps,
           recurrent_mask}});
  return {std::move(output), split(info, std::move(h_n), std::move(c_n))};
}

Tensor prepack(
    std::string_view cell,
    const Tensor& weight_ih,
    const Optional& weight_hh,
    std::optional<at::ScalarType> dtype) {
  return op::prepack(cell, weight_ih, weight_hh, dtype);
}

}  // namespace lltm
