// The modules: options, parameters, packed input. What they compute is in layer.cpp.
#include "api/layer.h"
#include "cell/lltm.h"
#include "common/format.h"

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

// Sizes up to here can be multiplied with each other and with the size of an element.
constexpr int64_t kLargestSize = int64_t{1} << 27;
constexpr int64_t kMostLayers = int64_t{1} << 16;

void check_size(const char* where, const char* name, int64_t value, int64_t largest) {
  TORCH_CHECK_VALUE(
      value > 0, "lltm::", where, ": expected ", name, " to be positive, got ", value);
  TORCH_CHECK_VALUE(
      value <= largest,
      "lltm::",
      where,
      ": expected ",
      name,
      " of at most ",
      largest,
      ", got ",
      value);
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
  check_size("LLTMCell", "input_size", options.input_size(), kLargestSize);
  check_size("LLTMCell", "hidden_size", options.hidden_size(), kLargestSize);
  const int64_t rows = Lltm::kCell.gates * options.hidden_size();
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
  const Tensor given[] = {weights, bias};
  const StepModule module = {
      Lltm::kCell,
      options.input_size(),
      options.hidden_size(),
      at::TensorList(given, bias.defined() ? 2 : 1)};
  return module.forward(input, state);
}

// ---- a layer --------------------------------------------------------------

namespace {

LayerModule layer_of(
    const LLTMOptions& options,
    bool training,
    bool prepacked,
    const std::vector<Tensor>& parameters) {
  return {
      Lltm::kCell,
      options.input_size(),
      options.hidden_size(),
      options.num_layers(),
      options.batch_first(),
      options.bidirectional(),
      training ? options.dropout() : 0.0,
      options.checkpoint_steps(),
      prepacked,
      parameters,
      options.bias()};
}

std::tuple<PackedSequence, State> forward_packed(
    const LayerModule& layer, const PackedSequence& input, const std::optional<State>& state) {
  const PackedRows rows = {
      input.data(), input.batch_sizes(), input.sorted_indices(), input.unsorted_indices()};
  auto [output, last] = layer.forward(rows, state);
  return {
      PackedSequence(output, rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices), last};
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
  check_size("LLTM", "input_size", options.input_size(), kLargestSize);
  check_size("LLTM", "hidden_size", options.hidden_size(), kLargestSize);
  check_size("LLTM", "num_layers", options.num_layers(), kMostLayers);
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
  all_weights_.clear();
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    const int64_t input_size = layer == 0 ? options.input_size() : hidden_size * count;
    for (int64_t direction = 0; direction < count; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 0 ? "" : "_reverse");
      all_weights_.push_back(register_parameter(
          "weights" + suffix,
          torch::empty({Lltm::kCell.gates * hidden_size, hidden_size + input_size})));
      const Tensor bias = register_parameter(
          "bias" + suffix,
          options.bias() ? torch::empty({Lltm::kCell.gates * hidden_size}) : Tensor(),
          options.bias());
      if (bias.defined()) all_weights_.push_back(bias);
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
  return all_weights_;
}

PrepackedLLTM LLTMImpl::prepack(std::optional<torch::Dtype> weights) const {
  std::vector<Tensor> packed;
  for (const Tensor& own : all_weights_) {
    packed.push_back(own.dim() == 2 ? lltm::prepack(own, weights) : own.detach().clone());
  }
  return PrepackedLLTM(options, std::move(packed));
}

std::tuple<Tensor, State> LLTMImpl::forward(
    const Tensor& input, const std::optional<State>& state) {
  return layer_of(options, is_training(), /*prepacked=*/false, all_weights_).forward(input, state);
}

std::tuple<PackedSequence, State> LLTMImpl::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) {
  const LayerModule layer = layer_of(options, is_training(), /*prepacked=*/false, all_weights_);
  return forward_packed(layer, input, state);
}

// ---- a layer for inference ------------------------------------------------

PrepackedLLTM::PrepackedLLTM(const LLTMOptions& options, std::vector<Tensor> weights)
    : options_(options), weights_(std::move(weights)) {}

std::tuple<Tensor, State> PrepackedLLTM::forward(
    const Tensor& input, const std::optional<State>& state) const {
  return layer_of(options_, /*training=*/false, /*prepacked=*/true, weights_).forward(input, state);
}

std::tuple<PackedSequence, State> PrepackedLLTM::forward_with_packed_input(
    const PackedSequence& input, const std::optional<State>& state) const {
  const LayerModule layer = layer_of(options_, /*training=*/false, /*prepacked=*/true, weights_);
  return forward_packed(layer, input, state);
}

}  // namespace lltm
