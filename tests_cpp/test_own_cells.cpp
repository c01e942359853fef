// Cells that users have written, in C++: lltm::Cell and its modules. The texts of LSTM and GRU
// against the library's own, a cell with more states and a parameter against plain PyTorch.
#include "cell/cells.h"
#include "cell_program.h"
#include "testing.h"

#include <lltm/cell.h>
#include <lltm/nn.h>
#include <lltm/serialize.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/rnn.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <tuple>
#include <utility>

namespace lltm_test {
namespace {

const lltm::Cell kDuo = lltm::Cell::parse(kDuoText);

// What the tests of this file share; each class of tests derives from it.
class OwnCells : public testing::Test {
 protected:
  using Packed = torch::nn::utils::rnn::PackedSequence;
  static constexpr int64_t kInput = 3, kHidden = 5;

  // Layers, whether there are two directions, biases.
  struct Layers {
    int64_t count;
    bool bidirectional, bias;

    int64_t states() const { return count * (bidirectional ? 2 : 1); }
    lltm::LayerOptions apply(lltm::LayerOptions options) const {
      return options.num_layers(count).bidirectional(bidirectional).bias(bias);
    }
  };
  static constexpr Layers kLayers[] = {{1, false, true}, {1, true, false}, {3, true, true}};

  OwnCells() { torch::manual_seed(0); }

  static Tensors flat(const std::tuple<at::Tensor, lltm::State>& result) {
    const auto& [output, state] = result;
    return {output, std::get<0>(state), std::get<1>(state)};
  }
  static Tensors flat(const std::tuple<at::Tensor, at::Tensor>& result) {
    return {std::get<0>(result), std::get<1>(result)};
  }
  static Tensors flat(const std::tuple<at::Tensor, Tensors>& result) {
    Tensors all = std::get<1>(result);
    all.insert(all.begin(), std::get<0>(result));
    return all;
  }
  template <typename StateT>
  static Tensors flat(const std::tuple<Packed, StateT>& result) {
    return flat(std::tuple(std::get<0>(result).data(), std::get<1>(result)));
  }

  static Tensors random_states(size_t count, const std::vector<int64_t>& shape) {
    Tensors states;
    while (states.size() < count) states.push_back(at::randn(shape, at::kDouble));
    return states;
  }

  // By default the same numbers by another order of operations, in float64.
  static void expect_close(const Tensors& ours, const Tensors& expected, double tolerance = 1e-13) {
    ASSERT_EQ(ours.size(), expected.size());
    for (size_t k = 0; k < ours.size(); ++k) {
      ASSERT_EQ(ours[k].sizes(), expected[k].sizes()) << "result " << k;
      const double error = (ours[k] - expected[k]).abs().max().item<double>();
      EXPECT_LE(error, tolerance * expected[k].abs().max().item<double>()) << "result " << k;
    }
  }

  static Packed packed_rows(const at::Tensor& input, const std::vector<int64_t>& lengths) {
    return torch::nn::utils::rnn::pack_padded_sequence(
        input, at::tensor(lengths, at::kLong), /*batch_first=*/false, /*enforce_sorted=*/false);
  }

  template <typename To, typename From>
  static void copy_parameters(To& to, const From& from) {
    const at::NoGradGuard no_grad;
    const auto source = from->named_parameters();
    auto target = to->named_parameters();
    ASSERT_EQ(target.keys(), source.keys());
    for (auto& parameter : target) parameter.value().copy_(source[parameter.key()]);
  }

  static std::vector<std::pair<std::string, std::vector<int64_t>>> shapes_of(
      const torch::nn::Module& module) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
    for (const auto& parameter : module.named_parameters()) {
      shapes.emplace_back(parameter.key(), parameter.value().sizes().vec());
    }
    return shapes;
  }

