// C++ modules: options, parameters, packed input.
#include "api/cell.h"
#include "api/layer.h"
#include "api/parameters.h"
#include "api/projection.h"
#include "cell/registry.h"
#include "op/argument_checks.h"
#include "op/operators.h"

#include <lltm/nn.h>
#include <lltm/serialize.h>

#include <ATen/ATen.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <ios>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::str;
using torch::nn::utils::rnn::PackedSequence;

// The last parameters get a custom cell's initial values.
void draw(at::TensorList parameters, const std::optional<Cell>& custom, int64_t hidden_size) {
  const at::NoGradGuard no_grad;
  const double bound = 1.0 / std::sqrt(static_cast<double>(hidden_size));
  const std::vector<double> initial =
      custom.has_value() ? data_of(*custom).cell.initial_parameters : std::vector<double>();
  const at::TensorList uniform = parameters.slice(0, parameters.size() - initial.size());
  for (const Tensor& parameter : uniform) parameter.uniform_(-bound, bound);
  for (size_t k = 0; k < initial.size(); ++k) parameters[uniform.size() + k].fill_(initial[k]);
}

// True if a module's options contain the cell.
template <typename Module, typename Options>
constexpr bool kIsCustom = !requires(const Options& options) { Module::cell_name(options); };

template <typename Module, typename Options>
const CellInfo& cell_of(const Options& options) {
  if constexpr (kIsCustom<Module, Options>) {
    return data_of(*options.cell()).cell.info;
  } else {
    return *find_cell(Module::cell_name(options));
  }
}

// Checks options of layers and single-step modules. `custom`: class name for custom cells;
// `class_name`: member with the name for built-in cells.
template <typename Module, typename Options>
const CellInfo& checked_cell(
    const Options& options, const char* custom, const char* ModuleInfo::* class_name) {
  constexpr bool is_custom = kIsCustom<Module, Options>;
  TORCH_CHECK_VALUE(
      !is_custom || options.cell().has_value(), expected(custom, "options with a cell", "none"));
  const CellInfo& cell = cell_of<Module>(options);
  const char* const where = cell.modules.*class_name;
  TORCH_CHECK_VALUE(
      is_custom || !options.cell().has_value(),
      expected(where, "options without a cell", options.cell()->name()));
  constexpr bool is_rnn = std::is_same_v<Module, RNNImpl> || std::is_same_v<Module, RNNCellImpl>;
  TORCH_CHECK_VALUE(
      is_rnn || !options.nonlinearity().has_value(),
      expected(where, "options without a nonlinearity, which only an RNN has", "one"));
  check_size(where, "input_size", options.input_size(), kLargestSize);
  check_size(where, "hidden_size", options.hidden_size(), kLargestSize);
  return cell;
}

// Convert a state to the tensors of run_step and run_layer, and back. Undefined tensors are zeros,
// as in torch::nn::GRU.
template <typename StateT>
std::vector<Tensor> states_of(const std::optional<StateT>& state) {
  std::vector<Tensor> states;
  if (!state.has_value()) return states;
  if constexpr (std::is_same_v<StateT, State>) {
    states = {std::get<0>(*state), std::get<1>(*state)};
  } else if constexpr (std::is_same_v<StateT, Tensor>) {
    states = {*state};
  } else {
    states = *state;
  }
  const auto is_defined = [](const Tensor& tensor) { return tensor.defined(); };
  if (std::none_of(states.begin(), states.end(), is_defined)) states.clear();
  return states;
}
template <typename StateT>
StateT state_of(std::vector<Tensor> states) {
  if constexpr (std::is_same_v<StateT, State>) {
    return {std::move(states[0]), std::move(states[1])};
  } else if constexpr (std::is_same_v<StateT, Tensor>) {
    return std::move(states[0]);
  } else {
    return states;
  }
}

