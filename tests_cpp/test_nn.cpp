// The torch::nn modules: what they compute, against single steps of lltm::cell;
// what they look like, against torch::nn and the Python modules.
#include "properties.h"

#include <lltm/nn.h>
#include <lltm/ops.h>
#include <lltm/serialize.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <sstream>
#include <thread>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace lltm_test {
namespace {

namespace rnn = torch::nn::utils::rnn;

using at::Tensor;
using lltm::State;

// Normally distributed.
Tensor random(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return random_like(at::empty(shape, dtype), seed);
}

// The same numbers by another order of operations, float64.
testing::AssertionResult close(const Tensor& ours, const Tensor& expected) {
  if (ours.sizes() != expected.sizes()) {
    return testing::AssertionFailure() << ours.sizes() << " against " << expected.sizes();
  }
  if (ours.numel() == 0) return testing::AssertionSuccess();
  const double error =
      (ours - expected).abs().max().item<double>() / expected.abs().max().item<double>();
  if (!(error <= 1e-13)) {
    return testing::AssertionFailure() << "relative error " << error;
  }
  return testing::AssertionSuccess();
}

std::vector<std::pair<std::string, std::vector<int64_t>>> named_shapes(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> result;
  for (const auto& parameter : module.named_parameters()) {
    result.emplace_back(parameter.key(), parameter.value().sizes().vec());
  }
  return result;
}

std::string printed(const torch::nn::Module& module) {
  std::ostringstream stream;
  stream << module;
  return stream.str();
}

// Collects warnings while it lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }

  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// ---- what holds of every form -----------------------------------------------

// A module with these weights.
template <typename Module, typename Options>
Module with_parameters(const Arguments& a) {
  Module module(Options(a.input.size(-1), a.h.size(1)).bias(a.bias.has_value()));
  module->to(a.input.scalar_type());
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->named_parameters()) {
    const std::string& key = parameter.key();
    parameter.value().copy_(
        key.starts_with("bias_hh")     ? *a.bias_hh
        : key.starts_with("bias")      ? *a.bias
        : key.starts_with("weight_hh") ? *a.weight_hh
                                       : a.weights);
  }
  return module;
}

// The parts of a state: h and c, of the GRU h.
Tensors parts(const State& state) {
  return {std::get<0>(state), std::get<1>(state)};
}
Tensors parts(const Tensor& h) {
  return {h};
}
template <typename StateT>
StateT state_from(const Tensors& parts) {
  if constexpr (std::is_same_v<StateT, State>) {
    return {parts[0], parts[1]};
  } else {
    return parts[0];
  }
}

// The output, h_n and, where the cell has one, c_n.
Tensors flat(const std::tuple<Tensor, State>& result) {
  const auto& [output, state] = result;
  return {output, std::get<0>(state), std::get<1>(state)};
}
Tensors flat(const std::tuple<Tensor, Tensor>& result) {
  const auto& [output, h_n] = result;
  return {output, h_n};
}

// The modules of a cell, and those of torch::nn, if it has such.
struct LltmModules {
  using StateT = State;
  using Layer = lltm::LLTM;
  using Prepacked = lltm::PrepackedLLTM;
  using Cell = lltm::LLTMCell;
};
struct LstmModules {
  using StateT = State;
  using Layer = lltm::LSTM;
  using Prepacked = lltm::PrepackedLSTM;
  using Cell = lltm::LSTMCell;
  using TorchLayer = torch::nn::LSTM;
  using TorchOptions = torch::nn::LSTMOptions;
  using TorchCell = torch::nn::LSTMCell;
  using TorchCellOptions = torch::nn::LSTMCellOptions;
  static constexpr const char* kName = "LSTM";
};
struct GruModules {
  using StateT = Tensor;
  using Layer = lltm::GRU;
  using Prepacked = lltm::PrepackedGRU;
  using Cell = lltm::GRUCell;
  using TorchLayer = torch::nn::GRU;
  using TorchOptions = torch::nn::GRUOptions;
  using TorchCell = torch::nn::GRUCell;
  using TorchCellOptions = torch::nn::GRUCellOptions;
  static constexpr const char* kName = "GRU";
};

template <typename Modules>
Tensors by_cell(const Arguments& a) {
  auto module = with_parameters<typename Modules::Cell, lltm::CellOptions>(a);
  const Tensors state = a.c.defined() ? Tensors{a.h, a.c} : Tensors{a.h};
  return parts(module->forward(a.input, state_from<typename Modules::StateT>(state)));
}

template <typename StateT, typename Layer>
Tensors by(Layer&& layer, const Arguments& a) {
  Tensors initial = {a.h.unsqueeze(0)};
  if (a.c.defined()) initial.push_back(a.c.unsqueeze(0));
  const auto state = state_from<StateT>(initial);
  Tensors results;
  if (a.batch_sizes) {
    const auto [rows, last] =
        layer.forward_with_packed_input(rnn::PackedSequence(a.input, *a.batch_sizes), state);
    results = flat(std::tuple(rows.data(), last));
  } else {
    results = flat(layer.forward(a.input, state));
  }
  for (size_t k = 1; k < results.size(); ++k) results[k] = results[k][0];
  return results;
}

template <typename Modules>
Tensors by_layer(const Arguments& a) {
  auto layer = with_parameters<typename Modules::Layer, lltm::LayerOptions>(a);
  return by<typename Modules::StateT>(*layer, a);
}

template <typename Modules>
Tensors by_prepacked_layer(const Arguments& a) {
  auto layer = with_parameters<typename Modules::Layer, lltm::LayerOptions>(a);
  return by<typename Modules::StateT>(layer->prepack(), a);
}

// Of a module the gradients are those of its own parameters: below. One argument after another is
// strided in the operators' tests.
Form module_form(const char* name, const char* cell_name, Function run) {
  return {
      .name = name,
      .run = std::move(run),
      .baseline = sequence,
      .cell = cell_name,
      .has_reverse = false,
      .any_size = false,
      .differentiable = false,
      .roundings = 8,
      .positions = {positions_of(cell_name).back()}};
}
std::vector<Form> cell_modules() {
  std::vector<Form> forms = {
      module_form("LLTMCell", "lltm", by_cell<LltmModules>),
      module_form("LSTMCell", "lstm", by_cell<LstmModules>),
      module_form("GRUCell", "gru", by_cell<GruModules>)};
  for (Form& form : forms) {
    form.baseline = cell;
    form.step = true;
  }
  return forms;
}
std::vector<Form> layer_modules() {
  return {
      module_form("LLTM", "lltm", by_layer<LltmModules>),
      module_form("PrepackedLLTM", "lltm", by_prepacked_layer<LltmModules>),
      module_form("LSTM", "lstm", by_layer<LstmModules>),
      module_form("PrepackedLSTM", "lstm", by_prepacked_layer<LstmModules>),
      module_form("GRU", "gru", by_layer<GruModules>),
      module_form("PrepackedGRU", "gru", by_prepacked_layer<GruModules>)};
}

