// The modules' arithmetic is the operators'; here is what they do around them.
#include "api/layer.h"

#include "common/format.h"
#include "op/operator_args.h"
#include "api/plain.h"

#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;

void check_defined(const char* where, const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.defined(),
      "lltm::",
      where,
      ": expected ",
      name,
      " to be a tensor, got an undefined tensor");
}

void check_shape(
    const char* where, const char* name, const Tensor& tensor, at::IntArrayRef expected) {
  check_defined(where, name, tensor);
  TORCH_CHECK_VALUE(
      tensor.sizes() == expected,
      "lltm::",
      where,
      ": expected ",
      name,
      " of shape ",
      shape_text(expected),
      ", got ",
      shape_text(tensor.sizes()));
}

// The operators could blame a parameter, but the caller has passed only the input.
// Autocast casts both.
void check_kind(const char* where, const Tensor& input, const Tensor& parameter) {
  if (at::autocast::is_autocast_enabled(input.device().type())) return;
  TORCH_CHECK_TYPE(
      input.scalar_type() == parameter.scalar_type(),
      "lltm::",
      where,
      ": expected input of dtype ",
      dtype_text(parameter.scalar_type()),
      ", that of the parameters, got ",
      dtype_text(input.scalar_type()));
  TORCH_CHECK(
      input.device() == parameter.device(),
      "lltm::",
      where,
      ": expected input on device ",
      parameter.device(),
      ", that of the parameters, got ",
      input.device());
}

// Whether nobody follows what becomes of a plain tensor: then its views are made here. The
// dispatcher takes as long for a few of them as a step of a stream does.
bool is_unobserved() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
         is_plain_thread();
}

// states.select(0, k), of (L*D, B, H).
Tensor select_state(const Tensor& states, int64_t k, bool unobserved) {
  if (!unobserved || !is_plain(states)) return states.select(0, k);
  Tensor state = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(states.storage()), states.key_set(), states.dtype());
  state.unsafeGetTensorImpl()->set_sizes_and_strides(
      states.sizes().slice(1),
      states.strides().slice(1),
      states.storage_offset() + k * states.stride(0));
  return state;
}

// state.unsqueeze(0), of a new tensor (B, H) that nobody else holds. On a device without kernels
// its strides are those of the initial state.
Tensor unsqueeze_state(Tensor state, bool unobserved) {
  if (!unobserved || !is_plain(state) || !state.is_contiguous()) return state.unsqueeze(0);
  state.unsafeGetTensorImpl()->set_sizes_contiguous({1, state.size(0), state.size(1)});
  return state;
}

}  // namespace

State StepModule::forward(const Tensor& input, const std::optional<State>& state) const {
  const auto& [weights, bias] = parameters;
  check_defined("LLTMCell", "input", input);
  TORCH_CHECK_VALUE(
      (input.dim() == 1 || input.dim() == 2) && input.size(-1) == input_size,
      "lltm::LLTMCell: expected input of shape (B, ",
      input_size,
      ") or (",
      input_size,
      ",), got ",
      shape_text(input.sizes()));
  check_kind("LLTMCell", input, weights);
  if (input.dim() == 1) {
    std::optional<State> row;
    if (state.has_value()) {
      const auto& [h, c] = *state;
      check_shape("LLTMCell", "h", h, {hidden_size});
      check_shape("LLTMCell", "c", c, {hidden_size});
      row = State(h.unsqueeze(0), c.unsqueeze(0));
    }
    const auto [h, c] = forward(input.unsqueeze(0), row);
    return {h.squeeze(0), c.squeeze(0)};
  }
  if (!state.has_value()) {
    const Tensor zeros = input.new_zeros({input.size(0), hidden_size});
    return cell(input, zeros, zeros, weights, or_nullopt(bias));
  }
  const auto& [h, c] = *state;
  // Which batch size is wrong only the operator can judge, which sees all three.
  const auto check_units = [&](const char* name, const Tensor& tensor) {
    check_defined("LLTMCell", name, tensor);
    if (tensor.dim() == 2 && tensor.size(1) == hidden_size) return;
    check_shape("LLTMCell", name, tensor, {input.size(0), hidden_size});
  };
  check_units("h", h);
  check_units("c", c);
  return cell(input, h, c, weights, or_nullopt(bias));
}

