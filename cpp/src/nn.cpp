// The modules: shapes, states, layers and directions. The operators do the arithmetic.
#include "cell.h"
#include "format.h"
#include "operator_args.h"

#include <lltm/nn.h>
#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <functional>
#include <ios>
#include <string>
#include <utility>

namespace lltm {
namespace {

using at::Tensor;
using torch::nn::utils::rnn::PackedSequence;

void check_positive(const char* where, const char* name, int64_t value) {
  TORCH_CHECK_VALUE(
      value > 0, "lltm::", where, ": expected ", name, " to be positive, got ", value);
}

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

void draw(const std::vector<Tensor>& parameters, int64_t hidden_size) {
  const at::NoGradGuard no_grad;
  const double bound = 1.0 / std::sqrt(static_cast<double>(hidden_size));
  for (const Tensor& parameter : parameters) {
    parameter.uniform_(-bound, bound);
  }
}

const char* bool_text(bool value) {
  return value ? "true" : "false";
}

}  // namespace

// ---- one step -------------------------------------------------------------

LLTMCellOptions::LLTMCellOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

LLTMCellImpl::LLTMCellImpl(const LLTMCellOptions& options) : options(options) {
  reset();
}

void LLTMCellImpl::reset() {
  check_positive("LLTMCell", "input_size", options.input_size());
  check_positive("LLTMCell", "hidden_size", options.hidden_size());
  const int64_t rows = Cell::kGates * options.hidden_size();
  weights = register_parameter(
      "weights", torch::empty({rows, options.hidden_size() + options.input_size()}));
  bias =
      register_parameter("bias", options.bias() ? torch::empty({rows}) : Tensor(), options.bias());
  reset_parameters();
}

void LLTMCellImpl::reset_parameters() {
  draw(parameters(), options.hidden_size());
}

void LLTMCellImpl::pretty_print(std::ostream& stream) const {
  stream << "lltm::LLTMCell(" << options.input_size() << ", " << options.hidden_size()
         << (options.bias() ? ")" : ", bias=false)");
}

State LLTMCellImpl::forward(const Tensor& input, const std::optional<State>& state) {
  const int64_t input_size = options.input_size();
  const int64_t hidden_size = options.hidden_size();
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
  return cell(input, h, c, weights, or_nullopt(bias));
}

// ---- a layer --------------------------------------------------------------

namespace {

// What LLTM and PrepackedLLTM share: shapes, states, the order of layers and
// directions.
struct Layer {
  // Runs the k-th direction, in the order of h_0 and h_n, over input (T, B, .),
  // or (N, .) with batch_sizes; returns output, h_n, c_n.
  using RunDirection = std::function<std::tuple<Tensor, Tensor, Tensor>(
      size_t k,
      const Tensor& input,
      const Tensor& h_0,
      const Tensor& c_0,
      const std::optional<Tensor>& batch_sizes,
      bool reverse)>;

  std::tuple<Tensor, State> forward(const Tensor& input, const std::optional<State>& state) const;
  std::tuple<PackedSequence, State> forward_with_packed_input(
      const PackedSequence& input, const std::optional<State>& state) const;
  State initial_state(
      const Tensor& input, const std::optional<State>& state, int64_t batch, bool batched) const;
  std::tuple<Tensor, State> run(
      Tensor input, const State& initial, const std::optional<Tensor>& batch_sizes) const;

  const LLTMOptions& options;
  bool training;
  RunDirection run_direction;
};

std::tuple<Tensor, State> Layer::forward(
    const Tensor& input, const std::optional<State>& state) const {
  const int64_t input_size = options.input_size();
  check_defined("LLTM", "input", input);
  TORCH_CHECK_VALUE(
      (input.dim() == 2 || input.dim() == 3) && input.size(-1) == input_size,
      "lltm::LLTM: expected input of shape ",
      options.batch_first() ? "(B, T, " : "(T, B, ",
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
  const Tensor steps = options.batch_first() ? input.transpose(0, 1) : input;
  const auto [output, last] =
      run(steps, initial_state(input, state, steps.size(1), /*batched=*/true), std::nullopt);
  return {options.batch_first() ? output.transpose(0, 1) : output, last};
}

// B of states (L*D, B, H); 0 for any other shape, which initial_state refuses.
int64_t state_batch(const State& state) {
  const Tensor& h_0 = std::get<0>(state);
  return h_0.defined() && h_0.dim() == 3 ? h_0.size(1) : 0;
}

std::tuple<PackedSequence, State> Layer::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) const {
  const Tensor& rows = input.data();
  const Tensor& batch_sizes = input.batch_sizes();
  check_defined("LLTM", "input", rows);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.size(1) == options.input_size(),
      "lltm::LLTM: expected input of packed rows (N, ",
      options.input_size(),
      "), got ",
      shape_text(rows.sizes()));
  // With no steps, only the states have the batch size.
  const bool steps = batch_sizes.dim() == 1 && batch_sizes.numel() > 0;
  const int64_t batch = steps               ? batch_sizes[0].item<int64_t>()
                        : state.has_value() ? state_batch(*state)
                                            : 0;