INSTANTIATE_TEST_SUITE_P(
    ModulesOfOneStep, Properties, each_case(cell_modules(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(Modules, Properties, each_case(layer_modules(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    Modules, SequenceProperties, each_case(layer_modules(), kDtypes), form_case_name);

// ---- the cell -------------------------------------------------------------

lltm::LLTMCell double_cell(const lltm::LLTMCellOptions& options) {
  lltm::LLTMCell cell(options);
  cell->to(at::kDouble);
  return cell;
}

TEST(LLTMCellModule, ForwardIsOneStepOfTheOperator) {
  lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5));
  const Tensor input = random({4, 3}, 1);
  const Tensor h = random({4, 5}, 2);
  const Tensor c = random({4, 5}, 3);
  const auto [h1, c1] = cell->forward(input, std::make_tuple(h, c));
  const auto [expected_h, expected_c] = lltm::cell(input, h, c, cell->weights, cell->bias);
  EXPECT_TRUE(identical(h1, expected_h));
  EXPECT_TRUE(identical(c1, expected_c));
}

TEST(LLTMCellModule, MissingStateIsZero) {
  lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5));
  const Tensor input = random({4, 3}, 1);
  const Tensor zeros = at::zeros({4, 5}, at::kDouble);
  const auto [h, c] = cell->forward(input);
  const auto [expected_h, expected_c] = cell->forward(input, std::make_tuple(zeros, zeros));
  EXPECT_TRUE(identical(h, expected_h));
  EXPECT_TRUE(identical(c, expected_c));
}

TEST(LLTMCellModule, UnbatchedInputIsABatchOfOne) {
  lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5));
  const Tensor input = random({3}, 1);
  const Tensor h = random({5}, 2);
  const Tensor c = random({5}, 3);
  const auto [h1, c1] = cell->forward(input, std::make_tuple(h, c));
  const auto [expected_h, expected_c] =
      cell->forward(input.unsqueeze(0), std::make_tuple(h.unsqueeze(0), c.unsqueeze(0)));
  EXPECT_TRUE(identical(h1, expected_h[0]));
  EXPECT_TRUE(identical(c1, expected_c[0]));

  const auto [h2, c2] = cell->forward(input);
  EXPECT_EQ(h2.sizes(), at::IntArrayRef({5}));
  EXPECT_EQ(c2.sizes(), at::IntArrayRef({5}));
}

TEST(LLTMCellModule, BiasIsOptional) {
  lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5).bias(false));
  EXPECT_FALSE(cell->bias.defined());
  EXPECT_EQ(cell->named_parameters().keys(), std::vector<std::string>({"weights"}));
  const Tensor input = random({4, 3}, 1);
  const Tensor state = random({4, 5}, 2);
  const auto [h, c] = cell->forward(input, std::make_tuple(state, state));
  const auto [expected_h, expected_c] = lltm::cell(input, state, state, cell->weights);
  EXPECT_TRUE(identical(h, expected_h));
  EXPECT_TRUE(identical(c, expected_c));
}

TEST(LLTMCellModule, ParametersHaveTheNamesAndShapesOfThePythonModule) {
  lltm::LLTMCell cell(3, 5);
  using Named = std::vector<std::pair<std::string, std::vector<int64_t>>>;
  EXPECT_EQ(named_shapes(*cell), Named({{"weights", {15, 8}}, {"bias", {15}}}));
  for (const Tensor& parameter : cell->parameters()) {
    EXPECT_TRUE(parameter.requires_grad());
    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
  }
}

TEST(LLTMCellModule, ResetParametersDrawsFromTheBoundOfTheHiddenSize) {
  torch::manual_seed(0);
  lltm::LLTMCell cell(30, 25);
  for (const Tensor& parameter : cell->parameters()) {
    const double largest = parameter.abs().max().item<double>();
    EXPECT_LE(largest, 0.2);
    EXPECT_GT(largest, 0.18);
    EXPECT_LT(parameter.mean().abs().item<double>(), 0.05);
  }
  const Tensor drawn = cell->weights.detach().clone();
  cell->reset_parameters();
  EXPECT_FALSE(identical(cell->weights, drawn));
  torch::manual_seed(0);
  cell->reset_parameters();
  EXPECT_TRUE(identical(cell->weights, drawn));
}

TEST(LLTMCellModule, PrintsItsSizes) {
  EXPECT_EQ(printed(*lltm::LLTMCell(3, 5)), "lltm::LLTMCell(3, 5)");
  EXPECT_EQ(
      printed(*lltm::LLTMCell(lltm::LLTMCellOptions(3, 5).bias(false))),
      "lltm::LLTMCell(3, 5, bias=false)");
}

TEST(LLTMCellModule, CloneHasItsOwnParameters) {
  for (const bool bias : {true, false}) {
    lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5).bias(bias));
    const auto copy = std::dynamic_pointer_cast<lltm::LLTMCellImpl>(cell->clone());
    ASSERT_NE(copy, nullptr);
    EXPECT_TRUE(identical(copy->weights, cell->weights));
    EXPECT_EQ(copy->bias.defined(), bias);
    const Tensor before = cell->weights.detach().clone();
    {
      const at::NoGradGuard no_grad;
      copy->weights.zero_();
    }
    EXPECT_TRUE(identical(cell->weights, before));
    EXPECT_TRUE(identical(copy->named_parameters()["weights"], at::zeros_like(before)));
  }
}

TEST(LLTMCellModule, NamesWrongArguments) {
  lltm::LLTMCell cell(3, 5);
  const Tensor input = at::zeros({4, 3});
  const Tensor state = at::zeros({4, 5});
  expect_error(
      [&] { cell->forward(at::zeros({4, 2})); },
      kValueError,
      "lltm::LLTMCell: expected input of shape (B, 3) or (3,), got (4, 2)");
  expect_error(
      [&] { cell->forward(at::zeros({})); },
      kValueError,
      "lltm::LLTMCell: expected input of shape (B, 3) or (3,), got ()");
  expect_error(
      [&] { cell->forward(at::zeros({1, 4, 3})); },
      kValueError,
      "lltm::LLTMCell: expected input of shape (B, 3) or (3,), got (1, 4, 3)");
  expect_error(
      [&] { cell->forward(Tensor()); },
      kTypeError,
      "lltm::LLTMCell: expected input to be a tensor, got an undefined tensor");
  expect_error(
      [&] { cell->forward(input[0], std::make_tuple(state, state[0])); },
      kValueError,
      "lltm::LLTMCell: expected h of shape (5,), got (4, 5)");
  expect_error(
      [&] { cell->forward(input[0], std::make_tuple(state[0], state)); },
      kValueError,
      "lltm::LLTMCell: expected c of shape (5,), got (4, 5)");
  expect_error(
      [&] { cell->forward(input[0], std::make_tuple(state[0], Tensor())); },
      kTypeError,
      "lltm::LLTMCell: expected c to be a tensor, got an undefined tensor");
  expect_error(
      [&] { cell->forward(input, std::make_tuple(state, at::zeros({4, 6}))); },
      kValueError,
      "lltm::LLTMCell: expected c of shape (4, 5), got (4, 6)");
  expect_error(
      [&] { cell->forward(input.to(at::kDouble)); },
      kTypeError,
      "lltm::LLTMCell: expected input of dtype float32, that of the parameters, got float64");
  expect_error(
      [] { lltm::LLTMCell(0, 5); },
      kValueError,
      "lltm::LLTMCell: expected input_size to be positive, got 0");
  expect_error(
      [] { lltm::LLTMCell(3, -1); },
      kValueError,
      "lltm::LLTMCell: expected hidden_size to be positive, got -1");
}

// ---- the layer ------------------------------------------------------------

struct Shape {
  int64_t layers;
  bool bidirectional;
  bool bias;

  int64_t directions() const { return bidirectional ? 2 : 1; }
};

constexpr int64_t kInputSize = 3;
constexpr int64_t kHiddenSize = 5;

lltm::LLTMOptions options_of(const Shape& shape) {
  return lltm::LLTMOptions(kInputSize, kHiddenSize)
      .num_layers(shape.layers)
      .bidirectional(shape.bidirectional)
      .bias(shape.bias);
}

lltm::LLTM double_layer(const lltm::LLTMOptions& options, uint64_t seed = 0) {
  torch::manual_seed(seed);
  lltm::LLTM layer(options);
  layer->to(at::kDouble);
  return layer;
}

