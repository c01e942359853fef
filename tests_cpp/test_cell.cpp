// One step: accuracy at all sizes, and what properties.h does not say of every form.
#include "properties.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <tuple>

namespace lltm_test {
namespace {

// ---- what holds of every form -----------------------------------------------

const Form kCell = {.name = "cell", .run = cell, .baseline = eager_cell, .step = true};

INSTANTIATE_TEST_SUITE_P(Cell, Properties, each_case(kCell, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Cell, GradientProperties, each_case(kCell, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Cell, HostProperties, each_case(kCell, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    Cell,
    DerivativeProperties,
    testing::Combine(
        testing::Values(kCell),
        testing::Values(Kind::kDense, Kind::kWithoutBias),
        testing::Values(false)),
    derivative_name);
INSTANTIATE_TEST_SUITE_P(Cell, AutogradProperties, testing::Values(kCell));

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
  check_step(
      [dtype = dtype, sizes = sizes](uint64_t seed) { return cell_problem(sizes, dtype, seed); });
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

TEST_P(CellDtype, ValuesAndGradientsMatchOracleWithoutBias) {
  for (const Sizes& sizes :
       {Sizes{1, 2, 3, 1}, {1, 5, 7, 2}, {1, 16, 32, 128}, {1, 65, 130, 33}, {1, 2, 1, 130}}) {
    check_step(
        [&](uint64_t seed) { return cell_problem(sizes, GetParam(), seed, /*bias=*/false); });
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

TEST_P(CellDtype, LargePreActivationsOfOneGateLeaveTheOthersAlone) {
  const double scale = GetParam() == at::kHalf ? 200 : 1e4;
  for (int64_t gate = 0; gate < 3; ++gate) {
    for (const double sign : {1.0, -1.0}) {
      SCOPED_TRACE(testing::Message() << "gate " << gate << ", bias " << sign * scale);
      check_step([&](uint64_t seed) {
        const Arguments arguments = problem({1, 7, 3, 17}, seed);
        arguments.bias->slice(0, gate * 17, (gate + 1) * 17).fill_(sign * scale);
        return arguments;
      });
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

TEST_P(CellDtype, InferenceAndTrainingGiveTheSameValues) {
  const Arguments arguments = problem({1, 17, 33, 65}, 1);
  const Tensors training = cell(requiring_grad(arguments));
  EXPECT_TRUE(identical(cell(arguments), training));
  const c10::InferenceMode inference;
  EXPECT_TRUE(identical(cell(arguments), training));
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

}  // namespace
}  // namespace lltm_test
