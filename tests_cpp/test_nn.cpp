// nn.cpp outside the operators `layer` and `layer_step`, which the Python tests cover.
#include "cell/cells.h"
#include "cell_program.h"
#include "testing.h"

#include <lltm/cell.h>
#include <lltm/nn.h>
#include <lltm/ops.h>
#include <lltm/serialize.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lltm_test {
namespace {

namespace rnn = torch::nn::utils::rnn;
using at::Tensor;
using lltm::State;

const lltm::Cell kDuo = lltm::Cell::parse(kDuoText);
constexpr int64_t kInputSize = 3, kHiddenSize = 5;

template <typename Module, typename Options>
constexpr bool kIsCustom = !requires(const Options& options) { Module::cell_name(options); };

template <typename Options, typename Module>
Options options_of(int64_t input_size = kInputSize, int64_t hidden_size = kHiddenSize) {
  if constexpr (kIsCustom<Module, Options>) {
    return {kDuo, input_size, hidden_size};
  } else {
    return {input_size, hidden_size};
  }
}

Tensors list(const State& state) {
  return {std::get<0>(state), std::get<1>(state)};
}
Tensors list(const Tensor& h) {
  return {h};
}
Tensors list(const Tensors& states) {
  return states;
}
template <typename StateT>
Tensors list(const std::tuple<Tensor, StateT>& result) {
  Tensors all = list(std::get<1>(result));
  all.insert(all.begin(), std::get<0>(result));
  return all;
}
template <typename StateT>
Tensors list(const std::tuple<rnn::PackedSequence, StateT>& result) {
  return list(std::tuple(std::get<0>(result).data(), std::get<1>(result)));
}

template <typename StateT>
StateT state_from(const Tensors& states) {
  if constexpr (std::is_same_v<StateT, State>) {
    return {states.at(0), states.at(1)};
  } else if constexpr (std::is_same_v<StateT, Tensor>) {
    return states.at(0);
  } else {
    return states;
  }
}

std::string text_of(const torch::nn::Module& module) {
  std::ostringstream stream;
  stream << module;
  return stream.str();
}

using Named = std::vector<std::pair<std::string, std::vector<int64_t>>>;
Named shapes_of(const torch::nn::Module& module) {
  Named shapes;
  for (const auto& parameter : module.named_parameters()) {
    shapes.emplace_back(parameter.key(), parameter.value().sizes().vec());
  }
  return shapes;
}

void expect_allclose(const Tensors& ours, const Tensors& expected, double tolerance) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t k = 0; k < ours.size(); ++k) {
    ASSERT_EQ(ours[k].sizes(), expected[k].sizes()) << "result " << k;
    EXPECT_TRUE(at::allclose(ours[k], expected[k], tolerance, tolerance)) << "result " << k;
  }
}

template <typename LayerImpl, typename StepImpl>
struct ModulesOf {
  using Layer = LayerImpl;
  using Step = StepImpl;
};

template <typename Of>
class Modules : public testing::Test {
 protected:
  using LayerImpl = typename Of::Layer;
  using StepImpl = typename Of::Step;
  using Layer = torch::nn::ModuleHolder<LayerImpl>;
  using Step = torch::nn::ModuleHolder<StepImpl>;
  using StateT = typename LayerImpl::StateT;
  using Prepacked = lltm::PrepackedLayer<LayerImpl>;
  static constexpr bool kIsCustom = lltm_test::kIsCustom<LayerImpl, lltm::LayerOptions>;

  Modules() : name_(text_of(*layer())), step_name_(text_of(*Step(step_options()))) {
    torch::manual_seed(1);
    name_.resize(name_.find('('));
    step_name_.resize(step_name_.find('('));
    if constexpr (kIsCustom) {
      cell_ = kDuoText;
      states_ = 1 + kDuo.states().size();
    } else {
      cell_ = LayerImpl::cell_name(options());
      states_ = 1 + static_cast<size_t>(info_of(cell_).states);
    }
  }

  static lltm::LayerOptions options() { return options_of<lltm::LayerOptions, LayerImpl>(); }
  static lltm::CellOptions step_options() { return options_of<lltm::CellOptions, StepImpl>(); }
  static Layer layer(const lltm::LayerOptions& given = options()) { return Layer(given); }

  static std::vector<lltm::LayerOptions> some_options() {
    return {
        options(),
        options().num_layers(2).bidirectional(true).batch_first(true).bias(false),
        options().num_layers(3).dropout(0.3).recurrent_dropout(0.4),
        options().bidirectional(true).checkpoint_steps(2)};
  }

  Tensors states(std::vector<int64_t> shape) const {
    Tensors states;
    shape.push_back(kHiddenSize);
    while (states.size() < states_) states.push_back(at::randn(shape));
    return states;
  }
  static int64_t count_of(const lltm::LayerOptions& o) {
    return o.num_layers() * (o.bidirectional() ? 2 : 1);
  }

