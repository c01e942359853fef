// One step: values, gradients and derivatives of any order.
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>

namespace lltm_test {
namespace {

// Of h' and c'.
Tensors random_state_gradients(const Arguments& arguments, uint64_t seed) {
  return random_like({arguments.h, arguments.c}, seed);
}

// ---- accuracy -------------------------------------------------------------

constexpr Sizes kCellSizes[] = {
    {1, 1, 1, 1},    {1, 1, 2, 3},    {1, 2, 3, 1},     {1, 3, 5, 7},     {1, 5, 7, 2},
    {1, 7, 16, 17},  {1, 17, 33, 16}, {1, 16, 32, 128}, {1, 33, 17, 65},  {1, 65, 130, 33},
    {1, 20, 6, 10},  {1, 70, 6, 10},  {1, 130, 65, 5},  {1, 1, 130, 130}, {1, 2, 1, 130},
    {1, 130, 2, 33}, {1, 7, 64, 192}, {1, 17, 290, 22}, {1, 600, 20, 34},
};

class CellAccuracy : public testing::TestWithParam<std::tuple<at::ScalarType, Sizes>> {};

std::string accuracy_name(const testing::TestParamInfo<CellAccuracy::ParamType>& info) {
  const auto [dtype, s] = info.param;
  return name(dtype) + "_B" + std::to_string(s.B) + "_I" + std::to_string(s.I) + "_H" +
         std::to_string(s.H);
}

TEST_P(CellAccuracy, ValuesAndGradientsMatchOracle) {
  const auto& [dtype, sizes] = GetParam();
  check_cell(
      [dtype = dtype, sizes = sizes](uint64_t seed) { return cell_problem(sizes, dtype, seed); });
}

TEST_P(CellAccuracy, ValuesAndGradientsMatchOracleWithoutBias) {
  const auto& [dtype, sizes] = GetParam();
  check_cell([dtype = dtype, sizes = sizes](uint64_t seed) {
    return cell_problem(sizes, dtype, seed, /*bias=*/false);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    CellAccuracy,
    testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kCellSizes)),
    accuracy_name);

// ---- every dtype ----------------------------------------------------------

class CellDtype : public testing::TestWithParam<at::ScalarType> {
 protected:
  Arguments problem(const Sizes& sizes, uint64_t seed) const {
    return cell_problem(sizes, GetParam(), seed);
  }
  Problem problems(const Sizes& sizes) const {
    return [=, this](uint64_t seed) { return problem(sizes, seed); };
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CellDtype,
    testing::ValuesIn(kDtypes),
    [](const testing::TestParamInfo<at::ScalarType>& info) { return name(info.param); });

TEST_P(CellDtype, EmptyBatchGivesEmptyResultsAndZeroWeightGradients) {
  check_cell(problems({1, 0, 3, 5}));
  const Arguments arguments = problem({1, 0, 3, 5}, 1);
  const Evaluation ours = evaluate(cell, arguments, random_state_gradients(arguments, 2));
  EXPECT_EQ(ours.outputs[0].sizes(), at::IntArrayRef({0, 5}));
  EXPECT_TRUE(identical(ours.gradients[3], at::zeros_like(arguments.weights)));
  EXPECT_TRUE(identical(ours.gradients[4], at::zeros_like(*arguments.bias)));
}

TEST_P(CellDtype, EmptyInputLeavesTheRecurrentPart) {
  check_cell(problems({1, 4, 0, 5}));
}

TEST_P(CellDtype, EmptyHiddenStateGivesEmptyResults) {
  check_cell(problems({1, 4, 3, 0}));
}

// Each argument in turn, and all of them, laid out in a way that a contiguous
// copy is not.
TEST_P(CellDtype, ArgumentsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    for (const auto& positions : kPositions) {
      SCOPED_TRACE(testing::Message() << layout.name << ": " << testing::PrintToString(positions));
      const Problem problem = [&](uint64_t seed) {
        return laid_out(this->problem({1, 9, 17, 19}, seed), layout, positions);
      };
      check(cell, contiguous(cell), problem);
    }
  }
}

// What h.sum().backward() sends is one element with strides of 0.
TEST_P(CellDtype, BackwardMatchesOracleForExpandedGradients) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    check_cell(problems({1, 17, 5, 33}), [&](const Tensors& outputs, uint64_t seed) {
      return laid_out(random_like(outputs, seed), layout);
    });
  }
}

