#include "properties.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

std::vector<Form> first_of(const std::vector<Form>& forms) {
  return {forms.front()};
}
std::vector<Form> others_of(const std::vector<Form>& forms) {
  return {forms.begin() + 1, forms.end()};
}
const std::vector<Form> kSteps =
    forms_of_cells({.name = "", .run = cell, .baseline = eager_cell, .step = true});
const std::vector<Form> kSequences =
    forms_of_cells({.name = "", .run = sequence, .baseline = eager_sequence});
const std::vector<Form> kCheckpointed =
    forms_of_cells({.name = "", .run = checkpointed(2), .baseline = eager_sequence});
// Prepacked weights have no derivatives; int8 weights must be finite. See also test_int8.py.
const std::vector<Form> kPrepacked = forms_of_cells(
    {.name = "",
     .run = prepacked(),
     .baseline = sequence,
     .differentiable = false,
     .roundings = 8});
const std::vector<Form> kInt8 = forms_of_cells(
    {.name = "",
     .run = prepacked(at::kQInt8),
     .baseline = sequence,
     .differentiable = false,
     .tolerance = 0.05,
     .roundings = 8},
    /*weights=*/false,
    kBoundedCells);

// A step is a sequence of one step.
LLTM_EACH_CASE(Cell, Properties, first_of(kSteps), kDtypes);
LLTM_EACH_CASE(Cell, GradientProperties, first_of(kSteps), kDtypes);
LLTM_EACH_CASE(Cell, HostProperties, first_of(kSteps), kDtypes);
LLTM_EACH_CASE(Sequence, Properties, kSequences, kDtypes);
LLTM_EACH_CASE(Sequence, SequenceProperties, kSequences, kDtypes);
LLTM_EACH_CASE(Sequence, GradientProperties, first_of(kSequences), kDtypes);
LLTM_EACH_CASE(SequenceOthers, GradientProperties, others_of(kSequences), kDtypesBelowOracle);
LLTM_EACH_CASE(Sequence, HostProperties, first_of(kSequences), kDtypes);
LLTM_EACH_CASE(SequenceCheckpointed, Properties, first_of(kCheckpointed), kDtypes);
LLTM_EACH_CASE(SequenceCheckpointed, SequenceProperties, kCheckpointed, kDtypes);
LLTM_EACH_CASE(SequenceCheckpointed, GradientProperties, first_of(kCheckpointed), kDtypes);
LLTM_EACH_CASE(SequenceCheckpointed, HostProperties, first_of(kCheckpointed), kDtypes);
LLTM_EACH_CASE(SequencePrepacked, Properties, kPrepacked, kDtypes);
LLTM_EACH_CASE(SequencePrepacked, SequenceProperties, kPrepacked, kDtypes);
LLTM_EACH_CASE(SequenceInt8, Properties, kInt8, kDtypesBelowOracle);
LLTM_EACH_CASE(SequenceInt8, SequenceProperties, kInt8, kDtypesBelowOracle);

INSTANTIATE_TEST_SUITE_P(Cell, AutogradProperties, testing::ValuesIn(first_of(kSteps)));
INSTANTIATE_TEST_SUITE_P(Sequence, AutogradProperties, testing::ValuesIn(kSequences));
INSTANTIATE_TEST_SUITE_P(
    SequenceCheckpointed, AutogradProperties, testing::ValuesIn(kCheckpointed));

// Sequences whose tests also run against the steps.
const std::vector<Form> kForwardSequences = [] {
  std::vector<Form> forms = kSequences;
  for (Form& form : forms) form.has_reverse = false;
  return forms;
}();

struct Packed {
  std::vector<int64_t> lengths;
  int64_t I, H;
};

class CellTest : public FormTest {
 protected:
  using FormTest::packed;
  Problem packed(const Packed& rows) const { return packed(rows.lengths, rows.I, rows.H); }

  // All for the first cell, every second for others.
  template <size_t count>
  std::vector<Sizes> some_of(const Sizes (&sizes)[count]) const {
    std::vector<Sizes> some;
    const size_t step = form_.cell == kCells.front() ? 1 : 2;
    for (size_t k = step - 1; k < count; k += step) some.push_back(sizes[k]);
    return some;
  }
};