  // The states are in the caller's order, the packed rows from longest to
  // shortest.
  const auto reordered = [](const State& states, const Tensor& order) {
    const auto& [h, c] = states;
    return order.defined() ? State(h.index_select(1, order), c.index_select(1, order)) : states;
  };
  State initial = initial_state(rows, state, batch, /*batched=*/true);
  if (state.has_value()) {
    initial = reordered(initial, input.sorted_indices());
  }
  const auto [output, last] = run(rows, initial, batch_sizes);
  return {
      PackedSequence(output, batch_sizes, input.sorted_indices(), input.unsorted_indices()),
      reordered(last, input.unsorted_indices())};
}

// (h_0, c_0), each (L*D, B, H), checked.
State Layer::initial_state(
    const Tensor& input, const std::optional<State>& state, int64_t batch, bool batched) const {
  const int64_t count = options.num_layers() * (options.bidirectional() ? 2 : 1);
  const int64_t hidden_size = options.hidden_size();
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

// Every layer and direction over (T, B, I), or (N, I) with batch_sizes.
std::tuple<Tensor, State> Layer::run(
    Tensor input, const State& initial, const std::optional<Tensor>& batch_sizes) const {
  const auto& [h_0, c_0] = initial;
  const int64_t count = options.bidirectional() ? 2 : 1;
  std::vector<Tensor> h_n;
  std::vector<Tensor> c_n;
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    if (layer > 0 && options.dropout() > 0) {
      input = at::dropout(input, options.dropout(), training);
    }
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < count; ++direction) {
      const size_t k = h_n.size();
      const auto [output, h, c] = run_direction(
          k,
          input,
          h_0[static_cast<int64_t>(k)],
          c_0[static_cast<int64_t>(k)],
          batch_sizes,
          /*reverse=*/direction == 1);
      outputs.push_back(output);
      h_n.push_back(h);
      c_n.push_back(c);
    }
    input = count == 1 ? outputs.front() : at::cat(outputs, -1);
  }
  if (h_n.size() == 1) {  // a view instead of a copy
    return {input, State(h_n.front().unsqueeze(0), c_n.front().unsqueeze(0))};
  }
  return {input, State(at::stack(h_n), at::stack(c_n))};
}

// What takes the arguments of lltm::sequence.
using SequenceFunction = std::function<std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse)>;

// What an LLTM runs.
SequenceFunction sequence_of(const LLTMOptions& options) {
  const int64_t checkpoint_steps = options.checkpoint_steps();
  if (checkpoint_steps == 0) return sequence;
  return [checkpoint_steps](
             const Tensor& input,
             const Tensor& h_0,
             const Tensor& c_0,
             const Tensor& weights,
             const std::optional<Tensor>& bias,
             const std::optional<Tensor>& batch_sizes,
             bool reverse) {
    return sequence_checkpointed(
        input, h_0, c_0, weights, bias, checkpoint_steps, batch_sizes, reverse);
  };
}

// A layer that calls `op` with the (weights, bias) of each direction.
template <typename Directions>
Layer layer_of(
    const LLTMOptions& options,
    bool training,
    const Directions& directions,
    const SequenceFunction& op) {
  return {
      options,
      training,
      [&directions, op](
          size_t k,
          const Tensor& input,
          const Tensor& h_0,
          const Tensor& c_0,
          const std::optional<Tensor>& batch_sizes,
          bool reverse) {
        const auto& [weights, bias] = directions[k];
        return op(input, h_0, c_0, weights, or_nullopt(bias), batch_sizes, reverse);
      }};
}

}  // namespace

LLTMOptions::LLTMOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

