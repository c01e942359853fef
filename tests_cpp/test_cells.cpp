// The LSTM and the GRU, as properties.h says of every form and as accurate as plain PyTorch: what
// engines, GEMM formats, kernels and the composite path know of a cell, they take from its page.
// Their modules are tested in test_nn.cpp, their engines by other schedules in test_engines.cpp.
#include "properties.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

constexpr std::array<const char*, 2> kOtherCells = {"lstm", "gru"};
// Not float64, in which plain PyTorch is the oracle itself: there the other properties, gradcheck
// among them, and the Python tests compare.
constexpr std::array kDtypesBelowOracle = {at::kFloat, at::kBFloat16, at::kHalf};

// ---- what holds of every form -----------------------------------------------

// One argument after another is strided in test_cell.cpp and test_sequence.cpp, of the LLTM.
std::vector<Form> forms_of_cells(Form form) {
  std::vector<Form> forms;
  for (const char* cell : kOtherCells) {
    form.name = cell;
    form.cell = cell;
    form.positions = {positions_of(cell).back()};
    forms.push_back(form);
  }
  return forms;
}

std::vector<Form> step_forms() {
  return forms_of_cells({.name = "", .run = cell, .baseline = eager_cell, .step = true});
}
std::vector<Form> sequence_forms() {
  return forms_of_cells({.name = "", .run = sequence, .baseline = eager_sequence});
}
std::vector<Form> checkpointed_forms() {
  return forms_of_cells({.name = "", .run = checkpointed(2), .baseline = eager_sequence});
}
std::vector<Form> prepacked_forms() {
  return forms_of_cells(
      {.name = "",
       .run = prepacked(),
       .baseline = sequence,
       .differentiable = false,
       .roundings = 8});
}
std::vector<Form> int8_forms() {
  std::vector<Form> forms = forms_of_cells(
      {.name = "",
       .run = prepacked(at::kQInt8),
       .baseline = sequence,
       .differentiable = false,
       .tolerance = 0.05,
       .roundings = 8});
  for (Form& form : forms) {  // weights have to be finite
    form.positions = {{0, 1, form.cell == "lstm" ? size_t{4} : 3}};
  }
  return forms;
}