// What happens to the output of one layer before the next one reads it.
using Between = std::function<Tensor(const Tensor&)>;

// The layer, one row and one step after another, with parameters found by name:
// input (T, B, I), states (L*D, B, H), lengths of the rows.
std::tuple<Tensor, State> composed(
    const lltm::LLTMImpl& layer,
    Tensor input,
    const State& initial,
    const std::vector<int64_t>& lengths,
    const Between& between = [](const Tensor& output) { return output; }) {
  const auto parameters = layer.named_parameters();
  const auto& [h_0, c_0] = initial;
  const int64_t steps = input.size(0);
  const int64_t directions = layer.options.bidirectional() ? 2 : 1;
  Tensors h_n;
  Tensors c_n;
  for (int64_t k = 0; k < layer.options.num_layers(); ++k) {
    if (k > 0) {
      input = between(input);
    }
    Tensors outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const std::string suffix = "_l" + std::to_string(k) + (direction == 0 ? "" : "_reverse");
      const Tensor& weights = parameters["weights" + suffix];
      const std::optional<Tensor> bias =
          layer.options.bias() ? std::optional<Tensor>(parameters["bias" + suffix]) : std::nullopt;
      Tensors rows;
      Tensors h_rows;
      Tensors c_rows;
      for (int64_t b = 0; b < input.size(1); ++b) {
        const int64_t length = lengths.at(static_cast<size_t>(b));
        Tensor h = h_0[k * directions + direction][b].unsqueeze(0);
        Tensor c = c_0[k * directions + direction][b].unsqueeze(0);
        Tensors row(static_cast<size_t>(steps), at::zeros({1, kHiddenSize}, h.options()));
        for (int64_t s = 0; s < length; ++s) {
          const int64_t t = direction == 0 ? s : length - 1 - s;
          std::tie(h, c) = lltm::cell(input[t][b].unsqueeze(0), h, c, weights, bias);
          row[static_cast<size_t>(t)] = h;
        }
        rows.push_back(at::cat(row));
        h_rows.push_back(h);
        c_rows.push_back(c);
      }
      outputs.push_back(at::stack(rows, 1));
      h_n.push_back(at::cat(h_rows));
      c_n.push_back(at::cat(c_rows));
    }
    input = at::cat(outputs, -1);
  }
  return {input, State(at::stack(h_n), at::stack(c_n))};
}

State random_state(const Shape& shape, int64_t batch, uint64_t seed) {
  const std::vector<int64_t> sizes = {shape.layers * shape.directions(), batch, kHiddenSize};
  return {random(sizes, seed), random(sizes, seed + 1)};
}

State zero_state(const Shape& shape, int64_t batch) {
  const Tensor zeros =
      at::zeros({shape.layers * shape.directions(), batch, kHiddenSize}, at::kDouble);
  return {zeros, zeros};
}

void expect_close(
    const std::tuple<Tensor, State>& ours, const std::tuple<Tensor, State>& expected) {
  const char* const names[] = {"output", "h_n", "c_n"};
  for (size_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(close(flat(ours)[k], flat(expected)[k])) << names[k];
  }
}

class LLTMLayer : public testing::TestWithParam<Shape> {};

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    LLTMLayer,
    testing::Values(
        Shape{1, false, true},
        Shape{1, false, false},
        Shape{1, true, true},
        Shape{3, false, true},
        Shape{2, true, true},
        Shape{3, true, false}),
    [](const testing::TestParamInfo<Shape>& info) {
      return "layers" + std::to_string(info.param.layers) +
             (info.param.bidirectional ? "_both_directions" : "") +
             (info.param.bias ? "" : "_without_bias");
    });

TEST_P(LLTMLayer, ForwardIsAllItsCellsOneAfterAnother) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const Tensor input = random({7, 4, kInputSize}, 1);
  const State state = random_state(GetParam(), 4, 2);
  expect_close(layer->forward(input, state), composed(*layer, input, state, {7, 7, 7, 7}));
}

TEST_P(LLTMLayer, GradientsAreThoseOfItsCellsOneAfterAnother) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  Tensors leaves = layer->parameters();
  leaves.push_back(random({6, 2, kInputSize}, 1).requires_grad_());
  const auto [h_0, c_0] = random_state(GetParam(), 2, 2);
  leaves.push_back(h_0.detach().requires_grad_());
  leaves.push_back(c_0.detach().requires_grad_());
  const Tensor& input = leaves[leaves.size() - 3];
  const State state(leaves[leaves.size() - 2], leaves[leaves.size() - 1]);

  const Tensors outputs = flat(layer->forward(input, state));
  const Tensors grad_outputs = random_like(outputs, 4);
  const Tensors ours = torch::autograd::grad(outputs, leaves, grad_outputs);
  const Tensors expected =
      torch::autograd::grad(flat(composed(*layer, input, state, {6, 6})), leaves, grad_outputs);
  for (size_t k = 0; k < leaves.size(); ++k) {
    EXPECT_TRUE(close(ours[k], expected[k])) << "leaf " << k;
  }
}

TEST_P(LLTMLayer, MissingStateIsZero) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const Tensor input = random({7, 4, kInputSize}, 1);
  EXPECT_TRUE(identical(
      flat(layer->forward(input)), flat(layer->forward(input, zero_state(GetParam(), 4)))));
}

TEST_P(LLTMLayer, BatchFirstSwapsInputAndOutputOnly) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  lltm::LLTM batch_first = double_layer(options_of(GetParam()).batch_first(true));
  const Tensor input = random({7, 4, kInputSize}, 1);
  const State state = random_state(GetParam(), 4, 2);
  const Tensors expected = flat(layer->forward(input, state));
  const Tensors ours = flat(batch_first->forward(input.transpose(0, 1), state));
  EXPECT_TRUE(identical(ours[0], expected[0].transpose(0, 1)));
  EXPECT_TRUE(identical(ours[1], expected[1]));
  EXPECT_TRUE(identical(ours[2], expected[2]));
}

TEST_P(LLTMLayer, UnbatchedInputIsABatchOfOne) {
  for (const bool batch_first : {false, true}) {
    lltm::LLTM layer = double_layer(options_of(GetParam()).batch_first(batch_first));
    const Tensor input = random({7, kInputSize}, 1);
    const State state = random_state(GetParam(), 1, 2);
    const auto& [h_0, c_0] = state;
    const Tensors expected = flat(composed(*layer, input.unsqueeze(1), state, {7}));
    const Tensors ours =
        flat(layer->forward(input, std::make_tuple(h_0.squeeze(1), c_0.squeeze(1))));
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_TRUE(close(ours[k], expected[k].squeeze(1))) << "result " << k;
    }
    const Tensors without_state = flat(layer->forward(input));
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(without_state[k].sizes(), ours[k].sizes()) << "result " << k;
    }
  }
}

