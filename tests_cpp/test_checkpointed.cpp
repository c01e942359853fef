// A sequence that saves checkpoints instead of activations: what it returns is what a sequence
// returns, and so are the gradients.
#include "properties.h"

#include <lltm/nn.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <limits>
#include <sstream>
#include <tuple>

namespace lltm_test {
namespace {

// ---- what holds of every form -----------------------------------------------

Form checkpointed_form(int64_t checkpoint_steps) {
  return {
      .name = "checkpointed",
      .run = checkpointed(checkpoint_steps),
      .baseline = eager_sequence,
      .positions = {kPositions.back()}};
}

INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, Properties, each_case(checkpointed_form(2), kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, SequenceProperties, each_case(checkpointed_form(2), kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, GradientProperties, each_case(checkpointed_form(2), kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, HostProperties, each_case(checkpointed_form(2), kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed,
    DerivativeProperties,
    testing::Combine(
        testing::Values(checkpointed_form(3)),
        testing::Values(Kind::kDense, Kind::kPacked),
        testing::Bool()),
    derivative_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, AutogradProperties, testing::Values(checkpointed_form(2)));

// ---- sizes and segments of its own ------------------------------------------

// One step each, a last segment that is shorter than the others, segments that come out even, and
// one segment that is longer than the sequence, as long as can be.
constexpr int64_t kCheckpointSteps[] = {1, 4, 5, 100, std::numeric_limits<int64_t>::max()};

class SequenceCheckpointed : public testing::TestWithParam<at::ScalarType> {
 protected:
  at::ScalarType dtype() const { return GetParam(); }

  Arguments dense(const Sizes& sizes, uint64_t seed, bool bias = true) const {
    return sequence_problem(sizes, dtype(), seed, bias);
  }
  Arguments packed(
      const std::vector<int64_t>& lengths,
      int64_t I,
      int64_t H,
      uint64_t seed,
      bool reverse) const {
    Arguments arguments = packed_problem(lengths, I, H, dtype(), seed);
    arguments.reverse = reverse;
    return arguments;
  }
  // With checkpoints of every distance; of a dense problem in both directions.
  static void check_each(const Problem& problem) {
    const bool is_packed = problem(1).batch_sizes.has_value();
    std::vector<Function> functions;
    for (const int64_t steps : kCheckpointSteps) {
      functions.push_back(checkpointed(steps));
      if (!is_packed) functions.push_back(against_the_steps(checkpointed(steps)));
    }
    check_all(functions, eager_sequence, problem);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    SequenceCheckpointed,
    testing::ValuesIn(kDtypes),
    [](const testing::TestParamInfo<at::ScalarType>& info) { return name(info.param); });

// Of every engine: few rows, few hidden units, and blocks shared out among threads by rows and by
// hidden units.
TEST_P(SequenceCheckpointed, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{10, 2, 3, 7}, Sizes{10, 17, 3, 33}, Sizes{10, 9, 2, 130}, Sizes{10, 70, 6, 20}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_each([&](uint64_t seed) { return dense(sizes, seed); });
  }
  check_each([&](uint64_t seed) { return dense({10, 17, 3, 33}, seed, /*bias=*/false); });
}

// Rows that end, and in reverse rows that join, at the first step of a segment, at its last one
// and in between; segments that only some rows reach, and one that a single row does.
TEST_P(SequenceCheckpointed, ValuesAndGradientsMatchOracleWhenPacked) {
  // Enough rows for two threads: in reverse, those of the second begin inside of a segment.
  std::vector<int64_t> many(20, 10);
  many.resize(32, 7);
  many.resize(40, 1);
  for (const bool reverse : {false, true}) {
    check_each(
        [&](uint64_t seed) { return packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17, seed, reverse); });
    check_each([&](uint64_t seed) { return packed(many, 5, 66, seed, reverse); });
  }
}

// Whichever engine runs, forward is one call over all steps, in training too.
TEST_P(SequenceCheckpointed, ResultsAreThoseOfASequenceBitForBit) {
  for (const Arguments& a :
       {dense({10, 2, 3, 7}, 1),
        dense({10, 17, 33, 65}, 1),
        dense({10, 1, 17, 300}, 1),
        dense({10, 70, 6, 20}, 1),
        dense({1, 17, 32, 64}, 1),
        dense({1, 2, 33, 65}, 1),
        packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17, 1, /*reverse=*/false),
        packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17, 1, /*reverse=*/true)}) {
    const Tensors expected = sequence(a);
    for (const int64_t steps : kCheckpointSteps) {
      EXPECT_TRUE(identical(checkpointed(steps)(a), expected)) << "inference, " << steps;
      EXPECT_TRUE(identical(checkpointed(steps)(requiring_grad(a)), expected))
          << "training, " << steps;
      const c10::InferenceMode guard;
      EXPECT_TRUE(identical(checkpointed(steps)(a), expected)) << "inference mode, " << steps;
    }
  }
}

// Gradients that grow from segment to segment by equal parts, until rounding to 16 bits would lose
// a part altogether: they have to be carried on and accumulated in float32.
TEST_P(SequenceCheckpointed, GradientsMatchThoseOfASequenceOverManySegments) {
  // Small enough for sums of them in float16.
  const OutputGradients equal = [](const Tensors& outputs, uint64_t) {
    Tensors gradients;
    for (const at::Tensor& output : outputs) gradients.push_back(at::full_like(output, 0x1p-6));
    return gradients;
  };
  check_all(
      {checkpointed(1), against_the_steps(checkpointed(1))},
      sequence,
      [&](uint64_t seed) {
        // Small pre-activations and a small c, so that no activation saturates.
        Arguments arguments = dense({500, 5, 3, 17}, seed);
        arguments.weights = arguments.weights / 100;
        arguments.bias = *arguments.bias / 100;
        arguments.c = arguments.c / 100;
        return arguments;
      },
      equal,
      /*problems=*/1);
}

TEST_P(SequenceCheckpointed, ResultsDoNotDependOnTheNumberOfThreadsNorOnTheRun) {
  for (const int count : {2, 3}) {
    check_threads(checkpointed(2), count, dense({5, 33, 17, 70}, 1));
    check_threads(checkpointed(2), count, dense({5, 1, 17, 300}, 1));
    check_threads(checkpointed(2), count, packed({5, 4, 3, 1}, 17, 130, 1, /*reverse=*/true));
  }
}

TEST_P(SequenceCheckpointed, ResultsDoNotDependOnUninitialisedMemory) {
  for (const Sizes& sizes : {Sizes{5, 2, 3, 7}, Sizes{5, 33, 17, 65}, Sizes{5, 3, 2, 300}}) {
    check_uninitialised_memory(checkpointed(2), dense(sizes, 1));
  }
  check_uninitialised_memory(checkpointed(2), packed({5, 4, 2, 1, 1}, 3, 17, 1, /*reverse=*/true));
}

// ---- no steps -------------------------------------------------------------

// As those of at::linear without rows: every result depends on every argument.
TEST(SequenceWithoutSteps, HasZeroGradientsOfTheWeights) {
  const at::Tensor batch_sizes = at::zeros({0}, at::kLong);
  for (const bool packed : {false, true}) {
    for (const int64_t steps : {0, 2}) {
      SCOPED_TRACE(testing::Message() << "packed " << packed << ", checkpoint_steps " << steps);
      Arguments a = sequence_problem({0, 4, 3, 5}, at::kFloat, 1);
      if (packed) {
        a.input = at::zeros({0, 3});
        a.batch_sizes = batch_sizes;
      }
      a.weights.requires_grad_();
      for (const at::Tensor& output : checkpointed(steps)(a)) {
        ASSERT_TRUE(output.requires_grad());
        a.weights.mutable_grad() = at::Tensor();
        output.sum().backward(/*gradient=*/{}, /*retain_graph=*/true);
        ASSERT_TRUE(a.weights.grad().defined());
        EXPECT_TRUE(identical({a.weights.grad()}, {at::zeros_like(a.weights)}));
      }
    }
  }
}

// ---- the layer ------------------------------------------------------------

TEST(SequenceCheckpointedLayer, GivesWhatTheLayerGives) {
  lltm::LLTM layer(lltm::LLTMOptions(3, 17).num_layers(2).bidirectional(true));
  lltm::LLTM other(lltm::LLTMOptions(3, 17).num_layers(2).bidirectional(true).checkpoint_steps(4));
  const at::Tensor input = at::randn({10, 5, 3});
  const auto parameters = layer->named_parameters();
  for (auto& parameter : other->named_parameters()) {
    const at::NoGradGuard no_grad;
    parameter.value().copy_(parameters[parameter.key()]);
  }
  const auto [expected, expected_state] = layer->forward(input);
  const auto [output, state] = other->forward(input);
  EXPECT_TRUE(at::allclose(output, expected));
  expected.square().sum().backward();
  output.square().sum().backward();
  for (const auto& parameter : other->named_parameters()) {
    const at::Tensor& gradient = parameters[parameter.key()].grad();
    EXPECT_TRUE(at::allclose(parameter.value().grad(), gradient, 1e-4, 1e-5)) << parameter.key();
  }
}

TEST(SequenceCheckpointedLayer, PrintsItsOption) {
  std::ostringstream text;
  text << lltm::LLTM(lltm::LLTMOptions(3, 5).checkpoint_steps(4));
  EXPECT_NE(text.str().find("checkpoint_steps=4"), std::string::npos) << text.str();
  text.str("");
  text << lltm::LLTM(lltm::LLTMOptions(3, 5));
  EXPECT_EQ(text.str().find("checkpoint_steps"), std::string::npos) << text.str();
}

}  // namespace
}  // namespace lltm_test