INSTANTIATE_TEST_SUITE_P(Cells, Properties, each_case(step_forms(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    Cells, GradientProperties, each_case(step_forms(), kDtypesBelowOracle), form_case_name);
INSTANTIATE_TEST_SUITE_P(Cells, AutogradProperties, testing::ValuesIn(step_forms()));
INSTANTIATE_TEST_SUITE_P(
    Cells,
    DerivativeProperties,
    testing::Combine(
        testing::ValuesIn(step_forms()),
        testing::Values(Kind::kDense, Kind::kWithoutBias),
        testing::Values(false)),
    derivative_name);

INSTANTIATE_TEST_SUITE_P(
    SequenceCells, Properties, each_case(sequence_forms(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCells, SequenceProperties, each_case(sequence_forms(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCells,
    GradientProperties,
    each_case(sequence_forms(), kDtypesBelowOracle),
    form_case_name);
INSTANTIATE_TEST_SUITE_P(SequenceCells, AutogradProperties, testing::ValuesIn(sequence_forms()));
INSTANTIATE_TEST_SUITE_P(
    SequenceCells,
    DerivativeProperties,
    testing::Combine(
        testing::ValuesIn(sequence_forms()),
        testing::Values(Kind::kDense, Kind::kPacked),
        testing::Bool()),
    derivative_name);

INSTANTIATE_TEST_SUITE_P(
    SequenceCellsCheckpointed,
    SequenceProperties,
    each_case(checkpointed_forms(), kDtypes),
    form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCellsPrepacked, Properties, each_case(prepacked_forms(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCellsPrepacked,
    SequenceProperties,
    each_case(prepacked_forms(), kDtypes),
    form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCellsInt8, Properties, each_case(int8_forms(), kDtypesOfInt8), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceCellsInt8, SequenceProperties, each_case(int8_forms(), kDtypesOfInt8), form_case_name);

// ---- accuracy ---------------------------------------------------------------

class CellsDtype : public testing::TestWithParam<std::tuple<at::ScalarType, const char*>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  const char* cell_name() const { return std::get<1>(GetParam()); }

  Problem step(const Sizes& sizes, bool bias = true) const {
    return
        [=, this](uint64_t seed) { return cell_problem(sizes, dtype(), seed, bias, cell_name()); };
  }
  Problem dense(const Sizes& sizes, bool bias = true) const {
    return [=, this](uint64_t seed) {
      return sequence_problem(sizes, dtype(), seed, bias, cell_name());
    };
  }
  Problem packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H, bool reverse) const {
    return [=, this](uint64_t seed) {
      Arguments arguments = packed_problem(lengths, I, H, dtype(), seed, cell_name());
      arguments.reverse = reverse;
      return arguments;
    };
  }
};

std::string cells_name(const testing::TestParamInfo<CellsDtype::ParamType>& info) {
  return name(std::get<0>(info.param)) + '_' + std::get<1>(info.param);
}
class SequenceCellsDtype : public CellsDtype {};

const auto kEachDtypeOfCells =
    testing::Combine(testing::ValuesIn(kDtypesBelowOracle), testing::ValuesIn(kOtherCells));
INSTANTIATE_TEST_SUITE_P(Dtypes, CellsDtype, kEachDtypeOfCells, cells_name);
INSTANTIATE_TEST_SUITE_P(Dtypes, SequenceCellsDtype, kEachDtypeOfCells, cells_name);

// By scalar products, by the GEMM kernel block by block, and by ATen.
TEST_P(CellsDtype, AStepIsAsAccurateAsPlainPyTorch) {
  for (const Sizes& sizes :
       {Sizes{1, 2, 1, 130},
        {1, 3, 5, 7},
        {1, 16, 32, 64},
        {1, 40, 20, 96},
        {1, 70, 33, 48},
        {1, 1, 17, 300}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_step(step(sizes));
    check_step(step(sizes, /*bias=*/false));
  }
}

// In each direction, and from checkpoints. Few rows, of few steps and of many; few units; rows
// enough for the input projection to be merged; blocks on threads that share rows and that do not;
// more rows than are worked on at a time; K and N that fill no vector.
TEST_P(SequenceCellsDtype, ASequenceIsAsAccurateAsPlainPyTorch) {
  const std::vector<Function> ours = {
      sequence, against_the_steps(sequence), checkpointed(2), checkpointed(100)};
  for (const Sizes& sizes :
       {Sizes{7, 2, 3, 1},
        {9, 3, 5, 33},
        {36, 2, 3, 40},
        {3, 4, 21, 250},
        {12, 40, 7, 16},
        {9, 16, 32, 64},
        {5, 33, 17, 100},
        {4, 70, 64, 160},
        {3, 300, 2, 20}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_all(ours, eager_sequence, dense(sizes));
  }
  check_all(ours, eager_sequence, dense({5, 17, 3, 33}, /*bias=*/false));
}

TEST_P(SequenceCellsDtype, APackedSequenceIsAsAccurateAsPlainPyTorch) {
  std::vector<int64_t> many;
  for (int64_t row = 0; row < 40; ++row) many.push_back(12 - row / 4);
  for (const bool reverse : {false, true}) {
    for (const std::vector<int64_t>& lengths :
         std::vector<std::vector<int64_t>>{{7, 6, 5, 4, 3, 2, 1}, {9, 9, 9, 9, 9, 1, 1}, many}) {
      SCOPED_TRACE(testing::PrintToString(lengths));
      check_all({sequence, checkpointed(3)}, eager_sequence, packed(lengths, 20, 96, reverse));
    }
  }
}

TEST_P(SequenceCellsDtype, ResultsDoNotDependOnTheNumberOfThreadsNorOnTheRun) {
  for (const Sizes& sizes : {Sizes{2, 33, 17, 70}, Sizes{34, 3, 17, 130}, Sizes{2, 500, 3, 10}}) {
    check_threads(sequence, 3, dense(sizes)(1));
  }
  check_threads(sequence, 3, packed({4, 4, 3, 1}, 17, 130, /*reverse=*/true)(1));
  check_threads(cell, 3, step({1, 33, 17, 70})(1));
}

TEST_P(SequenceCellsDtype, ResultsDoNotDependOnUninitialisedMemory) {
  for (const Sizes& sizes : {Sizes{5, 2, 3, 7}, {36, 2, 3, 33}, {3, 33, 17, 65}, {2, 130, 2, 33}}) {
    check_uninitialised_memory(sequence, dense(sizes)(1));
    check_uninitialised_memory(checkpointed(2), dense(sizes)(1));
    check_uninitialised_memory(cell, step(sizes)(1));
  }
  check_uninitialised_memory(sequence, packed({5, 4, 2, 1, 1}, 3, 17, /*reverse=*/false)(1));
}

}  // namespace
}  // namespace lltm_test
