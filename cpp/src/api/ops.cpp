// The functions of lltm/ops.h: the operators, with one tensor for each state. The operator step.
#include <lltm/ops.h>

#include "api/initial_states.h"
#include "cell/registry.h"
#include "op/argument_checks.h"
#include "op/operators.h"

#include <torch/library.h>

#include <utility>

namespace lltm {

using at::Tensor;
using Optional = std::optional<Tensor>;

namespace {

// The operator sequence runs a step for 2 dimensions, which a user may have passed by mistake.
void check_rank(const char* where, const Tensor& input, int64_t rank, const char* shape) {
  check_defined(where, "input", input);
  TORCH_CHECK_VALUE(
      input.dim() == rank,
      expected(where, c10::str("input of shape ", shape), shape_text(input.sym_sizes())));
}
void check_is_step(const Tensor& input) {
  check_rank("step", input, 2, "(B, I)");
}

std::tuple<Tensor, Tensor> step_operator(
    std::string_view cell,
    const Tensor& input,
    const Tensor& h,
    const Optional& c,
    const Tensor& weight_ih,
    const Optional& weight_hh,
    const Optional& bias_ih,
    const Optional& bias_hh) {
  check_is_step(input);
  auto [output, h_next, c_next] =
      op::call({{cell, input, h, c, weight_ih, weight_hh, bias_ih, bias_hh}});
  return {std::move(h_next), std::move(c_next)};
}

}  // namespace

std::vector<Tensor> step(
    std::string_view cell,
    const Tensor& input,
    at::TensorList states,
    const Tensor& weight_ih,
    const Optional& weight_hh,
    const Optional& bias_ih,
    const Optional& bias_hh) {
  const CellInfo& info = get_cell("lltm::step", cell);
  check_is_step(input);
  ConcatenatedState state = concatenate_checked(info, "step", input, states, "");
  auto [output, h, c] = op::call(
      {{info, input, state.h, std::move(state.c), weight_ih, weight_hh, bias_ih, bias_hh}});
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
  if (!or_undefined(batch_sizes).defined()) check_rank("sequence", input, 3, "(T, B, I)");
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

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("step", TORCH_FN(step_operator));
}

}  // namespace lltm
