// A sequence that saves checkpoints instead of activations: what it returns is what a sequence
// returns, and so are the gradients.
#include "testing.h"

#include <lltm/nn.h>
#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <sstream>
#include <tuple>

namespace lltm_test {
namespace {

Function checkpointed(int64_t checkpoint_steps) {
  return [checkpoint_steps](const Arguments& a) {
    const auto [output, h_n, c_n] = lltm::sequence(
        a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, checkpoint_steps);
    return Tensors{output, h_n, c_n};
  };
}

// One step each, a last segment that is shorter than the others, segments that come out even, and
// one segment that is longer than the sequence, as long as can be.
constexpr int64_t kCheckpointSteps[] = {1, 4, 5, 100, std::numeric_limits<int64_t>::max()};

class SequenceCheckpointed : public testing::TestWithParam<std::tuple<at::ScalarType, bool>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }

  Arguments dense(const Sizes& sizes, uint64_t seed, bool bias = true) const {
    return directed(sequence_problem(sizes, dtype(), seed, bias));
  }
  Arguments packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H, uint64_t seed) const {
    return directed(packed_problem(lengths, I, H, dtype(), seed));
  }
  static void check_all(const Problem& problem, const OutputGradients& gradients = kRandom) {
    for (const int64_t steps : kCheckpointSteps) {
      SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
      check(checkpointed(steps), eager_sequence, problem, gradients);
    }
  }

 private:
  Arguments directed(Arguments arguments) const {
    arguments.reverse = std::get<1>(GetParam());
    return arguments;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    SequenceCheckpointed,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
    [](const testing::TestParamInfo<SequenceCheckpointed::ParamType>& info) {
      return name(std::get<0>(info.param)) + (std::get<1>(info.param) ? "_reverse" : "");
    });

// Of every engine: few rows, few hidden units, and blocks shared out among threads by rows and by
// hidden units.
TEST_P(SequenceCheckpointed, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{10, 2, 3, 7}, Sizes{10, 17, 3, 33}, Sizes{10, 9, 2, 130}, Sizes{10, 70, 6, 20}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_all([&](uint64_t seed) { return dense(sizes, seed); });
  }
  check_all([&](uint64_t seed) { return dense({10, 17, 3, 33}, seed, /*bias=*/false); });
}

// Rows that end, and in reverse rows that join, at the first step of a segment, at its last one
// and in between; segments that only some rows reach, and one that a single row does.
TEST_P(SequenceCheckpointed, ValuesAndGradientsMatchOracleWhenPacked) {
  check_all([&](uint64_t seed) { return packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17, seed); });
  // Enough rows for two threads: in reverse, those of the second begin inside of a segment.
  std::vector<int64_t> lengths(20, 10);
  lengths.resize(32, 7);
  lengths.resize(40, 1);
  check_all([&](uint64_t seed) { return packed(lengths, 5, 66, seed); });
}

TEST_P(SequenceCheckpointed, UnusedResultsHaveZeroGradients) {
  for (unsigned used = 1; used < 7; ++used) {
    SCOPED_TRACE(testing::Message() << "used " << used);
    const OutputGradients gradients = [&](const Tensors& outputs, uint64_t seed) {
      Tensors gradients = random_like(outputs, seed);
      for (size_t k = 0; k < gradients.size(); ++k) {
        if ((used >> k & 1) == 0) gradients[k] = at::Tensor();
      }
      return gradients;
    };
    check(
        checkpointed(2),
        eager_sequence,
        [&](uint64_t seed) { return dense({5, 5, 3, 17}, seed); },
        gradients);
    check(
        checkpointed(2),
        eager_sequence,
        [&](uint64_t seed) { return packed({5, 4, 2, 1, 1}, 3, 17, seed); },
        gradients);
  }
}

TEST_P(SequenceCheckpointed, EmptySizesGiveEmptyResults) {
  for (const Sizes& sizes :
       {Sizes{0, 3, 2, 5},
        Sizes{4, 0, 2, 5},
        Sizes{0, 0, 2, 5},
        Sizes{4, 3, 0, 5},
        Sizes{4, 3, 2, 0}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_all([&](uint64_t seed) { return dense(sizes, seed); });
  }
  check_all([&](uint64_t seed) { return packed({}, 2, 5, seed); });
}

TEST_P(SequenceCheckpointed, StepsThatReachNoRowChangeNothing) {
  check_all([&](uint64_t seed) {
    Arguments arguments = packed({5, 3, 2, 2, 2}, 3, 5, seed);
    arguments.batch_sizes = at::cat({*arguments.batch_sizes, at::zeros({6}, at::kLong)});
    return arguments;
  });
}

TEST_P(SequenceCheckpointed, ArgumentsAndGradientsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const OutputGradients gradients = [&](const Tensors& outputs, uint64_t seed) {
      return laid_out(random_like(outputs, seed), layout);
    };
    check(
        checkpointed(2),
        contiguous(checkpointed(2)),
        [&](uint64_t seed) {
          return laid_out(dense({5, 9, 17, 19}, seed), layout, kPositions.back());
        },
        gradients);
    check(
        checkpointed(2),
        contiguous(checkpointed(2)),
        [&](uint64_t seed) {
          return laid_out(packed({5, 4, 3, 1}, 17, 19, seed), layout, kPositions.back());
        },
        gradients);
  }
}