// Dot products, the GEMM kernel, and ATen.
constexpr Sizes kStepSizes[] = {
    {1, 1, 1, 1},    {1, 1, 2, 3},    {1, 2, 3, 1},     {1, 3, 5, 7},     {1, 5, 7, 2},
    {1, 7, 16, 17},  {1, 17, 33, 16}, {1, 16, 32, 128}, {1, 33, 17, 65},  {1, 65, 130, 33},
    {1, 20, 6, 10},  {1, 70, 6, 10},  {1, 130, 65, 5},  {1, 1, 130, 130}, {1, 2, 1, 130},
    {1, 130, 2, 33}, {1, 7, 64, 192}, {1, 17, 290, 22}, {1, 600, 20, 34}, {1, 40, 20, 96},
    {1, 70, 33, 48}, {1, 1, 17, 300},
};

class CellAccuracy : public CellTest {};
LLTM_EACH_CASE(Sizes, CellAccuracy, kSteps, kDtypesBelowOracle);

TEST_P(CellAccuracy, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes : some_of(kStepSizes)) check(dense(sizes));
}

// Small batches with few or many steps; few hidden units; a merged input projection; shared and
// separate rows; several chunks; partial vectors in K and N.
constexpr Sizes kSequenceSizes[] = {
    {1, 1, 1, 1},     {2, 1, 2, 3},     {7, 2, 3, 1},     {5, 3, 5, 7},     {3, 5, 7, 2},
    {3, 7, 16, 17},   {4, 17, 33, 16},  {2, 16, 32, 128}, {2, 33, 17, 65},  {2, 65, 130, 33},
    {4, 20, 6, 10},   {3, 70, 6, 10},   {3, 130, 65, 5},  {5, 1, 130, 130}, {9, 2, 1, 130},
    {40, 1, 17, 130}, {35, 3, 21, 250}, {36, 2, 3, 33},   {2, 130, 2, 33},  {2, 7, 64, 192},
    {3, 40, 20, 300}, {3, 2, 17, 301},  {3, 4, 21, 250},  {12, 40, 7, 16},  {4, 70, 64, 160},
    {3, 300, 2, 20},
};

const Functions kBothWays = {sequence, against_the_steps(sequence)};

class SequenceAccuracy : public CellTest {};
LLTM_EACH_CASE(Sizes, SequenceAccuracy, kForwardSequences, kDtypesBelowOracle);

TEST_P(SequenceAccuracy, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes : some_of(kSequenceSizes)) {
    lltm_test::check(kBothWays, eager_sequence, dense(sizes));
  }
}

TEST_P(SequenceAccuracy, WithResetsAndARecurrentMaskToo) {
  for (const Sizes& sizes : some_of(kSequenceSizes)) {
    lltm_test::check(
        {sequence, against_the_steps(checkpointed(2))},
        eager_sequence,
        with_resets_and_mask(dense(sizes)),
        kRandom,
        /*problems=*/2);
  }
}

const Packed kPacked[] = {
    {{5}, 3, 4},
    {{3, 3, 3}, 5, 7},
    {{7, 6, 5, 4, 3, 2, 1}, 7, 17},
    {{20, 1, 1, 1}, 2, 33},
    {{1, 1, 1, 1, 1}, 16, 5},
    {{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 1}, 33, 65},
    {{3, 3, 2, 1, 1}, 130, 130},
    {falling_lengths(70, 5), 33, 130},
};

class SequencePacked : public CellTest {};
LLTM_EACH_CASE(Lengths, SequencePacked, kSequences, kDtypesBelowOracle);

TEST_P(SequencePacked, ValuesAndGradientsMatchOracle) {
  for (const Packed& rows : kPacked) {
    check(packed(rows));
    lltm_test::check(
        {sequence, checkpointed(3)},
        eager_sequence,
        with_resets_and_mask(packed(rows)),
        kRandom,
        /*problems=*/2);
  }
}

class SequenceAccuracyDtype : public CellTest {};
LLTM_EACH_CASE(Dtypes, SequenceAccuracyDtype, kForwardSequences, kDtypesBelowOracle);

// Several chunks (512 rows; 4096 in bfloat16).
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleForLargeBatches) {
  lltm_test::check(kBothWays, eager_sequence, dense({5, 450, 2, 16}), kRandom, /*problems=*/1);
  if (dtype() == at::kBFloat16) {
    lltm_test::check(kBothWays, eager_sequence, dense({5, 3000, 2, 18}), kRandom, /*problems=*/1);
  }
}