void LayerModule::check_input(const Tensor& input) const {
  check_defined("LLTM", "input", input);
  if (!prepacked) check_kind("LLTM", input, directions.front().first);
}

std::tuple<Tensor, State> LayerModule::forward(
    const Tensor& input, const std::optional<State>& state) const {
  check_input(input);
  TORCH_CHECK_VALUE(
      (input.dim() == 2 || input.dim() == 3) && input.size(-1) == input_size,
      "lltm::LLTM: expected input of shape ",
      batch_first ? "(B, T, " : "(T, B, ",
      input_size,
      ") or (T, ",
      input_size,
      "), got ",
      shape_text(input.sizes()));
  if (input.dim() == 2) {
    const auto [output, last] =
        run(input.unsqueeze(1), initial_state(input, state, 1, /*batched=*/false), std::nullopt);
    const auto& [h_n, c_n] = last;
    return {output.squeeze(1), State(h_n.squeeze(1), c_n.squeeze(1))};
  }
  const Tensor steps = batch_first ? input.transpose(0, 1) : input;
  const auto [output, last] =
      run(steps, initial_state(input, state, steps.size(1), /*batched=*/true), std::nullopt);
  return {batch_first ? output.transpose(0, 1) : output, last};
}

State LayerModule::initial_state(
    const Tensor& input, const std::optional<State>& state, int64_t batch, bool batched) const {
  const int64_t count = num_layers * (bidirectional ? 2 : 1);
  if (!state.has_value()) {
    const Tensor zeros = input.new_zeros({count, batch, hidden_size});
    return {zeros, zeros};
  }
  const auto& [h_0, c_0] = *state;
  if (!batched) {
    check_shape("LLTM", "h_0", h_0, {count, hidden_size});
    check_shape("LLTM", "c_0", c_0, {count, hidden_size});
    return {h_0.unsqueeze(1), c_0.unsqueeze(1)};
  }
  check_shape("LLTM", "h_0", h_0, {count, batch, hidden_size});
  check_shape("LLTM", "c_0", c_0, {count, batch, hidden_size});
  return *state;
}

std::tuple<Tensor, Tensor, Tensor> LayerModule::run_direction(
    int64_t k,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) const {
  const auto& [weights, bias_or_undefined] = directions[k];
  const std::optional<Tensor> bias = or_nullopt(bias_or_undefined);
  if (prepacked) return sequence_prepacked(input, h_0, c_0, weights, bias, batch_sizes, reverse);
  return sequence(input, h_0, c_0, weights, bias, batch_sizes, reverse, checkpoint_steps);
}

std::tuple<Tensor, State> LayerModule::run(
    Tensor input, const State& initial, const std::optional<Tensor>& batch_sizes) const {
  const bool unobserved = is_unobserved();
  const auto run = [&](int64_t k, bool reverse) {
    const Tensor h = select_state(std::get<0>(initial), k, unobserved);
    const Tensor c = select_state(std::get<1>(initial), k, unobserved);
    return run_direction(k, input, h, c, batch_sizes, reverse);
  };
  if (directions.size() == 1) {  // the states without a copy
    auto [output, h, c] = run(0, /*reverse=*/false);
    return {
        std::move(output),
        State(
            unsqueeze_state(std::move(h), unobserved), unsqueeze_state(std::move(c), unobserved))};
  }
  const int64_t count = bidirectional ? 2 : 1;
  std::vector<Tensor> h_n;
  std::vector<Tensor> c_n;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    if (layer > 0 && dropout > 0) {
      input = at::dropout(input, dropout, training);
    }
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < count; ++direction) {
      auto [output, h, c] = run(static_cast<int64_t>(h_n.size()), /*reverse=*/direction == 1);
      outputs.push_back(std::move(output));
      h_n.push_back(std::move(h));
      c_n.push_back(std::move(c));
    }
    input = count == 1 ? outputs.front() : at::cat(outputs, -1);
  }
  return {input, State(at::stack(h_n), at::stack(c_n))};
}

}  // namespace lltm