// Whichever engine runs, forward is one call over all steps, in training too.
TEST_P(SequenceCheckpointed, ResultsAreThoseOfASequenceBitForBit) {
  for (const Arguments& a :
       {dense({10, 2, 3, 7}, 1),
        dense({10, 17, 33, 65}, 1),
        dense({10, 1, 17, 300}, 1),
        dense({10, 70, 6, 20}, 1),
        packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17, 1)}) {
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

TEST_P(SequenceCheckpointed, EachSubsetOfArgumentsThatRequireGradGetsItsGradients) {
  const Arguments arguments = dense({5, 5, 3, 7}, 1);
  const Tensors grad_outputs = random_like(eager_sequence(arguments), 2);
  const Evaluation all = evaluate(checkpointed(2), arguments, grad_outputs);
  const Tensors tensors = differentiable(arguments);
  for (size_t subset = 1; subset < size_t{1} << tensors.size(); ++subset) {
    SCOPED_TRACE(testing::Message() << "subset " << subset);
    Tensors leaves;
    for (size_t k = 0; k < tensors.size(); ++k) {
      leaves.push_back(tensors[k].detach().requires_grad_((subset >> k & 1) != 0));
    }
    torch::autograd::backward(checkpointed(2)(with(arguments, leaves)), grad_outputs);
    for (size_t k = 0; k < leaves.size(); ++k) {
      ASSERT_EQ(leaves[k].grad().defined(), (subset >> k & 1) != 0) << kArgumentNames[k];
      if (leaves[k].grad().defined()) {
        const double tolerance = 8 * epsilon(dtype());
        EXPECT_TRUE(at::allclose(leaves[k].grad(), all.gradients[k], tolerance, tolerance))
            << kArgumentNames[k];
      }
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
  check(
      checkpointed(1),
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
    check_threads(checkpointed(2), count, packed({5, 4, 3, 1}, 17, 130, 1));
  }
}

TEST_P(SequenceCheckpointed, ResultsDoNotDependOnUninitialisedMemory) {
  for (const Sizes& sizes : {Sizes{5, 2, 3, 7}, Sizes{5, 33, 17, 65}, Sizes{5, 3, 2, 300}}) {
    check_uninitialised_memory(checkpointed(2), dense(sizes, 1));
  }
  check_uninitialised_memory(checkpointed(2), packed({5, 4, 2, 1, 1}, 3, 17, 1));
}

// ---- higher derivatives, float64 ------------------------------------------

class SequenceCheckpointedDerivatives : public testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  SequenceCheckpointedDerivatives()
      : arguments_(
            std::get<0>(GetParam()) ? packed_problem({4, 2, 1}, 2, 3, at::kDouble, 1)
                                    : sequence_problem({4, 3, 2, 3}, at::kDouble, 1)) {
    arguments_.reverse = std::get<1>(GetParam());
  }

  Scalar function() const { return weighted_sum(checkpointed(3), arguments_); }
  Tensors point() const { return weighted_sum_point(checkpointed(3), arguments_, 2); }

  Arguments arguments_;
};

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    SequenceCheckpointedDerivatives,
    testing::Combine(testing::Bool(), testing::Bool()),
    [](const testing::TestParamInfo<SequenceCheckpointedDerivatives::ParamType>& info) {
      return std::string(std::get<0>(info.param) ? "packed" : "dense") +
             (std::get<1>(info.param) ? "_reverse" : "");
    });

TEST_P(SequenceCheckpointedDerivatives, MatchFiniteDifferences) {
  EXPECT_LT(derivative_error(function(), point(), 1), kDerivativeTolerance);
  EXPECT_LT(derivative_error(derivative(function(), 100), point(), 1), kDerivativeTolerance);
  EXPECT_LT(forward_mode_error(checkpointed(3), arguments_, 3), kDerivativeTolerance);
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