  Tensors by_operator(
      const Layer& layer,
      const Tensor& input,
      const Tensors& states,
      const std::optional<Tensor>& reset,
      const rnn::PackedSequence* packed = nullptr) const {
    const lltm::LayerOptions& o = layer->options;
    const bool training = layer->is_training();
    const auto given = [&](const Tensor& (rnn::PackedSequence::*part)() const) {
      return packed == nullptr || !(packed->*part)().defined() ? std::optional<Tensor>()
                                                               : (packed->*part)();
    };
    const Stack results = call(
        "lltm::layer",
        {cell_,
         input,
         states,
         layer->parameters(),
         o.bias(),
         o.input_size(),
         o.hidden_size(),
         o.num_layers(),
         o.batch_first(),
         o.bidirectional(),
         training ? o.dropout() : 0.0,
         training ? o.recurrent_dropout() : 0.0,
         o.checkpoint_steps(),
         /*prepacked=*/false,
         given(&rnn::PackedSequence::batch_sizes),
         given(&rnn::PackedSequence::sorted_indices),
         given(&rnn::PackedSequence::unsorted_indices),
         reset});
    Tensors all = results[1].toTensorVector();
    all.insert(all.begin(), results[0].toTensor());
    return all;
  }

  template <typename Module>
  static void expect_the_same(
      const Module& module,
      const std::function<Tensors()>& ours,
      const std::function<Tensors()>& other) {
    std::vector<Tensors> found;
    for (const auto& run : {ours, other}) {
      torch::manual_seed(2);  // for dropout
      Tensors results = run();
      const Tensors gradients =
          torch::autograd::grad(results, module->parameters(), random_like(results, 3));
      results.insert(results.end(), gradients.begin(), gradients.end());
      found.push_back(results);
    }
    EXPECT_TRUE(identical(found[0], found[1]));
  }

  std::string name_, step_name_, cell_;
  size_t states_;
};

template <typename None, typename... Each>
using Rest = testing::Types<Each...>;
#define LLTM_MODULES(Layer, Step, ...) , ModulesOf<lltm::Layer, lltm::Step>
using EachCell = Rest<void LLTM_FOR_EACH_MODULE(LLTM_MODULES)>;
#undef LLTM_MODULES
struct NameOfCell {
  template <typename Of>
  static std::string GetName(int) {
    const std::string text =
        text_of(typename Of::Layer(options_of<lltm::LayerOptions, typename Of::Layer>()));
    return text.substr(6, text.find_first_of(".(") - 6);  // after lltm::
  }
};
TYPED_TEST_SUITE(Modules, EachCell, NameOfCell);

TYPED_TEST(Modules, LayersEqualTheOperator) {
  using StateT = typename TestFixture::StateT;
  for (const lltm::LayerOptions& options : this->some_options()) {
    auto layer = this->layer(options);
    const int64_t count = this->count_of(options);
    const Tensor x = at::randn({6, 4, kInputSize});
    for (const bool training : {true, false}) {
      layer->train(training);
      for (const bool batched : {true, false}) {
        const Tensor input = batched ? x : x[0];
        const Tensor reset = at::rand(input.sizes().slice(0, batched ? 2 : 1)) < 0.3;
        const int64_t rows = options.batch_first() ? 6 : 4;
        const Tensors states =
            this->states(batched ? std::vector{count, rows} : std::vector{count});
        this->expect_the_same(
            layer,
            [&] { return list(layer->forward(input, state_from<StateT>(states), reset)); },
            [&] { return this->by_operator(layer, input, states, reset); });
        this->expect_the_same(
            layer,
            [&] { return list(layer->forward(input)); },
            [&] { return this->by_operator(layer, input, {}, {}); });
      }
      for (const bool sorted : {true, false}) {
        const Tensor lengths = sorted ? at::tensor({6, 4, 2, 1}) : at::tensor({2, 6, 1, 4});
        const auto rows = rnn::pack_padded_sequence(x, lengths.to(at::kLong), false, sorted);
        const Tensor reset = at::rand({rows.data().size(0)}) < 0.3;
        const Tensors states = this->states({count, 4});
        this->expect_the_same(
            layer,
            [&] {
              const auto result =
                  layer->forward_with_packed_input(rows, state_from<StateT>(states), reset);
              const rnn::PackedSequence& output = std::get<0>(result);
              EXPECT_TRUE(output.batch_sizes().is_same(rows.batch_sizes()));
              EXPECT_TRUE(output.sorted_indices().is_same(rows.sorted_indices()));
              EXPECT_TRUE(output.unsorted_indices().is_same(rows.unsorted_indices()));
              return list(result);
            },
            [&] { return this->by_operator(layer, rows.data(), states, reset, &rows); });
        this->expect_the_same(
            layer,
            [&] { return list(layer->forward_with_packed_input(rows)); },
            [&] { return this->by_operator(layer, rows.data(), {}, {}, &rows); });
      }
    }
  }
}