  static std::string text_of(const torch::nn::Module& module) {
    std::ostringstream stream;
    stream << module;
    return stream.str();
  }
};

// ---- the library's cells as texts ---------------------------------------------

struct LstmTwin {
  using Layer = lltm::LSTM;
  using Step = lltm::LSTMCell;
  using Page = lltm::Lstm;
  static constexpr size_t kStates = 2;
  static lltm::State state(const Tensors& parts) { return {parts[0], parts[1]}; }
  static Tensors parts(const lltm::State& state) {
    return {std::get<0>(state), std::get<1>(state)};
  }
};
struct GruTwin {
  using Layer = lltm::GRU;
  using Step = lltm::GRUCell;
  using Page = lltm::Gru;
  static constexpr size_t kStates = 1;
  static at::Tensor state(const Tensors& parts) { return parts[0]; }
  static Tensors parts(const at::Tensor& h) { return {h}; }
};

template <typename Twin>
class OwnTwins : public OwnCells {
 protected:
  struct Pair {
    lltm::Recurrent ours;
    typename Twin::Layer theirs;
  };
  Pair both(const Layers& layers, at::ScalarType dtype = at::kDouble) const {
    Pair pair = {
        lltm::Recurrent(layers.apply({cell_, kInput, kHidden})),
        typename Twin::Layer(layers.apply({kInput, kHidden}))};
    pair.ours->to(dtype);
    pair.theirs->to(dtype);
    copy_parameters(pair.ours, pair.theirs);
    return pair;
  }

  const lltm::Cell cell_ = lltm::Cell::parse(text_of_page(typename Twin::Page{}));
};
struct NameOfTwin {
  template <typename Twin>
  static std::string GetName(int) {
    return lltm::Cell::parse(text_of_page(typename Twin::Page{})).name();
  }
};
using Twins = testing::Types<LstmTwin, GruTwin>;
TYPED_TEST_SUITE(OwnTwins, Twins, NameOfTwin);

TYPED_TEST(OwnTwins, LayersComputeWhatTheLibrarysDo) {
  for (const auto& layers : this->kLayers) {
    SCOPED_TRACE(layers.count);
    auto [ours, theirs] = this->both(layers);
    for (const bool batch_first : {false, true}) {
      ours->options.batch_first(batch_first);
      theirs->options.batch_first(batch_first);
      const at::Tensor input = at::randn({6, 4, this->kInput}, at::kDouble);
      const Tensors state = this->random_states(
          TypeParam::kStates, {layers.states(), batch_first ? 6 : 4, this->kHidden});
      const Tensors results = this->flat(ours->forward(input, state));
      const Tensors expected = this->flat(theirs->forward(input, TypeParam::state(state)));
      this->expect_close(results, expected);
      const Tensors grads = random_like(expected, 1);
      this->expect_close(
          torch::autograd::grad(results, ours->parameters(), grads),
          torch::autograd::grad(expected, theirs->parameters(), grads));
      this->expect_close(this->flat(ours->forward(input)), this->flat(theirs->forward(input)));
    }
    const at::Tensor single = at::randn({6, this->kInput}, at::kDouble);
    const Tensors state = this->random_states(TypeParam::kStates, {layers.states(), this->kHidden});
    this->expect_close(
        this->flat(ours->forward(single, state)),
        this->flat(theirs->forward(single, TypeParam::state(state))));
  }
}

TYPED_TEST(OwnTwins, PackedRowsToo) {
  for (const auto& layers : this->kLayers) {
    auto [ours, theirs] = this->both(layers);
    const auto rows = this->packed_rows(at::randn({7, 4, this->kInput}, at::kDouble), {2, 7, 1, 4});
    const Tensors state =
        this->random_states(TypeParam::kStates, {layers.states(), 4, this->kHidden});
    this->expect_close(
        this->flat(ours->forward_with_packed_input(rows, state)),
        this->flat(theirs->forward_with_packed_input(rows, TypeParam::state(state))));
  }
}

TYPED_TEST(OwnTwins, PrepackedFormsToo) {
  const at::NoGradGuard no_grad;
  for (const auto& layers : this->kLayers) {
    auto [ours, theirs] = this->both(layers, at::kFloat);
    const at::Tensor input = at::randn({7, 4, this->kInput});
    const auto rows = this->packed_rows(input, {2, 7, 1, 4});
    // In int8 a last bit may change the rounding of a state to one of 255 steps.
    for (const bool int8 : {false, true}) {
      const auto dtype = int8 ? std::optional(at::kQInt8) : std::nullopt;
      const double tolerance = int8 ? 0.02 : 1e-6;
      const lltm::PrepackedRecurrent packed = ours->prepack(dtype);
      const auto expected = theirs->prepack(dtype);
      this->expect_close(
          this->flat(packed.forward(input)), this->flat(expected.forward(input)), tolerance);
      this->expect_close(
          this->flat(packed.forward_with_packed_input(rows)),
          this->flat(expected.forward_with_packed_input(rows)),
          tolerance);
    }
  }
}

TYPED_TEST(OwnTwins, StepsComputeWhatTheLibrarysDo) {
  for (const bool bias : {true, false}) {
    lltm::RecurrentStep ours(
        lltm::RecurrentStepOptions(this->cell_, this->kInput, this->kHidden).bias(bias));
    typename TypeParam::Step theirs(lltm::CellOptions(this->kInput, this->kHidden).bias(bias));
    ours->to(at::kDouble);
    theirs->to(at::kDouble);
    this->copy_parameters(ours, theirs);
    EXPECT_TRUE(identical(ours->weight_hh, theirs->weight_hh));
    const at::Tensor input = at::randn({4, this->kInput}, at::kDouble);
    const Tensors state = this->random_states(TypeParam::kStates, {4, this->kHidden});
    const Tensors results = ours->forward(input, state);
    const Tensors expected = TypeParam::parts(theirs->forward(input, TypeParam::state(state)));
    this->expect_close(results, expected);
    const Tensors grads = random_like(expected, 1);
    this->expect_close(
        torch::autograd::grad(results, ours->parameters(), grads),
        torch::autograd::grad(expected, theirs->parameters(), grads));
    this->expect_close(ours->forward(input[0]), TypeParam::parts(theirs->forward(input[0])));
  }
}

// ---- a cell with more states and a parameter ------------------------------------

class DuoCell : public OwnCells {
 protected:
  static constexpr int64_t H = kHidden;

