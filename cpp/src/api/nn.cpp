// The modules: options, parameters, packed input. What they compute is in layer.cpp.
#include "api/layer.h"
#include "cell/cells.h"
#include "op/operators.h"

#include <lltm/nn.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cmath>
#include <ios>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

// The cell of a module.
template <typename Module>
constexpr const Cell& kCellOf = Lltm::kCell;
template <>
constexpr const Cell& kCellOf<LSTMCellImpl> = Lstm::kCell;
template <>
constexpr const Cell& kCellOf<LSTMImpl> = Lstm::kCell;
template <>
constexpr const Cell& kCellOf<GRUCellImpl> = Gru::kCell;
template <>
constexpr const Cell& kCellOf<GRUImpl> = Gru::kCell;

// A state as StepModule and LayerModule take it, and back: that of a cell without c is h.
std::optional<State> in_pair(const std::optional<State>& state) {
  return state;
}
std::optional<State> in_pair(const std::optional<Tensor>& h) {
  return h.has_value() ? std::optional(State(*h, Tensor())) : std::nullopt;
}
template <typename StateT>
StateT out_of_pair(const State& state) {
  if constexpr (std::is_same_v<StateT, State>) {
    return state;
  } else {
    return std::get<0>(state);
  }
}

// The parameters of one direction: their names without suffix, their shapes, whether they are a
// bias; in the order of all_weights.
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  bool is_bias() const { return shape.size() == 1; }
};
std::vector<Parameter> parameters_of(const Cell& cell, int64_t input_size, int64_t hidden_size) {
  const int64_t rows = cell.gates * hidden_size;
  if (cell.joined) return {{"weights", {rows, hidden_size + input_size}}, {"bias", {rows}}};
  return {
      {"weight_ih", {rows, input_size}},
      {"weight_hh", {rows, hidden_size}},
      {"bias_ih", {rows}},
      {"bias_hh", {rows}}};
}

// The members of a module of one step, in the same order.
std::array<Tensor*, 2> members_of(JoinedParameters& p) {
  return {&p.weights, &p.bias};
}
std::array<Tensor*, 4> members_of(GateParameters& p) {
  return {&p.weight_ih, &p.weight_hh, &p.bias_ih, &p.bias_hh};
}

}  // namespace

// ---- one step -------------------------------------------------------------

CellOptions::CellOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

template <typename Module, typename StateT, typename Parameters>
RecurrentCell<Module, StateT, Parameters>::RecurrentCell(const CellOptions& options)
    : options(options) {
  reset();
}

template <typename Module, typename StateT, typename Parameters>
void RecurrentCell<Module, StateT, Parameters>::reset() {
  constexpr const Cell& cell = kCellOf<Module>;
  check_size(cell.step_class, "input_size", options.input_size(), kLargestSize);
  check_size(cell.step_class, "hidden_size", options.hidden_size(), kLargestSize);
  const auto members = members_of(*this);
  size_t next = 0;
  for (const Parameter& p : parameters_of(cell, options.input_size(), options.hidden_size())) {
    const bool given = options.bias() || !p.is_bias();
    *members[next++] =
        this->register_parameter(p.name, given ? torch::empty(p.shape) : Tensor(), given);
  }
  reset_parameters();
}

template <typename Module, typename StateT, typename Parameters>
void RecurrentCell<Module, StateT, Parameters>::reset_parameters() {
  draw(this->parameters(), options.hidden_size());
}

template <typename Module, typename StateT, typename Parameters>
void RecurrentCell<Module, StateT, Parameters>::pretty_print(std::ostream& stream) const {
  stream << "lltm::" << kCellOf<Module>.step_class << '(' << options.input_size() << ", "
         << options.hidden_size() << (options.bias() ? ")" : ", bias=false)");
}

template <typename Module, typename StateT, typename Parameters>
StateT RecurrentCell<Module, StateT, Parameters>::forward(
    const Tensor& input, const std::optional<StateT>& state) {
  c10::SmallVector<Tensor, 4> given;
  for (const Tensor* const member : members_of(*this)) {
    if (member->defined()) given.push_back(*member);
  }
  const StepModule module = {kCellOf<Module>, options.input_size(), options.hidden_size(), given};
  return out_of_pair<StateT>(module.forward(input, in_pair(state)));
}

// ---- a layer --------------------------------------------------------------