TYPED_TEST(Modules, StepsEqualTheOperator) {
  using StateT = typename TestFixture::StateT;
  for (const bool bias : {true, false}) {
    typename TestFixture::Step step(this->step_options().bias(bias));
    const auto by_operator = [&](const Tensor& input, const Tensors& states) {
      return call(
                 "lltm::layer_step",
                 {this->cell_, input, states, step->parameters(), kInputSize, kHiddenSize})[0]
          .toTensorVector();
    };
    const Tensor x = at::randn({4, kInputSize});
    for (const bool batched : {true, false}) {
      const Tensor input = batched ? x : x[0];
      const Tensors states =
          this->states(batched ? std::vector<int64_t>{4} : std::vector<int64_t>());
      this->expect_the_same(
          step,
          [&] { return list(step->forward(input, state_from<StateT>(states))); },
          [&] { return by_operator(input, states); });
      this->expect_the_same(
          step, [&] { return list(step->forward(input)); }, [&] { return by_operator(input, {}); });
    }
  }
}

TYPED_TEST(Modules, PrepackedLayersEqualTheLayerInEvaluation) {
  using StateT = typename TestFixture::StateT;
  const torch::NoGradGuard no_grad;
  for (const lltm::LayerOptions& options : this->some_options()) {
    auto layer = this->layer(options);
    layer->eval();
    const Tensor x = at::randn({7, 4, kInputSize}), reset = at::rand({7, 4}) < 0.3;
    const auto rows =
        rnn::pack_padded_sequence(x, at::tensor({2, 7, 1, 4}).to(at::kLong), false, false);
    const Tensor of_rows = at::rand({rows.data().size(0)}) < 0.3;
    const int64_t count = this->count_of(options);
    const auto dense = state_from<StateT>(this->states({count, options.batch_first() ? 7 : 4}));
    const auto packed = state_from<StateT>(this->states({count, 4}));
    const auto run = [&](auto&& module) {
      Tensors all;
      for (const Tensors& results :
           {list(module.forward(x)),
            list(module.forward(x, dense, reset)),
            list(module.forward(x[0])),
            list(module.forward_with_packed_input(rows)),
            list(module.forward_with_packed_input(rows, packed, of_rows))}) {
        all.insert(all.end(), results.begin(), results.end());
      }
      return all;
    };
    const Tensors expected = run(*layer);
    const typename TestFixture::Prepacked ours = layer->prepack(),
                                          int8 = layer->prepack(at::kQInt8);
    const Tensors before = run(ours), in_int8 = run(int8);
    expect_allclose(before, expected, 1e-5);
    // Some steps of 1/127 of the largest weight and input.
    expect_allclose(in_int8, expected, 0.03);
    EXPECT_FALSE(identical(in_int8, before));
    // The prepacked layers keep their weights.
    for (const Tensor& parameter : layer->parameters()) parameter.zero_();
    EXPECT_TRUE(identical(run(ours), before));
    EXPECT_TRUE(identical(run(int8), in_int8));
    EXPECT_EQ(ours.options().hidden_size(), kHiddenSize);
    EXPECT_EQ(ours.options().num_layers(), options.num_layers());
    EXPECT_THROW((void)layer->prepack(torch::kInt8), c10::TypeError);
  }
}