// Returns new parameters, in the order of all_weights; an omitted bias is undefined.
template <typename Options>
std::vector<std::pair<std::string, Tensor>> new_parameters(
    const CellInfo& cell,
    const Options& options,
    const char* where,
    int64_t input_size,
    int64_t proj_size) {
  const int64_t hidden_size = options.hidden_size();
  const int64_t heads = options.heads();
  check_size(where, "heads", heads, kLargestSize);
  TORCH_CHECK_VALUE(
      heads == 1 || options.cell().has_value(),
      expected(where, "heads to be 1: only a custom cell has heads", heads));
  TORCH_CHECK_VALUE(
      hidden_size % heads == 0,
      expected(where, str("heads that divide hidden_size ", hidden_size), heads));
  const auto bias = [&](int64_t gates) {
    return options.bias() ? torch::empty({gates * hidden_size}) : Tensor();
  };
  const int64_t rows_x = cell.x.count() * hidden_size;
  if (cell.concatenated) {
    return {
        {"weights", torch::empty({rows_x, hidden_size + input_size})},
        {"bias", bias(cell.x.count())}};
  }
  const int64_t rows_h = cell.h.count() * hidden_size;
  const int64_t columns = cell.given * hidden_size;
  TORCH_CHECK_VALUE(
      input_size == columns || (input_size > columns && rows_x > 0),
      expected(
          cell.title(),
          str(rows_x > 0 ? "at least " : "",
              columns,
              " input features, hidden_size for each gate that reads the input"),
          input_size));
  std::vector<int64_t> shape_of_hh = {rows_h, proj_size > 0 ? proj_size : hidden_size};
  if (heads > 1) shape_of_hh = {heads, rows_h / heads, hidden_size / heads};
  std::vector<std::pair<std::string, Tensor>> parameters = {
      {"weight_ih", torch::empty({rows_x, input_size - columns})},
      {"weight_hh", torch::empty(shape_of_hh)},
      {"bias_ih", bias(count_biases(cell, cell.x))},
      {"bias_hh", bias(count_biases(cell, cell.h))}};
  for (int k = 0; k < cell.parameters; ++k) {
    const bool scalar = (cell.modules.scalars >> k & 1) != 0;
    parameters.emplace_back(
        cell.modules.parameter_names[k], torch::empty({scalar ? 1 : hidden_size}));
  }
  if (proj_size > 0) parameters.emplace_back("weight_hr", torch::empty({proj_size, hidden_size}));
  return parameters;
}

// Members in the same order; `custom` is the number of custom parameters.
using Members = c10::SmallVector<Tensor*, 4>;
Members members_of(JoinedParameters& p, int64_t /*custom*/) {
  return {&p.weights, &p.bias};
}
Members members_of(GateParameters& p, int64_t /*custom*/) {
  return {&p.weight_ih, &p.weight_hh, &p.bias_ih, &p.bias_hh};
}
Members members_of(CustomParameters& p, int64_t custom) {
  Members members = members_of(static_cast<GateParameters&>(p), 0);
  p.own.resize(custom);
  for (Tensor& parameter : p.own) members.push_back(&parameter);
  return members;
}

}  // namespace

// ---- one step -------------------------------------------------------------

CellOptions::CellOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

CellOptions::CellOptions(Cell cell, int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size), cell_(std::move(cell)) {}

template <typename Module, typename Parameters, typename States>
RecurrentCell<Module, Parameters, States>::RecurrentCell(const CellOptions& options)
    : options(options) {
  reset();
}

template <typename Module, typename Parameters, typename States>
void RecurrentCell<Module, Parameters, States>::reset() {
  const CellInfo& cell = checked_cell<Module>(options, "CustomCell", &ModuleInfo::step_class);
  const auto members = members_of(*this, cell.parameters);
  size_t next = 0;
  for (const auto& [name, tensor] : new_parameters(
           cell, options, cell.modules.step_class, options.input_size(), /*proj_size=*/0)) {
    *members[next++] = this->register_parameter(name, tensor, tensor.defined());
  }
  reset_parameters();
}

template <typename Module, typename Parameters, typename States>
void RecurrentCell<Module, Parameters, States>::reset_parameters() {
  draw(this->parameters(), options.cell(), options.hidden_size());
}

template <typename Module, typename Parameters, typename States>
void RecurrentCell<Module, Parameters, States>::pretty_print(std::ostream& stream) const {
  stream << "lltm::" << cell_of<Module>(options).modules.step_class << '(' << options.input_size()
         << ", " << options.hidden_size() << (options.bias() ? ")" : ", bias=false)");
}