namespace {

LayerModule layer_of(
    const Cell& cell,
    const LayerOptions& options,
    bool training,
    bool prepacked,
    const std::vector<Tensor>& parameters) {
  return {
      cell,
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

template <typename StateT>
std::tuple<Tensor, StateT> forward_dense(
    const LayerModule& layer, const Tensor& input, const std::optional<StateT>& state) {
  const auto [output, last] = layer.forward(input, in_pair(state));
  return {output, out_of_pair<StateT>(last)};
}

template <typename StateT>
std::tuple<PackedSequence, StateT> forward_packed(
    const LayerModule& layer, const PackedSequence& input, const std::optional<StateT>& state) {
  const PackedRows rows = {
      input.data(), input.batch_sizes(), input.sorted_indices(), input.unsorted_indices()};
  const auto [output, last] = layer.forward(rows, in_pair(state));
  return {
      PackedSequence(output, rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices),
      out_of_pair<StateT>(last)};
}

}  // namespace

LayerOptions::LayerOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

template <typename Module, typename StateT>
RecurrentLayer<Module, StateT>::RecurrentLayer(const LayerOptions& options) : options(options) {
  reset();
  if (options.dropout() > 0 && options.num_layers() == 1) {
    TORCH_WARN(
        "lltm::",
        kCellOf<Module>.layer_class,
        ": dropout is applied between layers, so it does nothing with num_layers=1");
  }
}

template <typename Module, typename StateT>
void RecurrentLayer<Module, StateT>::reset() {
  constexpr const Cell& cell = kCellOf<Module>;
  const char* const where = cell.layer_class;
  check_size(where, "input_size", options.input_size(), kLargestSize);
  check_size(where, "hidden_size", options.hidden_size(), kLargestSize);
  check_size(where, "num_layers", options.num_layers(), kMostLayers);
  TORCH_CHECK_VALUE(
      options.dropout() >= 0 && options.dropout() <= 1,
      "lltm::",
      where,
      ": expected dropout to lie in [0, 1], got ",
      options.dropout());
  TORCH_CHECK_VALUE(
      options.checkpoint_steps() >= 0,
      "lltm::",
      where,
      ": expected checkpoint_steps to be positive or 0, got ",
      options.checkpoint_steps());

  const int64_t hidden_size = options.hidden_size();
  const int64_t count = options.bidirectional() ? 2 : 1;
  all_weights_.clear();
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    const int64_t input_size = layer == 0 ? options.input_size() : hidden_size * count;
    for (int64_t direction = 0; direction < count; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 0 ? "" : "_reverse");
      for (const Parameter& p : parameters_of(cell, input_size, hidden_size)) {
        const bool given = options.bias() || !p.is_bias();
        const Tensor parameter = this->register_parameter(
            p.name + suffix, given ? torch::empty(p.shape) : Tensor(), given);
        if (given) all_weights_.push_back(parameter);
      }
    }
  }
  reset_parameters();
}

template <typename Module, typename StateT>
void RecurrentLayer<Module, StateT>::reset_parameters() {
  draw(this->parameters(), options.hidden_size());
}

template <typename Module, typename StateT>
void RecurrentLayer<Module, StateT>::pretty_print(std::ostream& stream) const {
  stream << "lltm::" << kCellOf<Module>.layer_class << "(input_size=" << options.input_size()
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

template <typename Module, typename StateT>
std::vector<Tensor> RecurrentLayer<Module, StateT>::all_weights() const {
  return all_weights_;
}

template <typename Module, typename StateT>
PrepackedLayer<Module, StateT> RecurrentLayer<Module, StateT>::prepack(
    std::optional<torch::Dtype> weights) const {
  constexpr const Cell& cell = kCellOf<Module>;
  std::vector<Tensor> parameters;
  for (size_t k = 0; k < all_weights_.size(); ++k) {
    const Tensor& own = all_weights_[k];
    if (own.dim() == 1) {
      parameters.push_back(own.detach().clone());
    } else {  // the matrix of the input, and where there is one that of h
      const Tensor weight_hh = cell.joined ? Tensor() : all_weights_[++k];
      parameters.push_back(op::prepack(cell.name, own, or_nullopt(weight_hh), weights));
    }
  }
  return PrepackedLayer<Module, StateT>(options, std::move(parameters));
}

template <typename Module, typename StateT>
std::tuple<Tensor, StateT> RecurrentLayer<Module, StateT>::forward(
    const Tensor& input, const std::optional<StateT>& state) {
  const bool training = this->is_training();
  return forward_dense(
      layer_of(kCellOf<Module>, options, training, /*prepacked=*/false, all_weights_),
      input,
      state);
}

template <typename Module, typename StateT>
std::tuple<PackedSequence, StateT> RecurrentLayer<Module, StateT>::forward_with_packed_input(
    const PackedSequence& input, const std::optional<StateT>& state) {
  const bool training = this->is_training();
  return forward_packed(
      layer_of(kCellOf<Module>, options, training, /*prepacked=*/false, all_weights_),
      input,
      state);
}

// ---- a layer for inference ------------------------------------------------

template <typename Module, typename StateT>
PrepackedLayer<Module, StateT>::PrepackedLayer(
    const LayerOptions& options, std::vector<Tensor> parameters)
    : options_(options), parameters_(std::move(parameters)) {}

template <typename Module, typename StateT>
std::tuple<Tensor, StateT> PrepackedLayer<Module, StateT>::forward(
    const Tensor& input, const std::optional<StateT>& state) const {
  return forward_dense(
      layer_of(kCellOf<Module>, options_, /*training=*/false, /*prepacked=*/true, parameters_),
      input,
      state);
}

template <typename Module, typename StateT>
std::tuple<PackedSequence, StateT> PrepackedLayer<Module, StateT>::forward_with_packed_input(
    const PackedSequence& input, const std::optional<StateT>& state) const {
  return forward_packed(
      layer_of(kCellOf<Module>, options_, /*training=*/false, /*prepacked=*/true, parameters_),
      input,
      state);
}

// ---- what nn.h declares -----------------------------------------------------

template class RecurrentCell<LLTMCellImpl, State, JoinedParameters>;
template class RecurrentCell<LSTMCellImpl, State, GateParameters>;
template class RecurrentCell<GRUCellImpl, Tensor, GateParameters>;
template class RecurrentLayer<LLTMImpl, State>;
template class RecurrentLayer<LSTMImpl, State>;
template class RecurrentLayer<GRUImpl, Tensor>;
template class PrepackedLayer<LLTMImpl, State>;
template class PrepackedLayer<LSTMImpl, State>;
template class PrepackedLayer<GRUImpl, Tensor>;

}  // namespace lltm