TEST_P(CellDtype, SumOfResultsBackpropagatesToLeaves) {
  const Arguments arguments = problem({1, 4, 3, 5}, 1);
  const Arguments leaves = requiring_grad(arguments);
  const Tensors outputs = cell(leaves);
  (outputs[0].sum() + outputs[1].sum()).backward();
  const at::Tensor ones = at::ones_like(arguments.h);
  const Evaluation expected = evaluate(cell, arguments, {ones, ones});
  const Tensors leaf = differentiable(leaves);
  for (size_t k = 0; k < leaf.size(); ++k) {
    EXPECT_TRUE(identical(leaf[k].grad(), expected.gradients[k])) << kArgumentNames[k];
  }
}

// Pre-activations beyond ±88, where exp overflows float32, up to ±1e4; ±200
// for float16, whose products would overflow before.
TEST_P(CellDtype, LargePreActivationsSaturate) {
  for (const double scale : {100.0, GetParam() == at::kHalf ? 200.0 : 1e4}) {
    SCOPED_TRACE(testing::Message() << "scale " << scale);
    check_cell([&](uint64_t seed) {
      Arguments arguments = problem({1, 33, 3, 17}, seed);
      arguments.weights = at::zeros_like(arguments.weights);
      arguments.weights.slice(1, 17).fill_(1);  // z is the sum of a row of the input
      arguments.input =
          at::linspace(-scale, scale, 99, at::kDouble).view({33, 3}).div(3).to(GetParam());
      return arguments;
    });
  }
}

TEST_P(CellDtype, LargePreActivationsOfOneGateLeaveTheOthersAlone) {
  const double scale = GetParam() == at::kHalf ? 200 : 1e4;
  for (int64_t gate = 0; gate < 3; ++gate) {
    for (const double sign : {1.0, -1.0}) {
      SCOPED_TRACE(testing::Message() << "gate " << gate << ", bias " << sign * scale);
      check_cell([&](uint64_t seed) {
        const Arguments arguments = problem({1, 7, 3, 17}, seed);
        arguments.bias->slice(0, gate * 17, (gate + 1) * 17).fill_(sign * scale);
        return arguments;
      });
    }
  }
}

// A NaN or an infinity in one element reaches what it reaches in plain
// PyTorch, and nothing else.
TEST_P(CellDtype, NonFiniteArgumentsPropagateAsInPlainPyTorch) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double value : {std::nan(""), infinity, -infinity}) {
    const Arguments finite = problem({1, 5, 3, 7}, 1);
    const Tensors tensors = differentiable(finite);
    for (size_t k = 0; k < tensors.size(); ++k) {
      SCOPED_TRACE(testing::Message() << value << " in " << kArgumentNames[k]);
      Tensors changed = tensors;
      changed[k] = tensors[k].clone();
      changed[k].view(-1)[2].fill_(value);
      const Arguments arguments = with(finite, changed);
      const Tensors grad_outputs = random_state_gradients(arguments, 2);
      const Evaluation ours = evaluate(cell, arguments, grad_outputs);
      const Evaluation eager = evaluate(eager_cell, arguments, grad_outputs);
      for (size_t j = 0; j < ours.outputs.size(); ++j) {
        EXPECT_TRUE(identical(ours.outputs[j].isnan(), eager.outputs[j].isnan())) << "output " << j;
        EXPECT_TRUE(identical(ours.outputs[j].isinf(), eager.outputs[j].isinf())) << "output " << j;
      }
      for (size_t j = 0; j < ours.gradients.size(); ++j) {
        EXPECT_TRUE(identical(ours.gradients[j].isnan(), eager.gradients[j].isnan()))
            << "gradient of " << kArgumentNames[j];
        EXPECT_TRUE(identical(ours.gradients[j].isinf(), eager.gradients[j].isinf()))
            << "gradient of " << kArgumentNames[j];
      }
    }
  }
}