  static lltm::Recurrent double_layer(const Layers& layers) {
    lltm::Recurrent layer(layers.apply({kDuo, kInput, H}));
    layer->to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (auto& parameter : layer->named_parameters()) {  // not the same in each layer and unit
      if (parameter.key().starts_with("p_")) parameter.value().normal_();
    }
    return layer;
  }

  // A step by plain PyTorch; the parameters' names end with `suffix`.
  static Tensors step(
      const torch::nn::Module& module,
      const std::string& suffix,
      const at::Tensor& x,
      const Tensors& state) {
    const auto parameters = module.named_parameters();
    const auto linear = [&](const at::Tensor& input, const std::string& part) {
      const at::Tensor* const bias = parameters.find("bias_" + part + suffix);
      const at::Tensor product = at::matmul(input, parameters["weight_" + part + suffix].t());
      return (bias == nullptr ? product : product + *bias).chunk(3, -1);
    };
    const Tensors of_x = linear(x, "ih");         // n_x, i, f
    const Tensors of_h = linear(state[0], "hh");  // i, n_h, f
    const auto& [h, c, m] = std::tie(state[0], state[1], state[2]);
    const at::Tensor i = (of_x[1] + of_h[0]).sigmoid();
    const at::Tensor f = (of_x[2] + of_h[2]).sigmoid();
    const at::Tensor t = (of_x[0] + of_h[1] + parameters["p" + suffix] * c + 0.25 * h).tanh();
    const at::Tensor next_c = f * c + i * t;
    const at::Tensor next_m = 0.5 * m + t;
    return {next_c.tanh() * next_m.sigmoid(), next_c, next_m};
  }

  // (output, h_n, c_n, m_n) of (T, B, I).
  static Tensors composed(
      const lltm::RecurrentImpl& layer, at::Tensor input, const Tensors& initial) {
    const int64_t directions = layer.options.bidirectional() ? 2 : 1;
    const int64_t steps = input.size(0);
    std::vector<Tensors> last(3);
    for (int64_t k = 0; k < layer.options.num_layers(); ++k) {
      Tensors outputs;
      for (int64_t direction = 0; direction < directions; ++direction) {
        const std::string suffix = "_l" + std::to_string(k) + (direction == 0 ? "" : "_reverse");
        Tensors state;
        for (const at::Tensor& s : initial) state.push_back(s[k * directions + direction]);
        Tensors rows(steps);
        for (int64_t s = 0; s < steps; ++s) {
          const int64_t t = direction == 0 ? s : steps - 1 - s;
          state = step(layer, suffix, input[t], state);
          rows[t] = state[0];
        }
        outputs.push_back(at::stack(rows));
        for (size_t s = 0; s < 3; ++s) last[s].push_back(state[s]);
      }
      input = at::cat(outputs, -1);
    }
    return {input, at::stack(last[0]), at::stack(last[1]), at::stack(last[2])};
  }