// Terms of one sign increase the rounding errors of partial sums.
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleOverLongSums) {
  if (form_.cell == "rnn_relu" && at::get_cpu_capability() == "DEFAULT") {
    GTEST_SKIP() << "relu does not damp the errors of PyTorch's GEMMs, which differ by their shape";
  }
  for (const Sizes& sizes : {Sizes{1, 5, 20000, 17}, Sizes{2, 3, 20000, 17}}) {
    const Problem problem = [&](uint64_t seed) {
      Arguments arguments = dense(sizes)(seed);
      arguments.input = arguments.input.abs();
      arguments.weights = arguments.weights.abs() / 5000;
      return arguments;
    };
    lltm_test::check(sequence, eager_sequence, problem, kRandom, /*problems=*/1);
  }
}

Arguments going_on(Arguments arguments, const Tensors& states) {
  arguments.h = states[0];
  if (arguments.c.defined()) arguments.c = states[1];
  return arguments;
}

// Each step fills a chunk and several blocks. Gradients too large for float16 and bf16x3: every CPU
// uses float GEMMs.
TEST_P(SequenceAccuracyDtype, GradientsMatchOracleOverLargeSteps) {
  const double scale = dtype() == at::kHalf ? 1 : 0x1p62;
  const OutputGradients gradients = [&](const Arguments& arguments, uint64_t seed) {
    Tensors result = random_gradients(arguments, seed);
    for (at::Tensor& gradient : result) gradient = gradient * scale;
    return result;
  };
  lltm_test::check(kBothWays, eager_sequence, dense({2, 260, 5, 144}), gradients, /*problems=*/1);
}

// Single steps, a shorter last segment, equal segments, a single long segment.
constexpr int64_t kCheckpointSteps[] = {1, 4, 5, 100, std::numeric_limits<int64_t>::max()};

// Every engine and both divisions among threads.
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsFromCheckpointsMatchOracle) {
  Functions functions;
  for (const int64_t steps : kCheckpointSteps) {
    functions.push_back(checkpointed(steps));
    functions.push_back(against_the_steps(checkpointed(steps)));
  }
  for (const Sizes& sizes :
       {Sizes{10, 2, 3, 7}, Sizes{10, 17, 3, 33}, Sizes{10, 9, 2, 130}, Sizes{10, 70, 6, 20}}) {
    lltm_test::check(functions, eager_sequence, dense(sizes), kRandom, /*problems=*/1);
  }
  const Problem without_bias = dense({10, 17, 3, 33}, /*bias=*/false);
  lltm_test::check(functions, eager_sequence, without_bias, kRandom, /*problems=*/1);
}

