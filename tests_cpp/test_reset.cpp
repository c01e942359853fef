// Resets and recurrent masks in the C++ API. What they compute is tested in test_engines.cpp and,
// of every cell, in tests_py/test_reset.py and tests_py/test_recurrent_mask.py.
#include "testing.h"

#include <lltm/lltm.h>

#include <torch/nn/modules/container/any.h>
#include <torch/torch.h>

#include <optional>
#include <tuple>

namespace lltm_test {
namespace {

using lltm::State;

// h of a state.
at::Tensor h_of(const State& state) {
  return std::get<0>(state);
}
at::Tensor h_of(const at::Tensor& state) {
  return state;
}

template <typename Module>
class Resets : public testing::Test {};
using Layers = testing::Types<lltm::LLTM, lltm::LSTM, lltm::GRU>;
TYPED_TEST_SUITE(Resets, Layers);

TYPED_TEST(Resets, OfALayerCutTheSequenceInTwo) {
  torch::manual_seed(1);
  TypeParam layer(lltm::LayerOptions(4, 7).num_layers(2).batch_first(true));
  const at::Tensor x = torch::randn({3, 9, 4});
  at::Tensor reset = torch::zeros({3, 9}, torch::kBool);
  reset.select(1, 5).fill_(true);

  const auto [first, middle] = layer->forward(x.slice(1, 0, 5));
  const auto second = layer->forward(x.slice(1, 5));
  const auto& last = std::get<1>(second);
  const at::Tensor expected = torch::cat({first, std::get<0>(second)}, 1);
  const auto check = [&](const auto& results) {
    const auto& [output, state] = results;
    EXPECT_TRUE(torch::allclose(output, expected, 1e-5, 1e-6));
    EXPECT_TRUE(torch::allclose(h_of(state), h_of(last), 1e-5, 1e-6));
  };
  check(layer->forward(x, std::nullopt, reset));
  check(layer->prepack().forward(x, std::nullopt, reset));
  using StateT = std::decay_t<decltype(last)>;
  torch::nn::AnyModule any(layer);
  check(any.forward<std::tuple<at::Tensor, StateT>>(
      x, std::optional<StateT>(), std::optional<at::Tensor>(reset)));
}

TYPED_TEST(Resets, OfPackedRowsAreInTheirOrder) {
  torch::manual_seed(1);
  TypeParam layer(4, 7);
  const at::Tensor x = torch::randn({6, 2, 4});
  const at::Tensor reset = torch::rand({6, 2}) < 0.4;
  namespace rnn = torch::nn::utils::rnn;
  const auto pack = [](const at::Tensor& padded) {
    return rnn::pack_padded_sequence(padded, torch::tensor({6, 6}));
  };
  const auto [output, state] =
      layer->forward_with_packed_input(pack(x), std::nullopt, pack(reset).data());
  const auto [expected, last] = layer->forward(x, std::nullopt, reset);
  EXPECT_TRUE(torch::allclose(output.data(), expected.flatten(0, 1)));
  EXPECT_TRUE(torch::allclose(h_of(state), h_of(last)));
}

TEST(ResetsOfFunctions, AreThoseOfTheOperators) {
  const Arguments a = sequence_problem({6, 3, 4, 7}, at::kFloat, 1);
  const at::Tensor reset = random_reset(a, 1);
  Arguments with_reset = a;
  with_reset.reset = reset;
  const Tensors expected = eager_sequence(with_reset);
  const auto check = [&](const auto& results) {
    EXPECT_TRUE(torch::allclose(std::get<0>(results), expected[0], 1e-5, 1e-6));
    EXPECT_TRUE(torch::allclose(std::get<2>(results), expected[2], 1e-5, 1e-6));
  };
  check(lltm::sequence(a.input, a.h, a.c, a.weights, a.bias, {}, false, 0, reset));
  check(
      lltm::sequence_prepacked(
          a.input, a.h, a.c, lltm::prepack(a.weights), a.bias, {}, false, reset));
}

TEST(RecurrentMasks, AreThoseOfTheOperators) {
  Arguments a = sequence_problem({6, 3, 4, 7}, at::kFloat, 1);
  a.recurrent_mask = random_mask(a, 1);
  const Tensors expected = eager_sequence(a);
  const auto [output, h_n, c_n] =
      lltm::sequence(a.input, a.h, a.c, a.weights, a.bias, {}, false, 0, {}, a.recurrent_mask);
  EXPECT_TRUE(torch::allclose(output, expected[0], 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(c_n, expected[2], 1e-5, 1e-6));
}

// With nothing kept a layer is one whose recurrent weights are zero.
TEST(RecurrentMasks, OfLayersAreDrawnInTraining) {
  torch::manual_seed(1);
  lltm::GRU layer(lltm::GRUOptions(4, 7).num_layers(2).bidirectional(true).recurrent_dropout(1));
  const at::Tensor x = torch::randn({6, 3, 4});
  const at::Tensor trained = std::get<0>(layer->forward(x));
  layer->eval();
  EXPECT_FALSE(torch::allclose(std::get<0>(layer->forward(x)), trained));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : layer->named_parameters()) {
    if (parameter.key().rfind("weight_hh", 0) == 0) parameter.value().zero_();
  }
  EXPECT_TRUE(torch::allclose(std::get<0>(layer->forward(x)), trained));
  expect_error(
      [] { lltm::GRU(lltm::GRUOptions(4, 7).recurrent_dropout(2)); },
      kValueError,
      "lltm::GRU: expected recurrent_dropout to lie in [0, 1], got 2");
}

TEST(ResetsOfFunctions, OfAWrongKindAreRefused) {
  const Arguments a = sequence_problem({6, 3, 4, 7}, at::kFloat, 1);
  const auto run = [&](const at::Tensor& reset) {
    lltm::sequence(a.input, a.h, a.c, a.weights, a.bias, {}, false, 0, reset);
  };
  expect_error(
      [&] { run(torch::zeros({6, 3})); },
      kTypeError,
      "lltm::sequence: expected reset of dtype bool, got float32");
  expect_error(
      [&] { run(torch::zeros({3, 6}, torch::kBool)); },
      kValueError,
      "lltm::sequence: expected reset of shape (6, 3), got (3, 6)");
  lltm::LLTM layer(lltm::LLTMOptions(4, 7).batch_first(true));
  expect_error(
      [&] { layer->forward(a.input, std::nullopt, torch::zeros({6, 3})); },
      kTypeError,
      "lltm::LLTM: expected reset of dtype bool, got float32");
  expect_error(
      [&] { layer->forward(a.input, std::nullopt, torch::zeros({3, 6}, torch::kBool)); },
      kValueError,
      "lltm::LLTM: expected reset of shape (6, 3), got (3, 6)");
}

}  // namespace
}  // namespace lltm_test