template <typename Module, typename Parameters, typename States>
auto RecurrentCell<Module, Parameters, States>::forward(
    const Tensor& input, const std::optional<StateT>& state) -> StateT {
  const CellInfo& cell = cell_of<Module>(options);
  c10::SmallVector<Tensor, 4> weights;
  for (const Tensor* const member : members_of(*this, cell.parameters)) {
    if (member->defined()) weights.push_back(*member);
  }
  return state_of<StateT>(run_step(
      cell, input, states_of(state), weights, options.input_size(), options.hidden_size()));
}

// ---- a layer --------------------------------------------------------------

namespace {

int64_t directions_of(const LayerOptions& options) {
  return options.num_layers() * (options.bidirectional() ? 2 : 1);
}

// The input is a tensor or a PackedSequence, as the output.
template <typename Module, typename Input, typename StateT>
std::tuple<Input, StateT> run_module(
    const LayerOptions& options,
    bool training,
    bool prepacked,
    at::TensorList parameters,
    const Input& input,
    const std::optional<StateT>& state,
    const std::optional<Tensor>& reset) {
  const auto run = [&](const LayerInput& of_call) {
    const CellInfo& cell = cell_of<Module>(options);
    const std::vector<Tensor> states = states_of(state);
    return run_layer({cell, options, training, prepacked, parameters, of_call, states});
  };
  const Tensor& mask = or_undefined(reset);
  if constexpr (std::is_same_v<Input, Tensor>) {
    auto [output, states] = run({input, kUndefined, kUndefined, kUndefined, mask});
    return {std::move(output), state_of<StateT>(std::move(states))};
  } else {
    auto [data, sizes, sorted, unsorted] = std::tuple(
        input.data(), input.batch_sizes(), input.sorted_indices(), input.unsorted_indices());
    auto [output, states] = run({data, sizes, sorted, unsorted, mask});
    return {PackedSequence(output, sizes, sorted, unsorted), state_of<StateT>(std::move(states))};
  }
}

}  // namespace

LayerOptions::LayerOptions(int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size) {}

LayerOptions::LayerOptions(Cell cell, int64_t input_size, int64_t hidden_size)
    : input_size_(input_size), hidden_size_(hidden_size), cell_(std::move(cell)) {}

template <typename Module, typename States>
RecurrentLayer<Module, States>::RecurrentLayer(const LayerOptions& options) : options(options) {
  reset();
  if (options.dropout() > 0 && options.num_layers() == 1) {
    TORCH_WARN(
        "lltm::",
        cell_of<Module>(options).modules.layer_class,
        ": dropout is applied between layers, so it does nothing with num_layers=1");
  }
}

template <typename Module, typename States>
void RecurrentLayer<Module, States>::reset() {
  const CellInfo& cell = checked_cell<Module>(options, "CustomLayer", &ModuleInfo::layer_class);
  const char* const where = cell.modules.layer_class;
  const int64_t proj_size = options.proj_size();
  const int64_t count = options.bidirectional() ? 2 : 1;
  check_options(cell, options);
  TORCH_CHECK_VALUE(
      cell.given == 0 || options.num_layers() == 1,
      expected(
          where,
          "num_layers to be 1 for a cell with gates that read the input",
          options.num_layers()));
  all_weights_.clear();
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    const int64_t size_of_h = proj_size > 0 ? proj_size : options.hidden_size();
    const int64_t input_size = layer == 0 ? options.input_size() : size_of_h * count;
    for (int64_t direction = 0; direction < count; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 0 ? "" : "_reverse");
      for (const auto& [name, tensor] :
           new_parameters(cell, options, where, input_size, proj_size)) {
        const Tensor& parameter = this->register_parameter(name + suffix, tensor, tensor.defined());
        if (parameter.defined()) all_weights_.push_back(parameter);
      }
    }
  }
  reset_parameters();
}

template <typename Module, typename States>
void RecurrentLayer<Module, States>::reset_parameters() {
  const size_t each = all_weights_.size() / directions_of(options);
  for (size_t k = 0; k < all_weights_.size(); k += each) {
    draw(at::TensorList(all_weights_).slice(k, each), options.cell(), options.hidden_size());
  }
}