TYPED_TEST(Modules, APrepackedLayerSupportsConcurrentCalls) {
  const auto packed = this->layer()->prepack();
  const Tensor input = at::randn({20, 3, kInputSize});
  const Tensors expected = list(packed.forward(input));
  std::array<bool, 4> same = {};
  std::vector<std::thread> threads;
  for (bool& result : same) {
    threads.emplace_back([&] {
      result = true;
      for (int run = 0; run < 20; ++run) {
        result = result && identical(list(packed.forward(input)), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const bool result : same) EXPECT_TRUE(result);
}

TYPED_TEST(Modules, AllWeightsAreTheParametersInTheirOrder) {
  for (const lltm::LayerOptions& options : this->some_options()) {
    auto layer = this->layer(options);
    layer->to(at::kDouble);
    const Tensors parameters = layer->parameters(), weights = layer->all_weights();
    ASSERT_EQ(weights.size(), parameters.size());
    for (size_t k = 0; k < weights.size(); ++k) {
      EXPECT_TRUE(weights[k].is_same(parameters[k])) << "parameter " << k;
      EXPECT_TRUE(weights[k].requires_grad());
      EXPECT_EQ(weights[k].scalar_type(), at::kDouble);
    }
    const void* const before = weights[0].const_data_ptr();
    layer->flatten_parameters();
    EXPECT_EQ(layer->parameters()[0].const_data_ptr(), before);
  }
}

TYPED_TEST(Modules, ParametersAreInitializedWithinTheBoundOfTheHiddenSize) {
  using Layer = typename TestFixture::Layer;
  using Step = typename TestFixture::Step;
  const auto check = [](auto module) {
    const auto is_ordered = [](const std::string& key) { return key.starts_with('p'); };
    const auto drawn = [&] {
      Tensors values;
      for (const auto& parameter : module->named_parameters()) {
        const Tensor& value = values.emplace_back(parameter.value().detach().clone());
        if (is_ordered(parameter.key())) {  // uses the text's initial value
          EXPECT_TRUE(identical(value, at::full({25}, 0.5)));
          continue;
        }
        EXPECT_LE(value.abs().max().template item<double>(), 0.2);
        EXPECT_GT(value.abs().max().template item<double>(), 0.15);
        EXPECT_LT(value.mean().abs().template item<double>(), 0.05);
      }
      return values;
    };
    const Tensors first = drawn();
    {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : module->parameters()) parameter.zero_();
    }
    module->reset_parameters();
    EXPECT_FALSE(identical(drawn()[0], first[0]));
    torch::manual_seed(4);
    module->reset_parameters();
    const Tensors again = drawn();
    torch::manual_seed(4);
    module->reset_parameters();
    EXPECT_TRUE(identical(drawn(), again));
  };
  const auto of_layer = options_of<lltm::LayerOptions, typename TestFixture::LayerImpl>;
  check(Layer(of_layer(30, 25).num_layers(2).bidirectional(true)));
  check(Step(options_of<lltm::CellOptions, typename TestFixture::StepImpl>(30, 25)));
}

TYPED_TEST(Modules, ClonesHaveSeparateParameters) {
  using Layer = typename TestFixture::Layer;
  using Step = typename TestFixture::Step;
  const auto check = [](auto holder, const Tensor& input) {
    using Module = typename decltype(holder)::ContainedType;
    holder->eval();
    const auto copy = std::dynamic_pointer_cast<Module>(holder->clone());
    ASSERT_NE(copy, nullptr);
    EXPECT_FALSE(copy->is_training());
    EXPECT_EQ(text_of(*copy), text_of(*holder));
    const Tensors expected = list(holder->forward(input));
    EXPECT_TRUE(identical(list(copy->forward(input)), expected));
    for (const Tensor& parameter : copy->parameters()) parameter.detach().zero_();
    EXPECT_TRUE(identical(list(holder->forward(input)), expected));
    EXPECT_FALSE(identical(list(copy->forward(input)), expected));
  };
  for (const bool bias : {true, false}) {
    check(
        Layer(this->options().num_layers(2).bidirectional(true).bias(bias)),
        at::randn({4, 2, kInputSize}));
    check(Step(this->step_options().bias(bias)), at::randn({4, kInputSize}));
  }
}

TYPED_TEST(Modules, WorkInASequentialAndAnAnyModule) {
  using StateT = typename TestFixture::StateT;
  using Result = std::tuple<Tensor, StateT>;
  typename TestFixture::Layer layer(this->options());
  typename TestFixture::Step step(this->step_options());
  const Tensor input = at::randn({8, 4, kInputSize}), reset = at::rand({8, 4}) < 0.3;
  torch::nn::Sequential layers(layer), steps(step);
  EXPECT_TRUE(
      identical(list(layers->template forward<Result>(input)), list(layer->forward(input))));
  EXPECT_TRUE(
      identical(list(steps->template forward<StateT>(input[0])), list(step->forward(input[0]))));
  EXPECT_EQ(
      layers->named_parameters().keys().front(), "0." + layer->named_parameters().keys().front());
  torch::nn::AnyModule any(layer);
  EXPECT_TRUE(identical(
      list(any.template forward<Result>(
          input, std::optional<StateT>(), std::optional<Tensor>(reset))),
      list(layer->forward(input, std::nullopt, reset))));
}

TYPED_TEST(Modules, PrintTheirOptions) {
  EXPECT_EQ(
      text_of(*this->layer(this->options().num_layers(2))),
      this->name_ +
          "(input_size=3, hidden_size=5, num_layers=2, bias=true, batch_first=false, "
          "dropout=0, bidirectional=false)");
  EXPECT_EQ(
      text_of(*this->layer(this->options()
                               .num_layers(2)
                               .bias(false)
                               .batch_first(true)
                               .dropout(0.25)
                               .bidirectional(true)
                               .recurrent_dropout(0.5)
                               .checkpoint_steps(4))),
      this->name_ +
          "(input_size=3, hidden_size=5, num_layers=2, bias=false, batch_first=true, "
          "dropout=0.25, bidirectional=true, recurrent_dropout=0.5, checkpoint_steps=4)");
  using Step = typename TestFixture::Step;
  EXPECT_EQ(text_of(*Step(this->step_options())), this->step_name_ + "(3, 5)");
  EXPECT_EQ(
      text_of(*Step(this->step_options().bias(false))), this->step_name_ + "(3, 5, bias=false)");
  EXPECT_EQ(this->name_.substr(0, 6), "lltm::");
  EXPECT_TRUE(this->step_name_.ends_with("Cell"));
}

TYPED_TEST(Modules, NameWrongOptions) {
  using Layer = typename TestFixture::Layer;
  using Step = typename TestFixture::Step;
  const auto expect_value_error = [&](const auto& call, const std::string& text) {
    expect_error(call, kValueError, text);
  };
  const auto sizes = options_of<lltm::LayerOptions, typename TestFixture::LayerImpl>;
  const auto step_sizes = options_of<lltm::CellOptions, typename TestFixture::StepImpl>;
  const auto refuse = [&](const lltm::LayerOptions& options, const std::string& text) {
    expect_value_error([&] { Layer{options}; }, this->name_ + ": expected " + text);
  };
  refuse(sizes(0, 5), "input_size to be positive, got 0");
  refuse(sizes(INT64_MAX, 5), "input_size of at most 134217728, got 9223372036854775807");
  refuse(sizes(3, 5).num_layers(0), "num_layers to be positive, got 0");
  refuse(sizes(3, 5).dropout(std::nan("")), "dropout to be in [0, 1], got nan");
  refuse(sizes(3, 5).recurrent_dropout(2), "recurrent_dropout to be in [0, 1], got 2");
  refuse(sizes(3, 5).checkpoint_steps(-1), "checkpoint_steps to be at least 0, got -1");
  if (this->cell_ != "lstm") {
    refuse(sizes(3, 5).proj_size(2), "proj_size to be 0, got 2: only an LSTM has a projection");
  }
  expect_value_error(
      [&] { Step{step_sizes(0, 5)}; },
      this->step_name_ + ": expected input_size to be positive, got 0");
  // Custom modules require a cell in the options; others reject it.
  if (TestFixture::kIsCustom) {
    const std::string text = ": expected options with a cell, got none";
    expect_value_error([] { Layer{lltm::LayerOptions(3, 5)}; }, "lltm::CustomLayer" + text);
    expect_value_error([] { Step{lltm::CellOptions(3, 5)}; }, "lltm::CustomCell" + text);
  } else {
    const std::string text = ": expected options without a cell, got duo";
    expect_value_error([] { Layer{lltm::LayerOptions(kDuo, 3, 5)}; }, this->name_ + text);
    expect_value_error([] { Step{lltm::CellOptions(kDuo, 3, 5)}; }, this->step_name_ + text);
  }
  if (!std::is_same_v<typename TestFixture::LayerImpl, lltm::RNNImpl>) {
    const std::string text =
        ": expected options without a nonlinearity, which only an RNN has, got one";
    expect_value_error([&] { Layer{sizes(3, 5).nonlinearity(torch::kTanh)}; }, this->name_ + text);
    expect_value_error(
        [&] { Step{step_sizes(3, 5).nonlinearity(torch::kReLU)}; }, this->step_name_ + text);
  }
}

// Covers C++-only arguments, and the module's name in messages.
TYPED_TEST(Modules, NameWrongArguments) {
  using StateT = typename TestFixture::StateT;
  auto layer = this->layer();
  typename TestFixture::Step step(this->step_options());
  const Tensor input = at::zeros({7, 4, 3});
  const auto refuse = [&](const auto& call, const std::type_info& error, const std::string& text) {
    expect_error(call, error, this->name_ + ": expected " + text);
  };
  refuse(
      [&] { layer->forward(at::zeros({7, 4, 2})); },
      kValueError,
      "input of shape (T, B, 3) or (T, 3), got (7, 4, 2)");
  refuse(
      [&] { layer->forward(Tensor()); },
      kTypeError,
      "input to be a tensor, got an undefined tensor");
  Tensors states = this->states({1, 4});
  states.back() = Tensor();
  if (states.size() > 1) {
    refuse(
        [&] { layer->forward(input, state_from<StateT>(states)); },
        kTypeError,
        std::string(states.size() == 2 ? "c_0" : "m_0") +
            " to be a tensor, got an undefined tensor");
  }
  const auto packed = [&](const Tensor& rows) {
    layer->forward_with_packed_input(rnn::PackedSequence(rows, at::tensor({2, 1}).to(at::kLong)));
  };
  refuse(
      [&] { packed(at::zeros({3, 2})); }, kValueError, "input of packed shape (N, 3), got (3, 2)");
  refuse([&] { packed(Tensor()); }, kTypeError, "input to be a tensor, got an undefined tensor");
  expect_error(
      [&] { step->forward(at::zeros({4, 2})); },
      kValueError,
      this->step_name_ + ": expected input of shape (B, 3) or (3,), got (4, 2)");
  expect_error(
      [&] { step->forward(Tensor()); },
      kTypeError,
      this->step_name_ + ": expected input to be a tensor, got an undefined tensor");
}

TYPED_TEST(Modules, DropoutOfASingleLayerWarnsThatItDoesNothing) {
  Warnings warnings;
  auto layer = this->layer(this->options().dropout(0.5));
  EXPECT_EQ(
      warnings.texts,
      std::vector<std::string>(
          {this->name_ +
           ": dropout is applied between layers, so it does nothing with num_layers=1"}));
  layer->clone();
  this->layer(this->options().dropout(0.5).num_layers(2));
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST(ModuleParameters, HaveTheNamesAndShapesOfThePythonModules) {
  EXPECT_EQ(shapes_of(*lltm::LLTMCell(3, 5)), Named({{"weights", {15, 8}}, {"bias", {15}}}));
  lltm::LLTMCell without(lltm::CellOptions(3, 5).bias(false));
  EXPECT_EQ(shapes_of(*without), Named({{"weights", {15, 8}}}));
  EXPECT_FALSE(without->bias.defined());
  EXPECT_EQ(
      shapes_of(*lltm::LLTM(lltm::LLTMOptions(3, 5).num_layers(2).bidirectional(true))),
      Named(
          {{"weights_l0", {15, 8}},
           {"bias_l0", {15}},
           {"weights_l0_reverse", {15, 8}},
           {"bias_l0_reverse", {15}},
           {"weights_l1", {15, 15}},
           {"bias_l1", {15}},
           {"weights_l1_reverse", {15, 15}},
           {"bias_l1_reverse", {15}}}));
  EXPECT_EQ(
      shapes_of(
          *lltm::CustomLayer(lltm::CustomLayerOptions(kDuo, 3, 5).bidirectional(true).bias(false))),
      Named(
          {{"weight_ih_l0", {15, 3}},
           {"weight_hh_l0", {15, 5}},
           {"p_l0", {5}},
           {"weight_ih_l0_reverse", {15, 3}},
           {"weight_hh_l0_reverse", {15, 5}},
           {"p_l0_reverse", {5}}}));
  const lltm::CustomCell step(kDuo, 3, 5);
  EXPECT_EQ(
      shapes_of(*step),
      Named(
          {{"weight_ih", {15, 3}},
           {"weight_hh", {15, 5}},
           {"bias_ih", {15}},
           {"bias_hh", {15}},
           {"p", {5}}}));
  ASSERT_EQ(step->own.size(), 1);
  EXPECT_TRUE(step->own[0].is_same(step->named_parameters()["p"]));
}

TEST(ModuleState, MayBeATupleOrInBraces) {
  lltm::LLTM layer(3, 5);
  const Tensor input = at::randn({8, 4, 3}), h = at::randn({1, 4, 5}), c = at::randn({1, 4, 5});
  const Tensors expected = list(layer->forward(input, std::make_tuple(h, c)));
  EXPECT_TRUE(identical(list(layer->forward(input, {{h, c}})), expected));
  EXPECT_TRUE(identical(list(layer(input, std::make_tuple(h, c))), expected));
  EXPECT_TRUE(identical(list(layer->forward(input, State(h, c))), expected));
}

TEST(ModuleState, OfAnotherNumberOfTensorsIsRejected) {
  lltm::CustomLayer layer(kDuo, 3, 5);
  const Tensor input = at::zeros({7, 4, 3}), state = at::zeros({1, 4, 5});
  const std::string text = "lltm::duo.Layer: expected state to be 3 tensors (h_0, c_0, m_0), got 2";
  expect_error([&] { layer->forward(input, Tensors{state, state}); }, kTypeError, text);
  expect_error([&] { layer->prepack().forward(input, Tensors{state, state}); }, kTypeError, text);
}

TEST(ModulesOfCustomCells, MayHaveProductsGivenGatesAndHeads) {
  const lltm::Cell cell = lltm::Cell::parse(
      "lltm-cell 2\nname staged\nweight_ih r n\nweight_hh r n\ninput m\nreads_h\nforward\n"
      "v = multiply z.r h\nz.n = product v\nt = mean z.n\nu = add t z.m\nh' = tanh u\n"
      "save h v z.r h'\nbackward\ns = multiply h' h'\ng = subtract 1.0 s\n"
      "d.z.m = multiply d.h' g\nd.z.n = mean d.z.m\ne = product d.z.n\nd.z.r = multiply e h\n"
      "d.h = multiply e z.r\nend\n");
  lltm::CustomLayer heads(lltm::CustomLayerOptions(cell, 3 + 64, 64).heads(2));
  EXPECT_EQ(
      shapes_of(*heads),
      Named(
          {{"weight_ih_l0", {128, 3}},
           {"weight_hh_l0", {2, 64, 32}},
           {"bias_ih_l0", {128}},
           {"bias_hh_l0", {128}}}));
  lltm::CustomCell step(lltm::CustomCellOptions(cell, 3 + 64, 64).heads(2));
  const at::NoGradGuard no_grad;
  for (size_t k = 0; k < 4; ++k) step->parameters()[k].copy_(heads->parameters()[k]);
  const Tensor x = at::randn({7, 20, 3 + 64}), output = list(heads->forward(x))[0];
  EXPECT_TRUE(at::allclose(list(heads->prepack().forward(x))[0], output, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(step->forward(x[0])[0], output[0], 1e-5, 1e-6));
  expect_error(
      [&] { lltm::CustomLayer(lltm::CustomLayerOptions(cell, 67, 64).heads(3)); },
      kValueError,
      "lltm::staged.Layer: expected heads that divide hidden_size 64, got 3");
  expect_error(
      [&] { lltm::CustomLayer(cell, 63, 64); },
      kValueError,
      "lltm::staged: expected at least 64 input features, hidden_size for each gate that reads the"
      " input, got 63");
}

TEST(Modules, UndefinedStatesAreZeros) {
  const Tensor x = at::randn({2, 4, kInputSize});
  lltm::GRU gru(kInputSize, kHiddenSize);
  EXPECT_TRUE(identical(std::get<0>(gru->forward(x, Tensor())), std::get<0>(gru->forward(x))));
  lltm::LSTMCell cell(kInputSize, kHiddenSize);
  EXPECT_TRUE(
      identical(std::get<1>(cell->forward(x[0], lltm::State())), std::get<1>(cell->forward(x[0]))));
  lltm::CustomLayer custom(kDuo, kInputSize, kHiddenSize);
  EXPECT_TRUE(identical(list(custom->forward(x, Tensors(3)))[0], list(custom->forward(x))[0]));
  expect_error(
      [&] {
        lltm::LSTMCell(kInputSize, kHiddenSize)
            ->forward(x[0], {{at::zeros({4, kHiddenSize}), Tensor()}});
      },
      kTypeError,
      "lltm::LSTMCell: expected c to be a tensor, got an undefined tensor");
  expect_error(
      [&] { lltm::GRU(lltm::GRUOptions(3, 4).heads(2)); },
      kValueError,
      "lltm::GRU: expected heads to be 1: only a custom cell has heads, got 2");
}

TEST(ModulesOfCustomCells, StepAndSequenceAreThoseOfTheModules) {
  lltm::CustomCell cell(kDuo, kInputSize, kHiddenSize);
  lltm::CustomLayer layer(kDuo, kInputSize, kHiddenSize);
  const auto call = [](const auto& module, const auto& function, const Tensor& x, Tensors states) {
    const Tensors p = module->parameters();
    const Tensors own(p.begin() + 4, p.end());
    Tensors bias = {p[2]};
    bias.insert(bias.end(), own.begin(), own.end());
    return function(kDuo.text(), x, states, p[0], p[1], at::cat(bias), p[3]);
  };
  const auto step = [](auto&&... args) { return lltm::step(args...); };
  const auto sequence = [](auto&&... args) { return lltm::sequence(args...); };
  const Tensor x = at::randn({4, 2, kInputSize});
  const Tensors states(3, at::randn({2, kHiddenSize}));
  const Tensors expected = cell->forward(x[0], states);
  const Tensors after = call(cell, step, x[0], states);
  ASSERT_EQ(after.size(), expected.size());
  for (size_t k = 0; k < after.size(); ++k) EXPECT_TRUE(at::allclose(after[k], expected[k]));

  Tensors of_layer;
  for (const Tensor& state : states) of_layer.push_back(state.unsqueeze(0));
  const auto [wanted, wanted_last] = layer->forward(x, of_layer);
  const auto [output, last] = call(layer, sequence, x, states);
  EXPECT_TRUE(at::allclose(output, wanted));
  EXPECT_TRUE(at::allclose(last[2], wanted_last[2][0]));

  expect_error(
      [&] { call(cell, step, x[0], Tensors(2, states[0])); },
      kTypeError,
      "lltm::step: expected state to be 3 tensors (h, c, m), got 2");
}

template <typename Ours, typename Theirs>
void expect_torch_nn(Ours ours, Theirs theirs, const Tensor& input) {
  ASSERT_EQ(shapes_of(*ours), shapes_of(*theirs));
  const std::string path = testing::TempDir() + "lltm_test_nn.safetensors";
  theirs->to(at::kDouble);
  ours->to(at::kDouble);
  lltm::save_state_dict(theirs, path);
  lltm::load_state_dict(ours, path);
  std::filesystem::remove(path);
  const Tensors results = list(ours->forward(input)), expected = list(theirs->forward(input));
  expect_allclose(results, expected, 1e-12);
  const Tensors grads = random_like(expected, 1);
  expect_allclose(
      torch::autograd::grad(results, ours->parameters(), grads),
      torch::autograd::grad(expected, theirs->parameters(), grads),
      1e-12);
}

TEST(TorchNn, HasTheSameModules) {
  const Tensor input = at::randn({7, 4, 3}, at::kDouble);
  const auto layers = [](auto options) {
    return options.num_layers(2).bidirectional(true).batch_first(true);
  };
  expect_torch_nn(
      lltm::LSTM(layers(lltm::LSTMOptions(3, 5))),
      torch::nn::LSTM(layers(torch::nn::LSTMOptions(3, 5))),
      input);
  expect_torch_nn(
      lltm::RNN(layers(lltm::RNNOptions(3, 5).nonlinearity(torch::kReLU))),
      torch::nn::RNN(layers(torch::nn::RNNOptions(3, 5).nonlinearity(torch::kReLU))),
      input);
  expect_torch_nn(lltm::GRUCell(3, 5), torch::nn::GRUCell(3, 5), input[0]);
  lltm::LSTM projected(layers(lltm::LSTMOptions(3, 5)).proj_size(2));
  expect_torch_nn(
      projected, torch::nn::LSTM(layers(torch::nn::LSTMOptions(3, 5)).proj_size(2)), input);
  const torch::NoGradGuard no_grad;
  expect_allclose(
      list(projected->prepack().forward(input)), list(projected->forward(input)), 1e-12);
  EXPECT_NE(text_of(*projected).find("proj_size=2"), std::string::npos);
}

TEST(TorchNn, WrongProjectionsAreNamed) {
  expect_error(
      [] { lltm::LSTM(lltm::LSTMOptions(3, 5).proj_size(5)); },
      kValueError,
      "lltm::LSTM: expected proj_size to be in [0, hidden_size), got 5");
  expect_error(
      [] { lltm::LSTM(lltm::LSTMOptions(3, 5).proj_size(2).recurrent_dropout(0.5)); },
      kValueError,
      "lltm::LSTM: expected recurrent_dropout to be 0 with proj_size, got 0.5");
}

TEST(CustomCell, DescribesItsSerializedForm) {
  EXPECT_EQ(kDuo.name(), "duo");
  EXPECT_EQ(kDuo.text(), kDuoText);
  EXPECT_EQ(kDuo.gates(), std::vector<std::string>({"n_x", "i", "f", "n_h"}));
  EXPECT_EQ(kDuo.states(), std::vector<std::string>({"c", "m"}));
  EXPECT_EQ(kDuo.parameters(), std::vector<std::string>({"p"}));
}

class CustomCellFiles : public TemporaryFolder {
 protected:
  std::string written(const std::string& text) const {
    std::ofstream(path("written.cell"), std::ios::binary) << text;
    return path("written.cell");
  }
};

TEST_F(CustomCellFiles, ContainTheSerializedCell) {
  kDuo.save(path("duo.cell"));
  const lltm::Cell loaded = lltm::Cell::load(path("duo.cell"));
  EXPECT_EQ(loaded.text(), kDuoText);
  EXPECT_EQ(loaded.name(), "duo");
  std::ifstream file(path("duo.cell"), std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  EXPECT_EQ(bytes.str(), kDuoText);
}

TEST_F(CustomCellFiles, ErrorsNameThePath) {
  expect_error(
      [&] { lltm::Cell::load(path("missing.cell")); },
      kValueError,
      "lltm::Cell::load: cannot read " + path("missing.cell") + ": No such file or directory");
  expect_error(
      [&] { lltm::Cell::load(path("")); },
      kValueError,
      "lltm::Cell::load: cannot read " + path("") + ": Is a directory");
  expect_error(
      [&] { kDuo.save(path("missing/duo.cell")); },
      kValueError,
      "lltm::Cell::save: cannot write " + path("missing/duo.cell") + ": No such file or directory");
  expect_error(
      [&] { lltm::Cell::load(written("lltm-cell 3\n")); },
      kValueError,
      "lltm::Cell::load: " + path("written.cell") +
          ": cell program, line 1: expected a serialized cell, whose first line is 'lltm-cell 1' "
          "or "
          "'lltm-cell 2', got 'lltm-cell 3'");
  expect_error(
      [] { lltm::Cell::parse("lstm"); },
      kValueError,
      "lltm::Cell::parse: cell program, line 1: expected a line that ends with \\n, got 'lstm'");
  EXPECT_THROW(lltm::Cell::load(written(std::string(1 << 20, 'a'))), c10::ValueError);
}

}  // namespace
}  // namespace lltm_test