  static Tensors first_states(const std::vector<int64_t>& shape) {
    const at::Tensor zeros = at::zeros(shape, at::kDouble);
    return {zeros, zeros, at::full(shape, -1.0, at::kDouble)};
  }
};

TEST_F(DuoCell, SaysWhatItsTextSays) {
  EXPECT_EQ(kDuo.name(), "duo");
  EXPECT_EQ(kDuo.text(), kDuoText);
  EXPECT_EQ(kDuo.gates(), std::vector<std::string>({"n_x", "i", "f", "n_h"}));
  EXPECT_EQ(kDuo.states(), std::vector<std::string>({"c", "m"}));
  EXPECT_EQ(kDuo.parameters(), std::vector<std::string>({"p"}));
}

TEST_F(DuoCell, LayersComputeWhatPlainPyTorchComputes) {
  for (const Layers& layers : kLayers) {
    SCOPED_TRACE(layers.count);
    lltm::Recurrent layer = double_layer(layers);
    const at::Tensor input = at::randn({6, 4, kInput}, at::kDouble);
    const std::vector<int64_t> shape = {layers.states(), 4, H};
    const Tensors initial = random_states(3, shape);
    expect_close(flat(layer->forward(input)), composed(*layer, input, first_states(shape)));
    Tensors leaves = layer->parameters();
    leaves.push_back(input);
    leaves.insert(leaves.end(), initial.begin(), initial.end());
    for (at::Tensor& leaf : leaves) leaf.requires_grad_();
    const Tensors results = flat(layer->forward(input, initial));
    const Tensors expected = composed(*layer, input, initial);
    expect_close(results, expected);
    const Tensors grads = random_like(expected, 1);
    expect_close(
        torch::autograd::grad(results, leaves, grads),
        torch::autograd::grad(expected, leaves, grads),
        1e-12);
  }
}

TEST_F(DuoCell, CheckpointStepsChangeNothing) {
  lltm::Recurrent layer = double_layer({2, false, true});
  const at::Tensor input = at::randn({9, 4, kInput}, at::kDouble);
  const Tensors expected = flat(layer->forward(input));
  const Tensors grads = random_like(expected, 1);
  const Tensors gradients = torch::autograd::grad(expected, layer->parameters(), grads);
  layer->options.checkpoint_steps(4);
  const Tensors results = flat(layer->forward(input));
  expect_close(results, expected);
  expect_close(torch::autograd::grad(results, layer->parameters(), grads), gradients);
}

TEST_F(DuoCell, OtherFormsOfInputAreTheSameRows) {
  for (const Layers& layers : kLayers) {
    lltm::Recurrent layer = double_layer(layers);
    const at::Tensor input = at::randn({7, 4, kInput}, at::kDouble);
    const Tensors initial = random_states(3, {layers.states(), 4, H});
    const Tensors expected = flat(layer->forward(input, initial));
    layer->options.batch_first(true);
    Tensors results = flat(layer->forward(input.transpose(0, 1), initial));
    results[0] = results[0].transpose(0, 1);
    expect_close(results, expected);
    layer->options.batch_first(false);

    const std::vector<int64_t> lengths = {2, 7, 1, 4};
    const auto [output, last] =
        layer->forward_with_packed_input(packed_rows(input, lengths), initial);
    const at::Tensor padded = std::get<0>(torch::nn::utils::rnn::pad_packed_sequence(output));
    for (int64_t b = 0; b < 4; ++b) {
      const auto part = [&](const at::Tensor& state) { return state.select(1, b); };
      const Tensors row = flat(layer->forward(
          part(input).narrow(0, 0, lengths[b]),
          Tensors{part(initial[0]), part(initial[1]), part(initial[2])}));
      expect_close(
          {part(padded).narrow(0, 0, lengths[b]), part(last[0]), part(last[1]), part(last[2])},
          row);
    }
    // The states begin as the text says.
    const auto [first, first_last] = layer->forward_with_packed_input(packed_rows(input, lengths));
    expect_close(
        flat(std::tuple(first, first_last)),
        flat(layer->forward_with_packed_input(
            packed_rows(input, lengths), first_states({layers.states(), 4, H}))));
  }
}

TEST_F(DuoCell, PrepackedFormsGiveWhatTheLayerGives) {
  const at::NoGradGuard no_grad;
  for (const Layers& layers : kLayers) {
    lltm::Recurrent layer = double_layer(layers);
    layer->to(at::kFloat);
    const at::Tensor input = at::randn({7, 4, kInput});
    const auto rows = packed_rows(input, {2, 7, 1, 4});
    const Tensors expected = flat(layer->forward(input));
    const Tensors expected_packed = flat(layer->forward_with_packed_input(rows));
    const lltm::PrepackedRecurrent same = layer->prepack();
    const lltm::PrepackedRecurrent quantised = layer->prepack(torch::kQInt8);
    for (at::Tensor& parameter : layer->parameters()) parameter.zero_();  // they keep their own
    EXPECT_EQ(same.options().hidden_size(), H);
    expect_close(flat(same.forward(input)), expected, 1e-6);
    expect_close(flat(same.forward_with_packed_input(rows)), expected_packed, 1e-6);
    expect_close(flat(quantised.forward(input)), expected, 0.03);
    EXPECT_FALSE(identical(flat(quantised.forward(input)), flat(same.forward(input))));
    expect_error(
        [&] { same.forward(input, Tensors{input}); },
        kTypeError,
        "lltm::duo.Layer: expected state to be 3 tensors (h_0, c_0, m_0), got 1");
  }
}

TEST_F(DuoCell, StepsComputeWhatPlainPyTorchComputes) {
  for (const bool bias : {true, false}) {
    lltm::RecurrentStep module(lltm::RecurrentStepOptions(kDuo, kInput, H).bias(bias));
    module->to(at::kDouble);
    const at::Tensor input = at::randn({4, kInput}, at::kDouble);
    const Tensors state = random_states(3, {4, H});
    const Tensors results = module->forward(input, state);
    const Tensors expected = step(*module, "", input, state);
    expect_close(results, expected);
    const Tensors grads = random_like(expected, 1);
    expect_close(
        torch::autograd::grad(results, module->parameters(), grads),
        torch::autograd::grad(expected, module->parameters(), grads));
    expect_close(module->forward(input[0]), step(*module, "", input[0], first_states({H})));
  }
}

TEST_F(DuoCell, ParametersHaveTheNamesAndShapesOfThePythonModule) {
  using Named = std::vector<std::pair<std::string, std::vector<int64_t>>>;
  lltm::Recurrent layer(
      lltm::RecurrentOptions(kDuo, kInput, H).bidirectional(true).num_layers(2).bias(false));
  EXPECT_EQ(
      shapes_of(*layer),
      Named(
          {{"weight_ih_l0", {15, 3}},
           {"weight_hh_l0", {15, 5}},
           {"p_l0", {5}},
           {"weight_ih_l0_reverse", {15, 3}},
           {"weight_hh_l0_reverse", {15, 5}},
           {"p_l0_reverse", {5}},
           {"weight_ih_l1", {15, 10}},
           {"weight_hh_l1", {15, 5}},
           {"p_l1", {5}},
           {"weight_ih_l1_reverse", {15, 10}},
           {"weight_hh_l1_reverse", {15, 5}},
           {"p_l1_reverse", {5}}}));
  EXPECT_TRUE(identical(layer->all_weights(), layer->parameters()));
  const lltm::RecurrentStep step(kDuo, kInput, H);
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

TEST_F(DuoCell, ParametersBeginAsTheTextSays) {
  lltm::Recurrent layer(lltm::RecurrentOptions(kDuo, 30, 25).bidirectional(true));
  lltm::RecurrentStep step(kDuo, 30, 25);
  const auto expect_initial = [](const torch::nn::Module& module) {
    for (const auto& parameter : module.named_parameters()) {
      const at::Tensor& values = parameter.value();
      if (parameter.key().starts_with("p")) {
        EXPECT_TRUE(identical(values, at::full({25}, 0.5)));
      } else {
        EXPECT_LE(values.abs().max().item<double>(), 0.2);
        EXPECT_GT(values.abs().max().item<double>(), 0.18);
      }
    }
  };
  expect_initial(*layer);
  expect_initial(*step);
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : layer->parameters()) parameter.zero_();
  for (at::Tensor& parameter : step->parameters()) parameter.zero_();
  layer->reset_parameters();
  step->reset_parameters();
  expect_initial(*layer);
  expect_initial(*step);
}

TEST_F(DuoCell, ClonesHaveTheirOwnParameters) {
  const at::NoGradGuard no_grad;
  lltm::Recurrent layer = double_layer({2, true, true});
  lltm::RecurrentStep step(kDuo, kInput, H);
  layer->flatten_parameters();
  const at::Tensor input = at::randn({4, 2, kInput}, at::kDouble);
  const Tensors expected = flat(layer->forward(input));
  const Tensors expected_step = step->forward(input[0].to(at::kFloat));
  const auto copy = std::dynamic_pointer_cast<lltm::RecurrentImpl>(layer->clone());
  const auto copied_step = std::dynamic_pointer_cast<lltm::RecurrentStepImpl>(step->clone());
  EXPECT_TRUE(identical(flat(copy->forward(input)), expected));
  EXPECT_TRUE(identical(copied_step->forward(input[0].to(at::kFloat)), expected_step));
  for (at::Tensor& parameter : copy->parameters()) parameter.zero_();
  for (at::Tensor& parameter : copied_step->parameters()) parameter.zero_();
  EXPECT_TRUE(identical(flat(layer->forward(input)), expected));
  EXPECT_TRUE(identical(step->forward(input[0].to(at::kFloat)), expected_step));
  EXPECT_FALSE(identical(flat(copy->forward(input)), expected));
  EXPECT_FALSE(identical(copied_step->forward(input[0].to(at::kFloat)), expected_step));
}

TEST_F(DuoCell, StandsInASequential) {
  torch::nn::Sequential model(lltm::Recurrent(kDuo, kInput, H));
  const auto [output, state] =
      model->forward<std::tuple<at::Tensor, Tensors>>(at::randn({4, 2, kInput}));
  EXPECT_EQ(output.sizes(), at::IntArrayRef({4, 2, H}));
  EXPECT_EQ(state.size(), 3);
}

TEST_F(DuoCell, ModulesPrintTheirOptions) {
  EXPECT_EQ(
      text_of(*lltm::Recurrent(lltm::RecurrentOptions(kDuo, 3, 5).num_layers(2))),
      "lltm::duo.Layer(input_size=3, hidden_size=5, num_layers=2, bias=true, batch_first=false, "
      "dropout=0, bidirectional=false)");
  EXPECT_EQ(text_of(*lltm::RecurrentStep(kDuo, 3, 5)), "lltm::duo.Cell(3, 5)");
}

TEST_F(DuoCell, ModulesNameWrongArguments) {
  lltm::Recurrent layer(kDuo, 3, 5);
  lltm::RecurrentStep step(kDuo, 3, 5);
  const at::Tensor input = at::zeros({7, 4, 3});
  const at::Tensor state = at::zeros({1, 4, 5});
  expect_error(
      [&] { layer->forward(at::zeros({7, 4, 2})); },
      kValueError,
      "lltm::duo.Layer: expected input of shape (T, B, 3) or (T, 3), got (7, 4, 2)");
  expect_error(
      [&] { step->forward(at::zeros({4, 2})); },
      kValueError,
      "lltm::duo.Cell: expected input of shape (B, 3) or (3,), got (4, 2)");
  expect_error(
      [&] { layer->forward(input, Tensors{state, state}); },
      kTypeError,
      "lltm::duo.Layer: expected state to be 3 tensors (h_0, c_0, m_0), got 2");
  expect_error(
      [&] { layer->forward(input, Tensors{state, state, at::zeros({1, 4, 6})}); },
      kValueError,
      "lltm::duo.Layer: expected m_0 of shape (1, 4, 5), got (1, 4, 6)");
  expect_error(
      [&] { step->forward(input[0], Tensors{state[0], at::Tensor(), state[0]}); },
      kTypeError,
      "lltm::duo.Cell: expected c to be a tensor, got an undefined tensor");
  expect_error(
      [&] {
        const at::Tensor wrong = at::zeros({1, 3, 5});
        layer->forward(input, Tensors{wrong, wrong, wrong});
      },
      kValueError,
      "lltm::duo.Layer: expected h_0 of shape (1, 4, 5), got (1, 3, 5)");
  expect_error(
      [&] { lltm::Recurrent(kDuo, 0, 5); },
      kValueError,
      "lltm::duo.Layer: expected input_size to be positive, got 0");
  expect_error(
      [] { lltm::Recurrent(lltm::RecurrentOptions(3, 5)); },
      kValueError,
      "lltm::Recurrent: expected options with a cell, got none");
  expect_error(
      [] { lltm::RecurrentStep(lltm::RecurrentStepOptions(3, 5)); },
      kValueError,
      "lltm::RecurrentStep: expected options with a cell, got none");
  expect_error(
      [] { lltm::LSTM(lltm::LSTMOptions(kDuo, 3, 5)); },
      kValueError,
      "lltm::LSTM: expected options without a cell, got duo");
  expect_error(
      [] { lltm::GRUCell(lltm::GRUCellOptions(kDuo, 3, 5)); },
      kValueError,
      "lltm::GRUCell: expected options without a cell, got duo");
  const lltm::Cell unbounded = lltm::Cell::parse(kEveryText);
  EXPECT_THROW(lltm::Recurrent(unbounded, 3, 5)->prepack(torch::kQInt8), c10::ValueError);
}

// ---- files ----------------------------------------------------------------------

class OwnCellFiles : public OwnCells {
 protected:
  OwnCellFiles() {
    std::string pattern = (std::filesystem::path(testing::TempDir()) / "lltm-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~OwnCellFiles() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string written(const std::string& text) const {
    std::ofstream(path("written.cell"), std::ios::binary) << text;
    return path("written.cell");
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(OwnCellFiles, HoldTheText) {
  kDuo.save(path("duo.cell"));
  const lltm::Cell loaded = lltm::Cell::load(path("duo.cell"));
  EXPECT_EQ(loaded.text(), kDuoText);
  EXPECT_EQ(loaded.name(), "duo");
  std::ifstream file(path("duo.cell"), std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  EXPECT_EQ(bytes.str(), kDuoText);
}

TEST_F(OwnCellFiles, NameWhatIsWrong) {
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
      [&] { lltm::Cell::load(written("lltm-cell 2\n")); },
      kValueError,
      "lltm::Cell::load: " + path("written.cell") +
          ": cell program, line 1: expected 'lltm-cell 1', got 'lltm-cell 2'");
  expect_error(
      [] { lltm::Cell::parse("lstm"); },
      kValueError,
      "lltm::Cell::parse: cell program, line 1: expected a line that ends with \\n, got 'lstm'");
  for (const size_t length : {size_t{0}, size_t{100}, kDuoText.size() - 1}) {
    EXPECT_THROW(lltm::Cell::load(written(kDuoText.substr(0, length))), c10::ValueError);
  }
  EXPECT_THROW(lltm::Cell::load(written(kDuoText + "\n")), c10::ValueError);
  EXPECT_THROW(lltm::Cell::load(written(std::string(1 << 20, 'a'))), c10::ValueError);
}

TEST_F(OwnCellFiles, OfParametersLoadIntoAnotherModule) {
  const auto options = lltm::RecurrentOptions(kDuo, kInput, kHidden).bidirectional(true);
  lltm::Recurrent saved(options);
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : saved->parameters()) parameter.normal_();
  }
  lltm::save_state_dict(saved, path("duo.safetensors"));
  lltm::Recurrent loaded(options);
  lltm::load_state_dict(loaded, path("duo.safetensors"));
  EXPECT_TRUE(identical(loaded->parameters(), saved->parameters()));
  lltm::Recurrent other(lltm::Cell::parse(text_of_page(lltm::Gru{})), kInput, kHidden);
  EXPECT_THROW(lltm::load_state_dict(other, path("duo.safetensors")), c10::ValueError);
}

}  // namespace
}  // namespace lltm_test