template <typename Module, typename States>
void RecurrentLayer<Module, States>::pretty_print(std::ostream& stream) const {
  stream << "lltm::" << cell_of<Module>(options).modules.layer_class << '(';
  print_options(stream, options);
  stream << ')';
}

template <typename Module, typename States>
std::vector<Tensor> RecurrentLayer<Module, States>::all_weights() const {
  return all_weights_;
}

template <typename Module, typename States>
void RecurrentLayer<Module, States>::save_realtime(const std::string& path) const {
  TORCH_CHECK_VALUE(
      !options.bidirectional() && options.proj_size() == 0,
      "lltm::save_realtime: expected a layer with one direction and without a projection, got ",
      options.bidirectional() ? "bidirectional" : "proj_size");
  const int64_t layers = options.num_layers(), hidden_size = options.hidden_size();
  const char* const cell = cell_of<Module>(options).name;
  lltm::save_realtime(cell, all_weights_, options.bias(), layers, hidden_size, path);
}

template <typename Module, typename States>
PrepackedLayer<Module> RecurrentLayer<Module, States>::prepack(
    std::optional<torch::Dtype> weights) const {
  const CellInfo& cell = cell_of<Module>(options);
  const at::TensorList all = all_weights_;
  const size_t each = all.size() / directions_of(options);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<Tensor> parameters;
  for (size_t k = 0; k < all.size(); k += each) {
    const at::TensorList unpacked = all.slice(k, each);
    const size_t matrices = cell.concatenated ? 1 : 2;
    ProjectedWeights of = {unpacked[0], cell.concatenated ? Tensor() : unpacked[1]};
    if (options.proj_size() > 0) {
      of = project_weights(unpacked[0], unpacked[1], unpacked.back(), /*with_h_0=*/true);
    }
    parameters.push_back(op::prepack(cell.name, of.weight_ih, or_nullopt(of.weight_hh), weights));
    for (const Tensor& rest : unpacked.slice(matrices)) parameters.push_back(rest.detach().clone());
  }
  return PrepackedLayer<Module>(options, std::move(parameters));
}

template <typename Module, typename States>
auto RecurrentLayer<Module, States>::forward(
    const Tensor& input, const std::optional<StateT>& state, const std::optional<Tensor>& reset)
    -> std::tuple<Tensor, StateT> {
  return run_module<Module>(
      options, this->is_training(), /*prepacked=*/false, all_weights_, input, state, reset);
}

template <typename Module, typename States>
auto RecurrentLayer<Module, States>::forward_with_packed_input(
    const PackedSequence& input,
    const std::optional<StateT>& state,
    const std::optional<Tensor>& reset) -> std::tuple<PackedSequence, StateT> {
  return run_module<Module>(
      options, this->is_training(), /*prepacked=*/false, all_weights_, input, state, reset);
}

// ---- a layer for inference ------------------------------------------------

template <typename Module>
PrepackedLayer<Module>::PrepackedLayer(const LayerOptions& options, std::vector<Tensor> parameters)
    : options_(options), parameters_(std::move(parameters)) {}

template <typename Module>
auto PrepackedLayer<Module>::forward(
    const Tensor& input,
    const std::optional<StateT>& state,
    const std::optional<Tensor>& reset) const -> std::tuple<Tensor, StateT> {
  return run_module<Module>(
      options_, /*training=*/false, /*prepacked=*/true, parameters_, input, state, reset);
}

template <typename Module>
auto PrepackedLayer<Module>::forward_with_packed_input(
    const PackedSequence& input,
    const std::optional<StateT>& state,
    const std::optional<Tensor>& reset) const -> std::tuple<PackedSequence, StateT> {
  return run_module<Module>(
      options_, /*training=*/false, /*prepacked=*/true, parameters_, input, state, reset);
}

// ---- template instantiations ------------------------------------------------

#define LLTM_INSTANTIATE_MODULE(Module, Step, Parameters, States) \
  template class RecurrentCell<Step, Parameters, States>;         \
  template class RecurrentLayer<Module, States>;                  \
  template class PrepackedLayer<Module>;
LLTM_FOR_EACH_MODULE(LLTM_INSTANTIATE_MODULE)

}  // namespace lltm