TEST_P(LLTMLayer, ShapesAreThoseOfLSTM) {
  for (const bool batch_first : {false, true}) {
    lltm::LLTM layer = double_layer(options_of(GetParam()).batch_first(batch_first));
    torch::nn::LSTM lstm(
        torch::nn::LSTMOptions(kInputSize, kHiddenSize)
            .num_layers(GetParam().layers)
            .bidirectional(GetParam().bidirectional)
            .bias(GetParam().bias)
            .batch_first(batch_first));
    lstm->to(at::kDouble);
    const Tensor input =
        batch_first ? random({4, 7, kInputSize}, 1) : random({7, 4, kInputSize}, 1);
    const Tensors ours = flat(layer->forward(input));
    const Tensors expected = flat(lstm->forward(input));
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(ours[k].sizes(), expected[k].sizes()) << "result " << k;
    }

    const Tensor lengths = at::tensor({2, 7, 4, 7}, at::kLong);
    const rnn::PackedSequence packed =
        rnn::pack_padded_sequence(input, lengths, batch_first, /*enforce_sorted=*/false);
    const auto [packed_ours, state_ours] = layer->forward_with_packed_input(packed);
    const auto [packed_lstm, state_lstm] = lstm->forward_with_packed_input(packed);
    EXPECT_EQ(packed_ours.data().sizes(), packed_lstm.data().sizes());
    EXPECT_TRUE(identical(packed_ours.batch_sizes(), packed_lstm.batch_sizes()));
    EXPECT_TRUE(identical(packed_ours.sorted_indices(), packed_lstm.sorted_indices()));
    EXPECT_TRUE(identical(packed_ours.unsorted_indices(), packed_lstm.unsorted_indices()));
    EXPECT_EQ(std::get<0>(state_ours).sizes(), std::get<0>(state_lstm).sizes());
    EXPECT_EQ(std::get<1>(state_ours).sizes(), std::get<1>(state_lstm).sizes());
  }
}

TEST_P(LLTMLayer, PackedRowsAreEachRowByItself) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const Tensor input = random({7, 4, kInputSize}, 1);
  const State state = random_state(GetParam(), 4, 2);
  const std::vector<std::vector<int64_t>> batches = {
      {7, 5, 5, 1}, {7, 7, 7, 7}, {2, 7, 1, 4}, {1, 2, 3, 7}};
  for (const std::vector<int64_t>& lengths : batches) {
    const bool sorted = std::is_sorted(lengths.rbegin(), lengths.rend());
    SCOPED_TRACE(testing::Message() << "lengths " << at::IntArrayRef(lengths));
    const rnn::PackedSequence packed = rnn::pack_padded_sequence(
        input, at::tensor(lengths, at::kLong), /*batch_first=*/false, sorted);
    EXPECT_EQ(packed.sorted_indices().defined(), !sorted);

    const auto [output, last] = layer->forward_with_packed_input(packed, state);
    const Tensor padded = std::get<0>(rnn::pad_packed_sequence(output));
    expect_close({padded, last}, composed(*layer, input, state, lengths));

    const auto [output_from_zero, last_from_zero] = layer->forward_with_packed_input(packed);
    const Tensor padded_from_zero = std::get<0>(rnn::pad_packed_sequence(output_from_zero));
    expect_close(
        {padded_from_zero, last_from_zero},
        composed(*layer, input, zero_state(GetParam(), 4), lengths));
  }
}

TEST_P(LLTMLayer, PrepackedFormGivesWhatTheLayerGivesInEvaluation) {
  const torch::NoGradGuard no_grad;
  lltm::LLTM layer(options_of(GetParam()).dropout(GetParam().layers > 1 ? 0.5 : 0.0));
  layer->eval();
  const lltm::PrepackedLLTM packed = layer->prepack();
  EXPECT_EQ(packed.options().hidden_size(), kHiddenSize);
  const Tensor input = torch::randn({7, 4, kInputSize});
  const auto expect_same = [](const Tensors& ours, const Tensors& expected) {
    for (size_t k = 0; k < expected.size(); ++k) {
      ASSERT_EQ(ours[k].sizes(), expected[k].sizes());
      EXPECT_TRUE(at::allclose(ours[k], expected[k], 1e-6, 1e-6)) << "result " << k;
    }
  };
  const auto [output, state] = layer->forward(input);
  expect_same(flat(packed.forward(input)), flat({output, state}));
  expect_same(flat(packed.forward(input, state)), flat(layer->forward(input, state)));
  expect_same(flat(packed.forward(input[0])), flat(layer->forward(input[0])));

  const rnn::PackedSequence rows = rnn::pack_padded_sequence(
      input, at::tensor({2, 7, 1, 4}, at::kLong), /*batch_first=*/false, /*enforce_sorted=*/false);
  const auto [ours, ours_state] = packed.forward_with_packed_input(rows, state);
  const auto [theirs, theirs_state] = layer->forward_with_packed_input(rows, state);
  expect_same(flat({ours.data(), ours_state}), flat({theirs.data(), theirs_state}));
}

TEST_P(LLTMLayer, FormInInt8GivesNearlyTheSame) {
  const torch::NoGradGuard no_grad;
  lltm::LLTM layer(options_of(GetParam()));
  layer->eval();
  const lltm::PrepackedLLTM packed = layer->prepack(torch::kQInt8);
  const Tensor input = torch::randn({7, 4, kInputSize});
  const Tensors ours = flat(packed.forward(input));
  const Tensors expected = flat(layer->forward(input));
  EXPECT_FALSE(identical(ours, expected));
  for (size_t k = 0; k < expected.size(); ++k) {
    ASSERT_EQ(ours[k].sizes(), expected[k].sizes());
    // Some steps of 1/127 of the largest weight and of the largest input.
    EXPECT_TRUE(at::allclose(ours[k], expected[k], 0.02, 0.02)) << "result " << k;
  }
  EXPECT_THROW((void)layer->prepack(torch::kInt8), c10::TypeError);
}

TEST_P(LLTMLayer, FormInInt8KeepsNaNInItsRow) {
  const torch::NoGradGuard no_grad;
  const lltm::PrepackedLLTM packed = lltm::LLTM(options_of(GetParam()))->prepack(torch::kQInt8);
  const int64_t batch = packed.options().batch_first() ? 0 : 1;
  const Tensor input = torch::randn({6, 6, kInputSize});
  const Tensor bad = input.clone();
  bad.select(batch, 2).fill_(NAN);
  const Tensor others = at::tensor({0, 1, 3, 4, 5});
  const auto [output, state] = packed.forward(input);
  const auto [bad_output, bad_state] = packed.forward(bad);
  const auto expect_same = [&](const Tensor& x, const Tensor& y, int64_t dim) {
    EXPECT_TRUE(at::equal(x.index_select(dim, others), y.index_select(dim, others)));
    EXPECT_TRUE(x.select(dim, 2).isnan().all().item<bool>());
  };
  expect_same(bad_output, output, batch);
  expect_same(std::get<0>(bad_state), std::get<0>(state), 1);
  expect_same(std::get<1>(bad_state), std::get<1>(state), 1);
}

TEST_P(LLTMLayer, PrepackedFormStaysAsItWas) {
  const torch::NoGradGuard no_grad;
  lltm::LLTM layer(options_of(GetParam()));
  const lltm::PrepackedLLTM packed = layer->prepack();
  const Tensor input = torch::randn({3, 2, kInputSize});
  const Tensors before = flat(packed.forward(input));
  for (const Tensor& parameter : layer->parameters()) parameter.zero_();
  EXPECT_TRUE(identical(flat(packed.forward(input)), before));
  EXPECT_FALSE(identical(flat(layer->forward(input)), before));
}