// Sequences end (in reverse, start) at and between a segment's first and last step.
const Packed kOfSegments = {{10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 17};

TEST_P(SequencePacked, CheckpointsMatchOracle) {
  // In reverse, the second thread's rows start inside a segment.
  Packed many = {std::vector<int64_t>(20, 10), 5, 66};
  many.lengths.resize(32, 7);
  many.lengths.resize(40, 1);
  Functions functions;
  for (const int64_t steps : kCheckpointSteps) functions.push_back(checkpointed(steps));
  for (const Packed& rows : {kOfSegments, many}) {
    lltm_test::check(functions, eager_sequence, packed(rows), kRandom, /*problems=*/1);
  }
}

// 16-bit accumulation would lose equal increments.
TEST_P(SequenceAccuracyDtype, GradientsFromManySegmentsMatchThoseOfASequence) {
  if (form_.cell != kCells.front()) GTEST_SKIP() << "others forget";
  // Small enough for float16 sums.
  const OutputGradients equal = [](const Arguments& arguments, uint64_t) {
    Tensors gradients = like_outputs(arguments);
    for (at::Tensor& gradient : gradients) gradient.fill_(0x1p-6);
    return gradients;
  };
  lltm_test::check(
      {checkpointed(1), against_the_steps(checkpointed(1))},
      sequence,
      [&](uint64_t seed) {
        const Arguments arguments = dense({500, 5, 3, 17})(seed);
        Tensors small = differentiable(arguments);
        const auto names = argument_names(arguments);
        for (size_t k = 0; k < small.size(); ++k) {
          const std::string_view name = names[k];
          if (name != "input" && name != "h") small[k] = small[k] / 100;
        }
        return with(arguments, small);
      },
      equal,
      /*problems=*/1);
}

class SequenceDtype : public CellTest {
 protected:
  bool reverse() const { return std::get<2>(GetParam()); }
  Arguments dense(const Sizes& sizes) const { return CellTest::dense(sizes)(1); }
  Arguments packed(const Packed& rows) const { return CellTest::packed(rows)(1); }
};
// In float64 only the first cell: all others use the same code.
LLTM_EACH_CASE(Dtypes, SequenceDtype, first_of(kSequences), kDtypes);
LLTM_EACH_CASE(DtypesOfOthers, SequenceDtype, others_of(kSequences), kDtypesBelowOracle);

// The results: SequencePrepacked/Properties.
TEST_P(SequenceDtype, PrepackedWeightsDoNotDependOnTheNumberOfThreads) {
  const auto packed_by = [](const Arguments& a, int threads) {
    const ThreadCount count(threads);
    return pack(a);
  };
  for (const Arguments& a : {dense({3, 33, 17, 70}), dense({3, 70, 17, 130})}) {
    const at::Tensor expected = packed_by(a, 1);
    for (const int threads : {2, 5}) EXPECT_TRUE(identical(packed_by(a, threads), expected));
  }
}

TEST_P(SequenceDtype, BatchSizesMayBeStrided) {
  const Arguments arguments = packed({{7, 5, 5, 2}, 3, 5});
  Arguments strided = arguments;
  const at::Tensor sizes = *arguments.batch_sizes;
  strided.batch_sizes =
      at::stack({sizes, at::full_like(sizes, 1000)}, 1).flatten().slice(0, 0, std::nullopt, 2);
  EXPECT_TRUE(identical(sequence(arguments), sequence(strided)));
}

// Includes NaN. A mask without resets changes nothing.
TEST_P(SequenceDtype, ValuesBeforeAResetHaveNoEffect) {
  for (const Sizes& sizes : {Sizes{6, 3, 4, 7}, Sizes{6, 40, 9, 64}}) {
    Arguments arguments = dense(sizes);
    const Tensors without = sequence(arguments);
    arguments.reset = at::zeros({sizes.T, sizes.B}, at::kBool);
    EXPECT_TRUE(close(sequence(arguments), without));
    arguments.reset->select(0, 3).fill_(true);
    const Tensors expected = sequence(arguments);
    Arguments spoilt = requiring_grad(arguments);
    const at::Tensor nan = at::full_like(arguments.h, std::nan(""));
    spoilt = going_on(spoilt, {nan, nan});
    Tensors results = sequence(spoilt);
    EXPECT_TRUE(results[0].isnan().any().item<bool>());
    const auto after = [&](const at::Tensor& output) {
      return reverse() ? output.narrow(0, 0, 4) : output.narrow(0, 3, sizes.T - 3);
    };
    EXPECT_TRUE(close({after(results[0])}, {after(expected[0])}));
    results[0] = expected[0];
    EXPECT_TRUE(close(results, expected));
  }
}

// Forward is one call over all steps, in training too.
TEST_P(SequenceDtype, ResultsWithCheckpointsAreBitwiseIdenticalToThoseWithout) {
  for (const Arguments& a :
       {dense({10, 2, 3, 7}),
        dense({10, 17, 33, 65}),
        dense({10, 1, 17, 300}),
        dense({10, 70, 6, 20}),
        dense({40, 2, 5, 70}),
        dense({1, 17, 32, 64}),
        dense({1, 2, 33, 65}),
        packed(kOfSegments)}) {
    // Inference may use another engine than training.
    const Tensors expected = sequence(a), trained = sequence(requiring_grad(a));
    for (const int64_t steps : kCheckpointSteps) {
      EXPECT_TRUE(identical(checkpointed(steps)(a), expected)) << "inference, " << steps;
      EXPECT_TRUE(identical(checkpointed(steps)(requiring_grad(a)), trained))
          << "training, " << steps;
      const c10::InferenceMode guard;
      EXPECT_TRUE(identical(checkpointed(steps)(a), expected)) << "inference mode, " << steps;
    }
  }
}

// If only the state gradient is requested, each step must detect gradients beyond bf16x3. Positive,
// unsaturated values keep the gradient infinite.
TEST_P(SequenceDtype, AnInfiniteGradientOfALargeBatchReachesTheState) {
  if (dtype() == at::kBFloat16) GTEST_SKIP() << "its rounding saturates activations";
  if (!info_of(form_.cell).concatenated) GTEST_SKIP() << "others meet infinities of both signs";
  Arguments arguments = dense({4, 40, 3, 35});
  Tensors tensors = differentiable(arguments);
  for (at::Tensor& tensor : tensors) tensor = tensor.abs() / 8;
  arguments = with(arguments, tensors);
  const at::Tensor gradient = at::zeros({4, 40, 35}, arguments.input.options());
  gradient[2][1][0].fill_(std::numeric_limits<double>::infinity());
  const auto of_state = [&](const Function& function) {
    Arguments a = arguments;
    a.h = arguments.h.detach().clone().requires_grad_();
    return torch::autograd::grad({function(a)[0]}, {a.h}, {gradient})[0];
  };
  const at::Tensor ours = of_state(sequence);
  const at::Tensor eager = of_state(eager_sequence);
  EXPECT_TRUE(eager[1].isinf().all().item<bool>());
  EXPECT_TRUE(identical(ours.isinf(), eager.isinf()));
  EXPECT_FALSE(ours.isnan().any().item<bool>());
}

// Finite arguments have infinite pre-activations of both signs. All products of a sum have one
// sign: otherwise, their order decides between infinity and NaN.
TEST_P(SequenceDtype, OverflowingGemmsEqualThoseOfTheReference) {
  if (c10::elementSize(dtype()) == 2) GTEST_SKIP() << "rounded otherwise";
  const c10::InferenceMode guard;
  Arguments arguments = dense({1, 40, 3, 35});
  const double large = dtype() == at::kFloat ? 1e30 : 1e200;
  arguments.input = arguments.input.abs() * large;
  const at::Tensor sign_of_row = arguments.weights.narrow(1, 0, 1).sign();
  arguments.weights = arguments.weights.abs() * sign_of_row * large;
  const Tensors ours = sequence(arguments);
  const Tensors eager = eager_sequence(arguments);
  if (form_.cell == kCells.front()) {
    EXPECT_GT(eager[2].isinf().sum().item<int64_t>(), 100);
  }
  for (size_t k = 0; k < ours.size(); ++k) {
    EXPECT_TRUE(at::allclose(ours[k], eager[k], 1e-5, 1e-5, /*equal_nan=*/true)) << "result " << k;
  }
}

// Threads divide rows or hidden units.
TEST_P(SequenceDtype, ResultsDoNotDependOnTheNumberOfThreadsNorOnTheRun) {
  for (const int count : {2, 3}) {
    for (const Sizes& sizes :
         {Sizes{1, 33, 17, 70},
          Sizes{1, 1, 17, 300},
          Sizes{1, 500, 3, 10},
          Sizes{2, 33, 17, 70},
          Sizes{2, 33, 150, 70},
          Sizes{2, 1, 17, 300},
          Sizes{34, 3, 17, 130},
          Sizes{2, 500, 3, 10}}) {
      check_threads(sequence, count, dense(sizes));
    }
    check_threads(sequence, count, packed({{4, 4, 3, 1}, 17, 130}));
    check_threads(checkpointed(2), count, dense({5, 33, 17, 70}));
    check_threads(checkpointed(2), count, dense({5, 1, 17, 300}));
    check_threads(checkpointed(2), count, packed({{5, 4, 3, 1}, 17, 130}));
  }
}

// Sizes that need padding.
TEST_P(SequenceDtype, ResultsDoNotDependOnUninitializedMemory) {
  for (const Sizes& sizes : kStepSizes) check_uninitialised_memory(sequence, dense(sizes));
  for (const Sizes& sizes : kSequenceSizes) check_uninitialised_memory(sequence, dense(sizes));
  for (const Packed& rows : kPacked) {
    check_uninitialised_memory(sequence, packed(rows));
  }
  for (const Sizes& sizes : {Sizes{5, 2, 3, 7}, Sizes{5, 33, 17, 65}, Sizes{5, 3, 2, 300}}) {
    check_uninitialised_memory(checkpointed(2), dense(sizes));
  }
  check_uninitialised_memory(checkpointed(2), packed({{5, 4, 2, 1, 1}, 3, 17}));
}

TEST(SequenceAutograd, AnOutputChangedInPlaceIsRejected) {
  const Tensors outputs = sequence(requiring_grad(sequence_problem({3, 2, 3, 4}, at::kFloat, 1)));
  {
    const at::NoGradGuard no_grad;
    outputs[0].add_(1);
  }
  EXPECT_THROW((outputs[0].sum() + outputs[1].sum()).backward(), c10::Error);
}

}  // namespace
}  // namespace lltm_test
