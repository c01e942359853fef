// The modules: options, parameters, packed input. What they compute is in layer.cpp.
#include "cell/cell.h"
#include "common/format.h"
#include "api/layer.h"

#include <lltm/nn.h>
#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cmath>
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
  const Parameters parameters(weights, bias);
  const StepModule module = {options.input_size(), options.hidden_size(), parameters};
  return module.forward(input, state);
}

// ---- a layer --------------------------------------------------------------

namespace {

// B of states (L*D, B, H); 0 for any other shape, which initial_state refuses.
int64_t state_batch(const State& state) {
  const Tensor& h_0 = std::get<0>(state);
  return h_0.defined() && h_0.dim() == 3 ? h_0.size(1) : 0;
}

LayerModule layer_of(
    const LLTMOptions& options,
    bool training,
    bool prepacked,
    const std::vector<Parameters>& directions) {
  return {
      options.input_size(),
      options.hidden_size(),
      options.num_layers(),
      options.batch_first(),
      options.bidirectional(),
      options.dropout(),
      training,
      options.checkpoint_steps(),
      prepacked,
      directions};
}

std::tuple<PackedSequence, State> forward_packed(
    const LayerModule& layer, const PackedSequence& input, const std::optional<State>& state) {
  const Tensor& rows = input.data();
  const Tensor& batch_sizes = input.batch_sizes();
  layer.check_input(rows);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.size(1) == layer.input_size,
      "lltm::LLTM: expected input of packed rows (N, ",
      layer.input_size,
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
  State initial = layer.initial_state(rows, state, batch, /*batched=*/true);
  if (state.has_value()) {
    initial = reordered(initial, input.sorted_indices());
  }
  const auto [output, last] = layer.run(rows, initial, batch_sizes);
  return {
      PackedSequence(output, batch_sizes, input.sorted_indices(), input.unsorted_indices()),
      reordered(last, input.unsorted_indices())};
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
      auto weights = register_parameter(
          "weights" + suffix, torch::empty({Cell::kGates * hidden_size, hidden_size + input_size}));
      auto bias = register_parameter(
          "bias" + suffix,
          options.bias() ? torch::empty({Cell::kGates * hidden_size}) : Tensor(),
          options.bias());
      directions_.emplace_back(std::move(weights), std::move(bias));
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
  for (const auto& [weights, bias] : directions_) {
    tensors.push_back(weights);
    if (bias.defined()) tensors.push_back(bias);
  }
  return tensors;
}

PrepackedLLTM LLTMImpl::prepack(std::optional<torch::Dtype> weights) const {
  std::vector<Parameters> packed;
  for (const auto& [own, bias] : directions_) {
    packed.emplace_back(
        lltm::prepack(own, weights), bias.defined() ? bias.detach().clone() : Tensor());
  }
  return PrepackedLLTM(options, std::move(packed));
}

std::tuple<Tensor, State> LLTMImpl::forward(
    const Tensor& input, const std::optional<State>& state) {
  return layer_of(options, is_training(), /*prepacked=*/false, directions_).forward(input, state);
}

std::tuple<PackedSequence, State> LLTMImpl::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) {
  const LayerModule layer = layer_of(options, is_training(), /*prepacked=*/false, directions_);
  return forward_packed(layer, input, state);
}

// ---- a layer for inference ------------------------------------------------

PrepackedLLTM::PrepackedLLTM(const LLTMOptions& options, std::vector<Parameters> directions)
    : options_(options), directions_(std::move(directions)) {}

std::tuple<Tensor, State> PrepackedLLTM::forward(
    const Tensor& input, const std::optional<State>& state) const {
  return layer_of(options_, /*training=*/false, /*prepacked=*/true, directions_)
      .forward(input, state);
}

std::tuple<PackedSequence, State> PrepackedLLTM::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) const {
  const LayerModule layer = layer_of(options_, /*training=*/false, /*prepacked=*/true, directions_);
  return forward_packed(layer, input, state);
}

}  // namespace lltm