TEST_P(LLTMLayer, PrepackedFormServesSeveralThreadsAtOnce) {
  lltm::LLTM layer(options_of(GetParam()));
  const lltm::PrepackedLLTM packed = layer->prepack();
  const Tensor input = torch::randn({20, 3, kInputSize});
  const Tensors expected = flat(packed.forward(input));
  std::array<bool, 4> same = {};
  std::vector<std::thread> threads;
  for (bool& result : same) {
    threads.emplace_back([&] {
      result = true;
      for (int run = 0; run < 20; ++run) {
        result = result && identical(flat(packed.forward(input)), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool result : same) EXPECT_TRUE(result);
}

TEST_P(LLTMLayer, NoStepsGiveTheInitialStates) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const State state = random_state(GetParam(), 4, 2);
  const Tensors results = flat(layer->forward(random({0, 4, kInputSize}, 1), state));
  EXPECT_EQ(results[0].sizes(), at::IntArrayRef({0, 4, GetParam().directions() * kHiddenSize}));
  EXPECT_TRUE(identical(results[1], std::get<0>(state)));
  EXPECT_TRUE(identical(results[2], std::get<1>(state)));
}

TEST_P(LLTMLayer, EmptyBatchGivesEmptyResults) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const Tensors results = flat(layer->forward(random({7, 0, kInputSize}, 1)));
  const int64_t states = GetParam().layers * GetParam().directions();
  EXPECT_EQ(results[0].sizes(), at::IntArrayRef({7, 0, GetParam().directions() * kHiddenSize}));
  EXPECT_EQ(results[1].sizes(), at::IntArrayRef({states, 0, kHiddenSize}));
  EXPECT_EQ(results[2].sizes(), at::IntArrayRef({states, 0, kHiddenSize}));
}

TEST_P(LLTMLayer, ParametersHaveTheNamesAndShapesOfThePythonModule) {
  lltm::LLTM layer(options_of(GetParam()));
  std::vector<std::pair<std::string, std::vector<int64_t>>> expected;
  for (int64_t k = 0; k < GetParam().layers; ++k) {
    for (const char* suffix : {"", "_reverse"}) {
      if (std::string(suffix) == "_reverse" && !GetParam().bidirectional) continue;
      const std::string end = "_l" + std::to_string(k) + suffix;
      const int64_t inputs = k == 0 ? 3 : 5 * GetParam().directions();
      expected.push_back({"weights" + end, {15, 5 + inputs}});
      if (GetParam().bias) {
        expected.push_back({"bias" + end, {15}});
      }
    }
  }
  EXPECT_EQ(named_shapes(*layer), expected);
}

TEST_P(LLTMLayer, AllWeightsAreTheParameters) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  const Tensors parameters = layer->parameters();
  const Tensors weights = layer->all_weights();
  ASSERT_EQ(weights.size(), parameters.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    EXPECT_TRUE(weights[k].is_same(parameters[k])) << "parameter " << k;
  }
}

TEST_P(LLTMLayer, CloneHasItsOwnParameters) {
  lltm::LLTM layer = double_layer(options_of(GetParam()));
  layer->eval();
  const auto copy = std::dynamic_pointer_cast<lltm::LLTMImpl>(layer->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_FALSE(copy->is_training());
  const Tensor input = random({7, 4, kInputSize}, 1);
  const Tensors expected = flat(layer->forward(input));
  EXPECT_TRUE(identical(flat(copy->forward(input)), expected));
  {
    const at::NoGradGuard no_grad;
    for (Tensor& parameter : copy->parameters()) {
      parameter.zero_();
    }
  }
  EXPECT_TRUE(identical(flat(layer->forward(input)), expected));
  EXPECT_FALSE(identical(flat(copy->forward(input)), expected));
}

TEST_P(LLTMLayer, ConvertsToOtherDtypes) {
  for (const at::ScalarType dtype : kDtypes) {
    SCOPED_TRACE(name(dtype));
    lltm::LLTM layer(options_of(GetParam()));
    layer->to(at::Device(at::kCPU), dtype);
    for (const Tensor& parameter : layer->all_weights()) {
      EXPECT_EQ(parameter.scalar_type(), dtype);
    }
    for (const Tensor& result : flat(layer->forward(random({7, 4, kInputSize}, 1, dtype)))) {
      EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(result.isfinite().all().item<bool>());
    }
  }
}

// Three layers, so that dropout has two places.
const Shape kThreeLayers = {3, true, true};

TEST(LLTMDropout, OfZeroChangesNothing) {
  lltm::LLTM plain = double_layer(options_of(kThreeLayers));
  lltm::LLTM layer = double_layer(options_of(kThreeLayers).dropout(0.0));
  const Tensor input = random({7, 4, kInputSize}, 1);
  EXPECT_TRUE(identical(flat(layer->forward(input)), flat(plain->forward(input))));
}

TEST(LLTMDropout, OfOneHidesEveryLayerFromTheNext) {
  lltm::LLTM layer = double_layer(options_of(kThreeLayers).dropout(1.0));
  const Tensor input = random({7, 4, kInputSize}, 1);
  const State state = random_state(kThreeLayers, 4, 2);
  expect_close(
      layer->forward(input, state),
      composed(*layer, input, state, {7, 7, 7, 7}, [](const Tensor& output) {
        return at::zeros_like(output);
      }));
}

TEST(LLTMDropout, DoesNothingInEvaluation) {
  lltm::LLTM plain = double_layer(options_of(kThreeLayers));
  lltm::LLTM layer = double_layer(options_of(kThreeLayers).dropout(1.0));
  layer->eval();
  const Tensor input = random({7, 4, kInputSize}, 1);
  const Tensors expected = flat(plain->forward(input));
  EXPECT_TRUE(identical(flat(layer->forward(input)), expected));
  layer->train();
  EXPECT_FALSE(identical(flat(layer->forward(input)), expected));
}

TEST(LLTMDropout, ActsOnTheOutputOfEveryLayerButTheLast) {
  lltm::LLTM layer = double_layer(options_of(kThreeLayers).dropout(0.3));
  const Tensor input = random({7, 4, kInputSize}, 1);
  const State state = random_state(kThreeLayers, 4, 2);
  torch::manual_seed(5);
  const std::tuple<Tensor, State> ours = layer->forward(input, state);
  torch::manual_seed(5);
  int calls = 0;
  expect_close(ours, composed(*layer, input, state, {7, 7, 7, 7}, [&](const Tensor& output) {
                 ++calls;
                 return at::dropout(output, 0.3, /*train=*/true);
               }));
  EXPECT_EQ(calls, 2);
}

TEST(LLTMDropout, OfASingleLayerWarnsThatItDoesNothing) {
  Warnings warnings;
  lltm::LLTM layer(lltm::LLTMOptions(3, 5).dropout(0.5));
  EXPECT_EQ(
      warnings.texts,
      std::vector<std::string>({"lltm::LLTM: dropout is applied between layers, so it does "
                                "nothing with num_layers=1"}));
  layer->clone();
  lltm::LLTM(lltm::LLTMOptions(3, 5).dropout(0.5).num_layers(2));
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST(LLTMModule, StateOfOneCallIsThatOfTheNext) {
  lltm::LLTM layer = double_layer(lltm::LLTMOptions(3, 5).num_layers(2));
  const Tensor input = random({8, 4, 3}, 1);
  auto [whole, last_of_whole] = layer->forward(input);
  auto [first, state] = layer->forward(input.narrow(0, 0, 3));
  auto [second, last] = layer->forward(input.narrow(0, 3, 5), state);
  expect_close({at::cat({first, second}), last}, {whole, last_of_whole});
}

TEST(LLTMModule, TakesTheStateAsATupleOrInBraces) {
  lltm::LLTM layer = double_layer(lltm::LLTMOptions(3, 5));
  const Tensor input = random({8, 4, 3}, 1);
  const Tensor h = random({1, 4, 5}, 2);
  const Tensor c = random({1, 4, 5}, 3);
  const Tensors expected = flat(layer->forward(input, std::make_tuple(h, c)));
  EXPECT_TRUE(identical(flat(layer->forward(input, {{h, c}})), expected));
  EXPECT_TRUE(identical(flat(layer(input, std::make_tuple(h, c))), expected));
  EXPECT_TRUE(identical(flat(layer->forward(input, State(h, c))), expected));
}

TEST(LLTMModule, StandsInASequential) {
  lltm::LLTM layer = double_layer(lltm::LLTMOptions(3, 5));
  lltm::LLTMCell cell = double_cell(lltm::LLTMCellOptions(3, 5));
  const Tensor input = random({8, 4, 3}, 1);
  torch::nn::Sequential layers(layer);
  EXPECT_TRUE(identical(
      flat(layers->forward<std::tuple<Tensor, State>>(input)), flat(layer->forward(input))));
  torch::nn::Sequential cells(cell);
  EXPECT_TRUE(identical(
      std::get<0>(cells->forward<State>(input[0])), std::get<0>(cell->forward(input[0]))));
  EXPECT_EQ(
      layers->named_parameters().keys(), std::vector<std::string>({"0.weights_l0", "0.bias_l0"}));
}

TEST(LLTMModule, IsSavedAndLoadedByTorchToo) {
  for (const bool bias : {true, false}) {
    const lltm::LLTMOptions options = lltm::LLTMOptions(3, 5).num_layers(2).bias(bias);
    lltm::LLTM saved = double_layer(options, 0);
    lltm::LLTM loaded = double_layer(options, 1);
    std::stringstream stream;
    torch::save(saved, stream);
    torch::load(loaded, stream);
    EXPECT_TRUE(identical(loaded->all_weights(), saved->all_weights()));
  }
}

TEST(LLTMModule, FlattenParametersLeavesThemWhereTheyAre) {
  lltm::LLTM layer(lltm::LLTMOptions(3, 5).num_layers(2));
  std::vector<const void*> before;
  for (const Tensor& parameter : layer->parameters()) {
    before.push_back(parameter.const_data_ptr());
  }
  layer->flatten_parameters();
  std::vector<const void*> after;
  for (const Tensor& parameter : layer->parameters()) {
    after.push_back(parameter.const_data_ptr());
  }
  EXPECT_EQ(after, before);
}

TEST(LLTMModule, ResetParametersDrawsFromTheBoundOfTheHiddenSize) {
  torch::manual_seed(0);
  lltm::LLTM layer(lltm::LLTMOptions(30, 25).num_layers(2).bidirectional(true));
  Tensors drawn;
  for (const Tensor& parameter : layer->parameters()) {
    const double largest = parameter.abs().max().item<double>();
    EXPECT_LE(largest, 0.2);
    EXPECT_GT(largest, 0.18);
    drawn.push_back(parameter.detach().clone());
  }
  layer->reset_parameters();
  EXPECT_FALSE(identical(layer->parameters()[0], drawn[0]));
  torch::manual_seed(0);
  layer->reset_parameters();
  EXPECT_TRUE(identical(layer->parameters(), drawn));
}

TEST(LLTMModule, PrintsItsOptions) {
  EXPECT_EQ(
      printed(*lltm::LLTM(
          lltm::LLTMOptions(3, 5).num_layers(2).batch_first(true).dropout(0.25).bidirectional(
              true))),
      "lltm::LLTM(input_size=3, hidden_size=5, num_layers=2, bias=true, batch_first=true, "
      "dropout=0.25, bidirectional=true)");
}

TEST(LLTMModule, GradientDescentReducesTheLoss) {
  torch::manual_seed(0);
  lltm::LLTM layer(lltm::LLTMOptions(3, 5).num_layers(2).bidirectional(true));
  const Tensor input = random({7, 4, 3}, 1, at::kFloat);
  const Tensor target = random({7, 4, 10}, 2, at::kFloat).tanh();
  torch::optim::SGD optimizer(layer->parameters(), /*lr=*/0.1);
  const auto loss_of = [&] {
    const auto [output, state] = layer->forward(input);
    return at::mse_loss(output, target);
  };
  double previous = loss_of().item<double>();
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    loss_of().backward();
    optimizer.step();
    const double loss = loss_of().item<double>();
    EXPECT_LT(loss, previous) << "step " << step;
    previous = loss;
  }
}

TEST(LLTMModule, NamesWrongArguments) {
  lltm::LLTM layer(lltm::LLTMOptions(3, 5).num_layers(2));
  lltm::LLTM batch_first(lltm::LLTMOptions(3, 5).batch_first(true));
  const Tensor input = at::zeros({7, 4, 3});
  const Tensor state = at::zeros({2, 4, 5});
  expect_error(
      [&] { layer->forward(at::zeros({7, 4, 2})); },
      kValueError,
      "lltm::LLTM: expected input of shape (T, B, 3) or (T, 3), got (7, 4, 2)");
  expect_error(
      [&] { batch_first->forward(at::zeros({3})); },
      kValueError,
      "lltm::LLTM: expected input of shape (B, T, 3) or (T, 3), got (3,)");
  expect_error(
      [&] { layer->forward(Tensor()); },
      kTypeError,
      "lltm::LLTM: expected input to be a tensor, got an undefined tensor");
  expect_error(
      [&] { layer->forward(input, std::make_tuple(state.narrow(0, 0, 1), state)); },
      kValueError,
      "lltm::LLTM: expected h_0 of shape (2, 4, 5), got (1, 4, 5)");
  expect_error(
      [&] { layer->forward(input, std::make_tuple(state, state.narrow(1, 0, 1))); },
      kValueError,
      "lltm::LLTM: expected c_0 of shape (2, 4, 5), got (2, 1, 5)");
  expect_error(
      [&] { layer->forward(input[0], std::make_tuple(state, state)); },
      kValueError,
      "lltm::LLTM: expected h_0 of shape (2, 5), got (2, 4, 5)");
  expect_error(
      [&] { layer->forward(input[0], std::make_tuple(state[0].narrow(0, 0, 2), state)); },
      kValueError,
      "lltm::LLTM: expected c_0 of shape (2, 5), got (2, 4, 5)");
  expect_error(
      [&] { layer->forward(input, std::make_tuple(Tensor(), state)); },
      kTypeError,
      "lltm::LLTM: expected h_0 to be a tensor, got an undefined tensor");
  expect_error(
      [&] { layer->forward(input.to(at::kDouble)); },
      kTypeError,
      "lltm::LLTM: expected input of dtype float32, that of the parameters, got float64");
  expect_error(
      [] { lltm::LLTM(-3, 5); },
      kValueError,
      "lltm::LLTM: expected input_size to be positive, got -3");
  expect_error(
      [] { lltm::LLTM(3, 0); },
      kValueError,
      "lltm::LLTM: expected hidden_size to be positive, got 0");
  expect_error(
      [] { lltm::LLTM(lltm::LLTMOptions(3, 5).num_layers(0)); },
      kValueError,
      "lltm::LLTM: expected num_layers to be positive, got 0");
  expect_error(
      [] { lltm::LLTM(lltm::LLTMOptions(INT64_MAX, 3)); },
      kValueError,
      "lltm::LLTM: expected input_size of at most 134217728, got 9223372036854775807");
  expect_error(
      [] { lltm::LLTM(lltm::LLTMOptions(3, 5).num_layers(INT64_MAX)); },
      kValueError,
      "lltm::LLTM: expected num_layers of at most 65536, got 9223372036854775807");
  expect_error(
      [&] { layer->forward(input.to_sparse()); },
      kRuntimeError,
      "lltm::LLTM: expected input of layout Strided, got Sparse");
  expect_error(
      [] { lltm::LLTM(lltm::LLTMOptions(3, 5).dropout(1.5)); },
      kValueError,
      "lltm::LLTM: expected dropout to lie in [0, 1], got 1.5");
  expect_error(
      [] { lltm::LLTM(lltm::LLTMOptions(3, 5).dropout(std::nan(""))); },
      kValueError,
      "lltm::LLTM: expected dropout to lie in [0, 1], got nan");
}

TEST(LLTMModule, NamesWrongPackedInput) {
  lltm::LLTM layer(lltm::LLTMOptions(3, 5));
  const Tensor batch_sizes = at::tensor({2, 1}, at::kLong);
  const Tensor state = at::zeros({1, 3, 5});
  const auto forward = [&](const Tensor& rows, const Tensor& sizes) {
    layer->forward_with_packed_input(rnn::PackedSequence(rows, sizes));
  };
  expect_error(
      [&] { forward(at::zeros({3, 2}), batch_sizes); },
      kValueError,
      "lltm::LLTM: expected input of packed rows (N, 3), got (3, 2)");
  expect_error(
      [&] { forward(at::zeros({3, 1, 3}), batch_sizes); },
      kValueError,
      "lltm::LLTM: expected input of packed rows (N, 3), got (3, 1, 3)");
  expect_error(
      [&] { forward(Tensor(), batch_sizes); },
      kTypeError,
      "lltm::LLTM: expected input to be a tensor, got an undefined tensor");
  expect_error(
      [&] { forward(at::zeros({4, 3}), batch_sizes); },
      kValueError,
      "lltm::sequence: expected input of shape (3, I), the sum of batch_sizes, got 4 rows");
  expect_error(
      [&] { forward(at::zeros({3, 3}), batch_sizes.unsqueeze(0)); },
      kValueError,
      "lltm::sequence: expected batch_sizes of shape (T,), got (1, 2)");
  expect_error(
      [&] { forward(at::zeros({3, 3}), batch_sizes.to(at::kInt)); },
      kTypeError,
      "lltm::sequence: expected batch_sizes of dtype int64, got int32");
  expect_error(
      [&] {
        layer->forward_with_packed_input(
            rnn::PackedSequence(at::zeros({3, 3}), batch_sizes), {{state, state}});
      },
      kValueError,
      "lltm::LLTM: expected h_0 of shape (1, 2, 5), got (1, 3, 5)");
}

// ---- LSTM and GRU: those of torch::nn -----------------------------------------

template <typename Modules>
class TorchModules : public testing::Test {
 protected:
  using StateT = typename Modules::StateT;
  using Layer = typename Modules::Layer;

  static std::string called(const std::string& text) { return "lltm::" + (Modules::kName + text); }

  // A layer, and torch's with the same parameters.
  static std::pair<Layer, typename Modules::TorchLayer> both(
      const Shape& shape, bool batch_first = false) {
    typename Modules::TorchLayer theirs(
        typename Modules::TorchOptions(kInputSize, kHiddenSize)
            .num_layers(shape.layers)
            .bidirectional(shape.bidirectional)
            .bias(shape.bias)
            .batch_first(batch_first));
    Layer ours(
        lltm::LayerOptions(kInputSize, kHiddenSize)
            .num_layers(shape.layers)
            .bidirectional(shape.bidirectional)
            .bias(shape.bias)
            .batch_first(batch_first));
    theirs->to(at::kDouble);
    ours->to(at::kDouble);
    take_parameters(*ours, *theirs);
    return {ours, theirs};
  }

  // Names, shapes and order are the same.
  static void take_parameters(torch::nn::Module& ours, const torch::nn::Module& theirs) {
    ASSERT_EQ(named_shapes(ours), named_shapes(theirs));
    const at::NoGradGuard no_grad;
    const Tensors from = theirs.parameters();
    for (size_t k = 0; k < from.size(); ++k) ours.parameters()[k].copy_(from[k]);
  }

  static StateT random_state(at::IntArrayRef sizes) {
    const Tensors both = {random(sizes, 2), random(sizes, 3)};
    return state_from<StateT>(both);
  }

  static void expect_same(const Tensors& ours, const Tensors& expected) {
    ASSERT_EQ(ours.size(), expected.size());
    for (size_t k = 0; k < ours.size(); ++k) {
      EXPECT_TRUE(close(ours[k], expected[k])) << "result " << k;
    }
  }

  static constexpr Shape kShapes[] = {
      {1, false, true}, {1, true, false}, {3, false, true}, {2, true, true}};
};

class NameOfModules {
 public:
  template <typename Modules>
  static std::string GetName(int) {
    return Modules::kName;
  }
};
using BothModules = testing::Types<LstmModules, GruModules>;
TYPED_TEST_SUITE(TorchModules, BothModules, NameOfModules);

TYPED_TEST(TorchModules, LayersComputeWhatTorchComputes) {
  for (const Shape& shape : TestFixture::kShapes) {
    for (const bool batch_first : {false, true}) {
      SCOPED_TRACE(testing::Message() << shape.layers << " layers, batch first " << batch_first);
      auto [ours, theirs] = TestFixture::both(shape, batch_first);
      const Tensor input = random({6, 4, kInputSize}, 1);
      const auto state = TestFixture::random_state(
          {shape.layers * shape.directions(), batch_first ? 6 : 4, kHiddenSize});
      const Tensors results = flat(ours->forward(input, state));
      const Tensors expected = flat(theirs->forward(input, state));
      TestFixture::expect_same(results, expected);
      const Tensors grads = random_like(expected, 4);
      TestFixture::expect_same(
          torch::autograd::grad(results, ours->parameters(), grads),
          torch::autograd::grad(expected, theirs->parameters(), grads));
      TestFixture::expect_same(flat(ours->forward(input)), flat(theirs->forward(input)));
      // Without a batch, which torch's do not take.
      const Tensors single = flat(ours->forward(input[0]));
      Tensors of_one = flat(theirs->forward(input[0].unsqueeze(batch_first ? 0 : 1)));
      of_one[0] = of_one[0].squeeze(batch_first ? 0 : 1);
      for (size_t k = 1; k < of_one.size(); ++k) of_one[k] = of_one[k].squeeze(1);
      TestFixture::expect_same(single, of_one);
    }
  }
}

TYPED_TEST(TorchModules, PackedRowsAreThoseOfTorch) {
  for (const Shape& shape : TestFixture::kShapes) {
    auto [ours, theirs] = TestFixture::both(shape);
    const auto state =
        TestFixture::random_state({shape.layers * shape.directions(), 4, kHiddenSize});
    const rnn::PackedSequence rows = rnn::pack_padded_sequence(
        random({7, 4, kInputSize}, 1),
        at::tensor({2, 7, 1, 4}, at::kLong),
        /*batch_first=*/false,
        /*enforce_sorted=*/false);
    const auto [output, last] = ours->forward_with_packed_input(rows, state);
    const auto [expected, expected_last] = theirs->forward_with_packed_input(rows, state);
    TestFixture::expect_same(
        flat(std::tuple(output.data(), last)), flat(std::tuple(expected.data(), expected_last)));
    EXPECT_TRUE(identical(output.unsorted_indices(), expected.unsorted_indices()));
  }
}

TYPED_TEST(TorchModules, CellsComputeWhatTorchComputes) {
  for (const bool bias : {true, false}) {
    typename TypeParam::TorchCell theirs(
        typename TypeParam::TorchCellOptions(kInputSize, kHiddenSize).bias(bias));
    typename TypeParam::Cell ours(lltm::CellOptions(kInputSize, kHiddenSize).bias(bias));
    theirs->to(at::kDouble);
    ours->to(at::kDouble);
    TestFixture::take_parameters(*ours, *theirs);
    EXPECT_EQ(ours->bias_hh.defined(), bias);
    EXPECT_TRUE(identical(ours->weight_hh, theirs->weight_hh));
    const Tensor input = random({4, kInputSize}, 1);
    const auto state = TestFixture::random_state({4, kHiddenSize});
    TestFixture::expect_same(
        parts(ours->forward(input, state)), parts(theirs->forward(input, state)));
    TestFixture::expect_same(parts(ours->forward(input)), parts(theirs->forward(input)));
    const auto row = TestFixture::random_state({kHiddenSize});
    EXPECT_EQ(parts(ours->forward(input[0], row))[0].sizes(), at::IntArrayRef({kHiddenSize}));
  }
}

TYPED_TEST(TorchModules, PrepackedFormsGiveWhatTheLayerGives) {
  const torch::NoGradGuard no_grad;
  for (const Shape& shape : TestFixture::kShapes) {
    auto [layer, theirs] = TestFixture::both(shape);
    layer->to(at::kFloat);
    const Tensor input = torch::randn({7, 4, kInputSize});
    const Tensors expected = flat(layer->forward(input));
    const typename TypeParam::Prepacked packed = layer->prepack();
    const Tensors ours = flat(packed.forward(input));
    const Tensors in_int8 = flat(layer->prepack(torch::kQInt8).forward(input));
    for (size_t k = 0; k < expected.size(); ++k) {
      EXPECT_TRUE(at::allclose(ours[k], expected[k], 1e-6, 1e-6)) << "result " << k;
      // Some steps of 1/127 of the largest weight and of the largest input.
      EXPECT_TRUE(at::allclose(in_int8[k], expected[k], 0.02, 0.02)) << "result " << k;
      EXPECT_FALSE(identical(in_int8[k], expected[k])) << "result " << k;
    }
  }
}

TYPED_TEST(TorchModules, CheckpointsOfTorchAreRead) {
  const std::string path = testing::TempDir() + "lltm_" + TypeParam::kName + ".safetensors";
  auto [ours, theirs] = TestFixture::both({2, true, true});
  typename TypeParam::Layer loaded(
      lltm::LayerOptions(kInputSize, kHiddenSize).num_layers(2).bidirectional(true));
  loaded->to(at::kDouble);
  lltm::save_state_dict(theirs, path);
  lltm::load_state_dict(loaded, path);
  std::remove(path.c_str());
  EXPECT_TRUE(identical(loaded->all_weights(), ours->all_weights()));
}

TYPED_TEST(TorchModules, ACloneAndCheckpointStepsChangeNoResult) {
  auto [layer, theirs] = TestFixture::both({2, true, true});
  const auto copy =
      std::dynamic_pointer_cast<typename TypeParam::Layer::ContainedType>(layer->clone());
  ASSERT_NE(copy, nullptr);
  copy->options.checkpoint_steps(3);
  const Tensor input = random({7, 4, kInputSize}, 1);
  const Tensors expected = flat(layer->forward(input)), results = flat(copy->forward(input));
  EXPECT_TRUE(identical(results, expected));
  const Tensors grads = random_like(expected, 4);
  TestFixture::expect_same(
      torch::autograd::grad(results, copy->parameters(), grads),
      torch::autograd::grad(expected, layer->parameters(), grads));
  for (const Tensor& parameter : copy->parameters()) parameter.detach().zero_();
  EXPECT_TRUE(identical(flat(layer->forward(input)), expected));
}

TYPED_TEST(TorchModules, PrintTheirOptions) {
  EXPECT_EQ(
      printed(*typename TypeParam::Layer(lltm::LayerOptions(3, 5).num_layers(2))),
      TestFixture::called(
          "(input_size=3, hidden_size=5, num_layers=2, bias=true, "
          "batch_first=false, dropout=0, bidirectional=false)"));
  EXPECT_EQ(printed(*typename TypeParam::Cell(3, 5)), TestFixture::called("Cell(3, 5)"));
}

TYPED_TEST(TorchModules, StandInASequential) {
  typename TypeParam::Layer layer(3, 5);
  const Tensor input = random({8, 4, 3}, 1, at::kFloat);
  torch::nn::Sequential layers(layer);
  using Result = std::tuple<Tensor, typename TypeParam::StateT>;
  EXPECT_TRUE(
      identical(flat(layers->template forward<Result>(input)), flat(layer->forward(input))));
  EXPECT_EQ(layers->named_parameters().keys().front(), "0.weight_ih_l0");
}

TYPED_TEST(TorchModules, NameWrongArguments) {
  typename TypeParam::Layer layer(3, 5);
  typename TypeParam::Cell cell(3, 5);
  const auto state =
      state_from<typename TypeParam::StateT>({at::zeros({1, 2, 5}), at::zeros({1, 2, 5})});
  expect_error(
      [&] { layer->forward(at::zeros({7, 4, 2})); },
      kValueError,
      TestFixture::called(": expected input of shape (T, B, 3) or (T, 3), got (7, 4, 2)"));
  expect_error(
      [&] { layer->forward(at::zeros({7, 4, 3}), state); },
      kValueError,
      TestFixture::called(": expected h_0 of shape (1, 4, 5), got (1, 2, 5)"));
  expect_error(
      [&] { cell->forward(at::zeros({4, 3}), state); },
      kValueError,
      TestFixture::called("Cell: expected h of shape (4, 5), got (1, 2, 5)"));
  expect_error(
      [] { typename TypeParam::Layer(lltm::LayerOptions(3, 5).num_layers(0)); },
      kValueError,
      TestFixture::called(": expected num_layers to be positive, got 0"));
}

TEST(LSTMModule, ProjectsAsTorchNn) {
  const auto options = lltm::LSTMOptions(3, 5).num_layers(2).bidirectional(true).proj_size(2);
  lltm::LSTM ours(options);
  torch::nn::LSTM theirs(
      torch::nn::LSTMOptions(3, 5).num_layers(2).bidirectional(true).proj_size(2));
  ours->to(at::kDouble);
  theirs->to(at::kDouble);
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : theirs->named_parameters()) {
      ours->named_parameters()[item.key()].copy_(item.value());
    }
  }
  const Tensor input = random({7, 4, 3}, 1);
  const State state = {random({4, 4, 2}, 2), random({4, 4, 5}, 3)};
  const Tensors expected = flat(theirs->forward(input, state));
  const Tensors results = flat(ours->forward(input, state));
  const Tensors in_advance = flat(ours->prepack().forward(input, state));
  for (size_t k = 0; k < expected.size(); ++k) {
    EXPECT_TRUE(at::allclose(results[k], expected[k], 1e-10, 1e-10)) << "result " << k;
    EXPECT_TRUE(at::allclose(in_advance[k], expected[k], 1e-10, 1e-10)) << "result " << k;
  }
  const Tensors grads = random_like(expected, 4);
  const Tensors found = torch::autograd::grad(results, ours->parameters(), grads);
  const Tensors wanted = torch::autograd::grad(expected, theirs->parameters(), grads);
  for (size_t k = 0; k < wanted.size(); ++k) {
    EXPECT_TRUE(at::allclose(found[k], wanted[k], 1e-10, 1e-10)) << "parameter " << k;
  }
  EXPECT_NE(printed(*ours).find("proj_size=2"), std::string::npos);
}

TEST(LSTMModule, NamesWrongProjections) {
  expect_error(
      [] { lltm::LSTM(lltm::LSTMOptions(3, 5).proj_size(5)); },
      kValueError,
      "lltm::LSTM: expected proj_size to lie in [0, hidden_size), got 5");
  expect_error(
      [] { lltm::LSTM(lltm::LSTMOptions(3, 5).proj_size(2).recurrent_dropout(0.5)); },
      kValueError,
      "lltm::LSTM: expected recurrent_dropout to be 0 with proj_size, got 0.5");
  expect_error(
      [] { lltm::GRU(lltm::GRUOptions(3, 5).proj_size(2)); },
      kValueError,
      "lltm::GRU: expected proj_size to be 0, got 2: only an LSTM has a projection");
}

TEST(LSTMModule, NamesAStateWithoutC) {
  lltm::LSTM layer(3, 5);
  expect_error(
      [&] { layer->forward(at::zeros({7, 4, 3}), State(at::zeros({1, 4, 5}), Tensor())); },
      kTypeError,
      "lltm::LSTM: expected c_0 to be a tensor, got an undefined tensor");
}

}  // namespace
}  // namespace lltm_test