TEST_P(CellDtype, EachSubsetOfArgumentsThatRequireGradGetsItsGradients) {
  const Arguments arguments = problem({1, 5, 3, 7}, 1);
  const Tensors grad_outputs = random_state_gradients(arguments, 2);
  const Evaluation all = evaluate(cell, arguments, grad_outputs);
  const Tensors tensors = differentiable(arguments);
  for (size_t subset = 1; subset < size_t{1} << tensors.size(); ++subset) {
    SCOPED_TRACE(testing::Message() << "subset " << subset);
    Tensors leaves;
    for (size_t k = 0; k < tensors.size(); ++k) {
      leaves.push_back(tensors[k].detach().requires_grad_((subset >> k & 1) != 0));
    }
    const Tensors outputs = cell(with(arguments, leaves));
    torch::autograd::backward(outputs, grad_outputs);
    for (size_t k = 0; k < leaves.size(); ++k) {
      if ((subset >> k & 1) != 0) {
        EXPECT_TRUE(is_accurate(
            leaves[k].grad(), all.gradients[k], expect(arguments, grad_outputs).gradients[k]))
            << kArgumentNames[k];
      } else {
        EXPECT_FALSE(leaves[k].grad().defined()) << kArgumentNames[k];
      }
    }
  }
}

TEST_P(CellDtype, ResultsRequireGradOnlyWhereAnArgumentDoes) {
  const Arguments arguments = problem({1, 2, 3, 4}, 1);
  for (const at::Tensor& output : cell(arguments)) {
    EXPECT_FALSE(output.requires_grad());
  }
  const at::NoGradGuard no_grad;
  for (const at::Tensor& output : cell(requiring_grad(arguments))) {
    EXPECT_FALSE(output.requires_grad());
  }
}

TEST_P(CellDtype, AnUnusedResultHasZeroGradient) {
  for (const size_t unused : {0, 1}) {
    SCOPED_TRACE(unused == 0 ? "only c'" : "only h'");
    check_cell(problems({1, 17, 3, 7}), [&](const Tensors& outputs, uint64_t seed) {
      Tensors gradients = random_like(outputs, seed);
      gradients[unused] = at::Tensor();
      return gradients;
    });
  }
}

TEST_P(CellDtype, InferenceAndTrainingGiveTheSameValues) {
  const Arguments arguments = problem({1, 17, 33, 65}, 1);
  const Tensors training = cell(requiring_grad(arguments));
  EXPECT_TRUE(identical(cell(arguments), training));
  const c10::InferenceMode inference;
  EXPECT_TRUE(identical(cell(arguments), training));
}

TEST_P(CellDtype, ResultsAreNewTensorsAndArgumentsStayAsTheyAre) {
  const Arguments arguments = problem({1, 17, 3, 33}, 1);
  Tensors before;
  for (const at::Tensor& tensor : differentiable(arguments)) {
    before.push_back(tensor.clone());
  }
  const Tensors grad_outputs = random_state_gradients(arguments, 2);
  const Tensors kept = {grad_outputs[0].clone(), grad_outputs[1].clone()};
  const Evaluation ours = evaluate(cell, arguments, grad_outputs);
  EXPECT_TRUE(identical(differentiable(arguments), before));
  EXPECT_TRUE(identical(grad_outputs, kept));
  EXPECT_FALSE(ours.outputs[0].is_alias_of(ours.outputs[1]));
  for (const at::Tensor& output : ours.outputs) {
    for (const at::Tensor& argument : differentiable(arguments)) {
      EXPECT_FALSE(output.is_alias_of(argument));
    }
  }
}

// Large enough to be shared out.
TEST_P(CellDtype, ResultsDoNotDependOnTheNumberOfThreadsNorOnTheRun) {
  for (const Sizes& sizes : {Sizes{1, 33, 17, 70}, Sizes{1, 1, 17, 300}, Sizes{1, 500, 3, 10}}) {
    for (const int count : {2, 3}) {
      check_threads(cell, count, problem(sizes, 1));
    }
  }
}

// Sizes that are padded in one way or another.
TEST_P(CellDtype, ResultsDoNotDependOnUninitialisedMemory) {
  for (const Sizes& sizes : kCellSizes) check_uninitialised_memory(cell, problem(sizes, 1));
}

// Rows further apart than 32-bit indices reach; of the weights too, which have
// three rows.
TEST_P(CellDtype, StridesOfWeightsBeyond32BitsAreFollowed) {
  const FarApart far_apart(GetParam());
  check_cell([&](uint64_t seed) {
    Arguments arguments = problem({1, 5, 3, 1}, seed);
    arguments.weights = far_apart.copy(arguments.weights, 0);
    return arguments;
  });
}