LLTMImpl::LLTMImpl(const LLTMOptions& options) : options(options) {
  reset();
  if (options.dropout() > 0 && options.num_layers() == 1) {
    TORCH_WARN(
        "lltm::LLTM: dropout is applied between layers, so it does nothing with num_layers=1");
  }
}

void LLTMImpl::reset() {
  check_positive("LLTM", "input_size", options.input_size());
  check_positive("LLTM", "hidden_size", options.hidden_size());
  check_positive("LLTM", "num_layers", options.num_layers());
  TORCH_CHECK_VALUE(
      options.dropout() >= 0 && options.dropout() <= 1,
      "lltm::LLTM: expected dropout to lie in [0, 1], got ",
      options.dropout());

  TORCH_CHECK_VALUE(
      options.checkpoint_steps() >= 0,
      "lltm::LLTM: expected checkpoint_steps to be positive or 0, got ",
      options.checkpoint_steps());

  const int64_t hidden_size = options.hidden_size();
  const int64_t count = options.bidirectional() ? 2 : 1;
  directions_.clear();
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    const int64_t input_size = layer == 0 ? options.input_size() : hidden_size * count;
    for (int64_t direction = 0; direction < count; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 0 ? "" : "_reverse");
      Direction parameters;
      parameters.weights = register_parameter(
          "weights" + suffix, torch::empty({Cell::kGates * hidden_size, hidden_size + input_size}));
      parameters.bias = register_parameter(
          "bias" + suffix,
          options.bias() ? torch::empty({Cell::kGates * hidden_size}) : Tensor(),
          options.bias());
      directions_.push_back(std::move(parameters));
    }
  }
  reset_parameters();
}

void LLTMImpl::reset_parameters() {
  draw(parameters(), options.hidden_size());
}

void LLTMImpl::pretty_print(std::ostream& stream) const {
  stream << "lltm::LLTM(input_size=" << options.input_size()
         << ", hidden_size=" << options.hidden_size() << ", num_layers=" << options.num_layers()
         << ", bias=" << bool_text(options.bias())
         << ", batch_first=" << bool_text(options.batch_first())
         << ", dropout=" << options.dropout()
         << ", bidirectional=" << bool_text(options.bidirectional());
  if (options.checkpoint_steps() != 0) {
    stream << ", checkpoint_steps=" << options.checkpoint_steps();
  }
  stream << ')';
}

std::vector<Tensor> LLTMImpl::all_weights() const {
  std::vector<Tensor> tensors;
  for (const Direction& direction : directions_) {
    tensors.push_back(direction.weights);
    if (direction.bias.defined()) {
      tensors.push_back(direction.bias);
    }
  }
  return tensors;
}

PrepackedLLTM LLTMImpl::prepack(std::optional<torch::Dtype> weights) const {
  std::vector<PrepackedLLTM::Direction> packed;
  for (const Direction& direction : directions_) {
    packed.push_back(
        {lltm::prepack(direction.weights, weights),
         direction.bias.defined() ? direction.bias.detach().clone() : Tensor()});
  }
  return PrepackedLLTM(options, std::move(packed));
}

std::tuple<Tensor, State> LLTMImpl::forward(
    const Tensor& input, const std::optional<State>& state) {
  check_defined("LLTM", "input", input);
  check_kind("LLTM", input, directions_.front().weights);
  return layer_of(options, is_training(), directions_, sequence_of(options)).forward(input, state);
}

std::tuple<PackedSequence, State> LLTMImpl::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) {
  check_defined("LLTM", "input", input.data());
  check_kind("LLTM", input.data(), directions_.front().weights);
  return layer_of(options, is_training(), directions_, sequence_of(options))
      .forward_with_packed_input(input, state);
}

// ---- a layer for inference ------------------------------------------------

PrepackedLLTM::PrepackedLLTM(const LLTMOptions& options, std::vector<Direction> directions)
    : options_(options), directions_(std::move(directions)) {}

std::tuple<Tensor, State> PrepackedLLTM::forward(
    const Tensor& input, const std::optional<State>& state) const {
  return layer_of(options_, /*training=*/false, directions_, sequence_prepacked)
      .forward(input, state);
}

std::tuple<PackedSequence, State> PrepackedLLTM::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) const {
  return layer_of(options_, /*training=*/false, directions_, sequence_prepacked)
      .forward_with_packed_input(input, state);
}

}  // namespace lltm