TEST_P(CellDtype, StridesBeyond32BitsAreFollowed) {
  const FarApart far_apart(GetParam());
  check_cell(
      [&](uint64_t seed) {
        Arguments arguments = problem({1, 2, 3, 5}, seed);
        arguments.input = far_apart.copy(arguments.input, 0);
        arguments.h = far_apart.copy(arguments.h, 8);
        arguments.c = far_apart.copy(arguments.c, 16);
        return arguments;
      },
      [&](const Tensors& outputs, uint64_t seed) {
        const Tensors gradients = random_like(outputs, seed);
        return Tensors{far_apart.copy(gradients[0], 24), far_apart.copy(gradients[1], 32)};
      });
}

// ---- higher derivatives, float64 ------------------------------------------

class CellDerivatives : public testing::TestWithParam<bool> {
 protected:
  // Arguments and weights of the results, differentiated alike.
  CellDerivatives() : arguments_(cell_problem({1, 3, 2, 4}, at::kDouble, 1, GetParam())) {}

  Scalar function() const { return weighted_sum(cell, arguments_); }
  Tensors point() const { return weighted_sum_point(cell, arguments_, 2); }

  Arguments arguments_;
};

INSTANTIATE_TEST_SUITE_P(
    Bias, CellDerivatives, testing::Bool(), [](const testing::TestParamInfo<bool>& info) {
      return info.param ? "with_bias" : "without_bias";
    });

TEST_P(CellDerivatives, FirstMatchesFiniteDifferences) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_LT(derivative_error(function(), point(), seed), kDerivativeTolerance) << seed;
  }
}

TEST_P(CellDerivatives, SecondMatchesFiniteDifferences) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_LT(derivative_error(derivative(function(), 100), point(), seed), kDerivativeTolerance)
        << seed;
  }
}

TEST_P(CellDerivatives, ThirdMatchesFiniteDifferences) {
  const Scalar second = derivative(derivative(function(), 100), 200);
  for (uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_LT(derivative_error(second, point(), seed), kDerivativeTolerance) << seed;
  }
}

// Only one of the results, so that the other one's gradient is undefined.
TEST_P(CellDerivatives, SecondMatchesFiniteDifferencesForOneResult) {
  for (const size_t used : {0, 1}) {
    const Function one = [used](const Arguments& a) { return Tensors{cell(a)[used]}; };
    const Scalar function = derivative(weighted_sum(one, arguments_), 100);
    EXPECT_LT(
        derivative_error(function, weighted_sum_point(one, arguments_, 2), 3), kDerivativeTolerance)
        << "result " << used;
  }
}

TEST_P(CellDerivatives, GradientsAreTheSameWhenAGraphIsKept) {
  const Tensors grad_outputs = random_state_gradients(arguments_, 2);
  const Evaluation once = evaluate(cell, arguments_, grad_outputs);
  const Arguments leaves = requiring_grad(arguments_);
  const Tensors gradients = torch::autograd::grad(
      cell(leaves), differentiable(leaves), grad_outputs, std::nullopt, /*create_graph=*/true);
  const Expected expected = expect(arguments_, grad_outputs);
  for (size_t k = 0; k < gradients.size(); ++k) {
    EXPECT_TRUE(is_accurate(gradients[k], once.gradients[k], expected.gradients[k]))
        << kArgumentNames[k];
    EXPECT_TRUE(gradients[k].requires_grad()) << kArgumentNames[k];
  }
}

TEST_P(CellDerivatives, ForwardModeMatchesFiniteDifferences) {
  EXPECT_LT(forward_mode_error(cell, arguments_, 3), kDerivativeTolerance);
}

// ---- autograd's bookkeeping -----------------------------------------------

TEST(CellAutograd, ArgumentsChangedInPlaceAreRefused) {
  const Arguments arguments = cell_problem({1, 2, 3, 4}, at::kFloat, 1);
  // c is not saved: its gradient does not need it.
  for (const size_t changed : {0, 1, 3}) {
    const Arguments leaves = requiring_grad(arguments);
    Tensors copies;
    for (const at::Tensor& leaf : differentiable(leaves)) {
      copies.push_back(leaf.clone());
    }
    const Tensors outputs = cell(with(leaves, copies));
    copies[changed].add_(1);
    EXPECT_THROW((outputs[0].sum() + outputs[1].sum()).backward(), c10::Error)
        << kArgumentNames[changed];
  }
}

TEST(CellAutograd, ASecondBackwardThroughAFreedGraphIsRefused) {
  const Arguments leaves = requiring_grad(cell_problem({1, 2, 3, 4}, at::kFloat, 1));
  const at::Tensor loss = cell(leaves)[0].sum();
  loss.backward();
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace
}  // namespace lltm_test
