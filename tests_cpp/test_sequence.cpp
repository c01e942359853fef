// A sequence, dense and packed, forward and in reverse: accuracy at all sizes, and what
// properties.h does not say of every form.
#include "properties.h"

#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>

namespace lltm_test {
namespace {

// ---- what holds of every form -----------------------------------------------

const Form kSequence = {.name = "sequence", .run = sequence, .baseline = eager_sequence};

INSTANTIATE_TEST_SUITE_P(Sequence, Properties, each_case(kSequence, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Sequence, SequenceProperties, each_case(kSequence, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Sequence, GradientProperties, each_case(kSequence, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Sequence, HostProperties, each_case(kSequence, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    Sequence,
    DerivativeProperties,
    testing::Combine(
        testing::Values(kSequence), testing::Values(Kind::kDense, Kind::kPacked), testing::Bool()),
    derivative_name);
INSTANTIATE_TEST_SUITE_P(Sequence, AutogradProperties, testing::Values(kSequence));

// Weights that are packed ahead, as they are and in 8 bits; test_nn.cpp and test_int8.py have
// more of the latter. Without derivatives.
const Form kPrepacked = {
    .name = "prepacked",
    .run = prepacked(),
    .baseline = sequence,
    .differentiable = false,
    .roundings = 8};
const Form kInt8 = {
    .name = "int8",
    .run = prepacked(at::kQInt8),
    .baseline = sequence,
    .differentiable = false,
    .tolerance = 0.05,
    .roundings = 8,
    .positions = {{0}, {1}, {2}, {4}, {0, 1, 2, 4}}};  // weights have to be finite

INSTANTIATE_TEST_SUITE_P(SequencePrepacked, Properties, each_case(kPrepacked, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequencePrepacked, SequenceProperties, each_case(kPrepacked, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(SequenceInt8, Properties, each_case(kInt8, kDtypesOfInt8), case_name);
INSTANTIATE_TEST_SUITE_P(
    SequenceInt8, SequenceProperties, each_case(kInt8, kDtypesOfInt8), case_name);

std::string with_direction(const std::string& name, bool reverse) {
  return name + (reverse ? "_reverse" : "");
}

Arguments reversed(Arguments arguments, bool reverse) {
  arguments.reverse = reverse;
  return arguments;
}

// Random gradients of output, h_n and c_n.
Tensors random_gradients(const Arguments& arguments, uint64_t seed) {
  return random_like(eager_sequence(arguments), seed);
}

// ---- accuracy -------------------------------------------------------------

constexpr Sizes kSequenceSizes[] = {
    {1, 1, 1, 1},     {2, 1, 2, 3},     {7, 2, 3, 1},     {5, 3, 5, 7},     {3, 5, 7, 2},
    {3, 7, 16, 17},   {4, 17, 33, 16},  {2, 16, 32, 128}, {2, 33, 17, 65},  {2, 65, 130, 33},
    {4, 20, 6, 10},   {3, 70, 6, 10},   {3, 130, 65, 5},  {5, 1, 130, 130}, {9, 2, 1, 130},
    {40, 1, 17, 130}, {35, 3, 21, 250}, {36, 2, 3, 33},   {2, 130, 2, 33},  {2, 7, 64, 192},
    {3, 40, 20, 300}, {3, 2, 17, 301},  {3, 4, 21, 250},
};

const std::vector<Function> kBothWays = {sequence, against_the_steps(sequence)};

class SequenceAccuracy : public testing::TestWithParam<std::tuple<at::ScalarType, Sizes>> {};

TEST_P(SequenceAccuracy, ValuesAndGradientsMatchOracle) {
  const auto& [dtype, sizes] = GetParam();
  check_all(kBothWays, eager_sequence, [dtype = dtype, sizes = sizes](uint64_t seed) {
    return sequence_problem(sizes, dtype, seed);
  });
}

std::string accuracy_name(const testing::TestParamInfo<SequenceAccuracy::ParamType>& info) {
  const auto [dtype, s] = info.param;
  return name(dtype) + "_T" + std::to_string(s.T) + "_B" + std::to_string(s.B) + "_I" +
         std::to_string(s.I) + "_H" + std::to_string(s.H);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    SequenceAccuracy,
    testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kSequenceSizes)),
    accuracy_name);

// Of each dtype.
class SequenceAccuracyDtype : public testing::TestWithParam<at::ScalarType> {
 protected:
  at::ScalarType dtype() const { return GetParam(); }
  Problem dense(const Sizes& sizes, bool bias = true) const {
    return [=, this](uint64_t seed) { return sequence_problem(sizes, dtype(), seed, bias); };
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    SequenceAccuracyDtype,
    testing::ValuesIn(kDtypes),
    [](const testing::TestParamInfo<at::ScalarType>& info) { return name(info.param); });

TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleWithoutBias) {
  check_all(kBothWays, eager_sequence, dense({5, 17, 3, 33}, /*bias=*/false));
}

// With weights of a fifth of the usual size: with those, a rounding error would
// grow from step to step, and which of two results ends up closer to the truth
// would be a matter of luck.
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleOverManySteps) {
  for (const Sizes& sizes :
       {Sizes{40, 4, 3, 9}, Sizes{70, 1, 3, 9}, Sizes{30, 33, 2, 5}, Sizes{300, 4, 3, 9}}) {
    const Problem problem = [&](uint64_t seed) {
      Arguments arguments = dense(sizes)(seed);
      arguments.weights = arguments.weights * 0.2;
      return arguments;
    };
    check_all(kBothWays, eager_sequence, problem, kRandom, /*problems=*/6);
  }
}

// More rows than are worked on at a time (512; 4096 in bfloat16), several times
// over: in steps of one size, and in steps that fewer and fewer rows reach.
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleOverManyRows) {
  check_all(kBothWays, eager_sequence, dense({5, 450, 2, 16}));
  std::vector<int64_t> lengths(700, 5);
  lengths.resize(1000, 3);
  lengths.resize(1400, 1);
  for (const bool reverse : {false, true}) {
    check_sequence([&](uint64_t seed) {
      return reversed(packed_problem(lengths, 2, 17, dtype(), seed), reverse);
    });
  }
  if (dtype() == at::kBFloat16) check_all(kBothWays, eager_sequence, dense({5, 3000, 2, 18}));
}

// Of numbers of one sign, so that the partial sums grow and with them what each
// addition rounds away; of few rows, and of rows and units enough for the micro-kernel.
TEST_P(SequenceAccuracyDtype, ValuesAndGradientsMatchOracleOverLongSums) {
  for (const Sizes& sizes : {Sizes{1, 5, 20000, 17}, Sizes{2, 3, 20000, 17}}) {
    check_sequence([&](uint64_t seed) {
      Arguments arguments = dense(sizes)(seed);
      arguments.input = arguments.input.abs();
      arguments.weights = arguments.weights.abs() / 5000;
      return arguments;
    });
  }
}

// Each step as many rows as are worked on at a time, in several blocks of hidden
// units. The gradients are too large for bf16x3 (cpu/kernel/bf16x3.h), so that on every CPU
// these are products of float; float16 can't hold such.
TEST_P(SequenceAccuracyDtype, GradientsMatchOracleOverLargeSteps) {
  const double scale = dtype() == at::kHalf ? 1 : 0x1p62;
  const OutputGradients gradients = [&](const Tensors& outputs, uint64_t seed) {
    Tensors result = random_like(outputs, seed);
    for (at::Tensor& gradient : result) gradient = gradient * scale;
    return result;
  };
  check_all(kBothWays, eager_sequence, dense({2, 260, 5, 144}), gradients, /*problems=*/1);
}

TEST_P(SequenceAccuracyDtype, InputMayBeBatchFirst) {
  check_all({sequence}, eager_sequence, [&](uint64_t seed) {
    Arguments arguments = dense({3, 9, 17, 19})(seed);
    arguments.input = arguments.input.transpose(0, 1).contiguous().transpose(0, 1);
    return arguments;
  });
}

// ---- packed ---------------------------------------------------------------

struct Packed {
  const char* name;
  std::vector<int64_t> lengths;
  int64_t input_size, hidden_size;
};

void PrintTo(const Packed& packed, std::ostream* stream) {
  *stream << packed.name;
}

// Lengths from `longest` to 1, of as many rows each.
std::vector<int64_t> falling_lengths(int64_t rows, int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t row = 0; row < rows; ++row) lengths.push_back(longest - row * longest / rows);
  return lengths;
}

const Packed kPacked[] = {
    {"one_row", {5}, 3, 4},
    {"equal_lengths", {3, 3, 3}, 5, 7},
    {"each_shorter_by_one", {7, 6, 5, 4, 3, 2, 1}, 7, 17},
    {"one_long_row", {20, 1, 1, 1}, 2, 33},
    {"one_step_each", {1, 1, 1, 1, 1}, 16, 5},
    {"falling_by_many", {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 1}, 33, 65},
    {"wide", {3, 3, 2, 1, 1}, 130, 130},
    {"many_rows_and_wide", falling_lengths(70, 5), 33, 130},
};

class SequencePacked : public testing::TestWithParam<std::tuple<at::ScalarType, Packed, bool>> {};

TEST_P(SequencePacked, ValuesAndGradientsMatchOracle) {
  const auto& [dtype, packed, reverse] = GetParam();
  check_sequence([dtype = dtype, packed = packed, reverse = reverse](uint64_t seed) {
    return reversed(
        packed_problem(packed.lengths, packed.input_size, packed.hidden_size, dtype, seed),
        reverse);
  });
}

std::string packed_name(const testing::TestParamInfo<SequencePacked::ParamType>& info) {
  const auto& [dtype, packed, reverse] = info.param;
  return with_direction(name(dtype) + "_" + packed.name, reverse);
}

INSTANTIATE_TEST_SUITE_P(
    Lengths,
    SequencePacked,
    testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kPacked), testing::Bool()),
    packed_name);

// ---- every dtype, both directions -----------------------------------------

class SequenceDtype : public testing::TestWithParam<std::tuple<at::ScalarType, bool>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  bool reverse() const { return std::get<1>(GetParam()); }

  Arguments dense(const Sizes& sizes, uint64_t seed) const {
    return reversed(sequence_problem(sizes, dtype(), seed), reverse());
  }
  Arguments packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H, uint64_t seed) const {
    return reversed(packed_problem(lengths, I, H, dtype(), seed), reverse());
  }
  Problem dense_problems(const Sizes& sizes) const {
    return [=, this](uint64_t seed) { return dense(sizes, seed); };
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    SequenceDtype,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
    [](const testing::TestParamInfo<SequenceDtype::ParamType>& info) {
      return with_direction(name(std::get<0>(info.param)), std::get<1>(info.param));
    });

TEST_P(SequenceDtype, EqualsTheCellRepeated) {
  const Function repeated = [](const Arguments& a) {
    Arguments step = a;
    Tensors outputs(static_cast<size_t>(a.input.size(0)));
    for (size_t s = 0; s < outputs.size(); ++s) {
      const size_t t = a.reverse ? outputs.size() - 1 - s : s;
      step.input = a.input[static_cast<int64_t>(t)];
      const Tensors next = cell(step);
      outputs[t] = step.h = next[0];
      step.c = next[1];
    }
    return Tensors{at::stack(outputs), step.h, step.c};
  };
  check(sequence, repeated, dense_problems({6, 17, 33, 35}));
}

// What a sequence keeps from step to step is what it returns. Of the 16-bit
// formats bit for bit; float32 has other engines for few rows. In pieces of two steps: one alone
// has an engine of its own. Of inputs of up to 32 elements: a GEMM of few rows sums in chains of
// 32, one of more rows in chains of 64.
TEST_P(SequenceDtype, IsItsPiecesOneByOne) {
  if (dtype() != at::kHalf && dtype() != at::kBFloat16) GTEST_SKIP() << "16-bit formats only";
  const c10::InferenceMode guard;
  for (const Sizes& sizes : {Sizes{8, 5, 3, 9}, Sizes{8, 17, 31, 65}, Sizes{8, 40, 20, 130}}) {
    const Arguments arguments = dense(sizes, 1);
    const Tensors whole = sequence(arguments);
    Arguments piece = arguments;
    for (int64_t k = 0; k < sizes.T; k += 2) {
      const int64_t t = arguments.reverse ? sizes.T - 2 - k : k;
      piece.input = arguments.input.narrow(0, t, 2);
      const Tensors next = sequence(piece);
      EXPECT_TRUE(identical(next[0], whole[0].narrow(0, t, 2))) << "from step " << t << " on";
      piece.h = next[1];
      piece.c = next[2];
    }
    EXPECT_TRUE(identical(piece.h, whole[1]));
    EXPECT_TRUE(identical(piece.c, whole[2]));
  }
}

// However many threads the weights were packed with.
TEST_P(SequenceDtype, PrepackedWeightsGiveTheSame) {
  const c10::InferenceMode inference;
  const int before = at::get_num_threads();
  for (const Arguments& a :
       {dense({6, 5, 3, 17}, 1),
        dense({3, 33, 17, 70}, 1),
        dense({3, 70, 17, 130}, 1),
        dense({2, 1, 17, 300}, 1),
        dense({0, 2, 3, 5}, 1),
        dense({2, 0, 3, 5}, 1),
        packed({4, 4, 3, 1}, 17, 130, 1)}) {
    const Tensors expected = sequence(a);
    for (const int threads : {1, 2, 5}) {
      at::set_num_threads(threads);
      const at::Tensor weights = pack(a);
      at::set_num_threads(before);
      const auto [output, h_n, c_n] =
          lltm::sequence_prepacked(a.input, a.h, a.c, weights, a.bias, a.batch_sizes, a.reverse);
      const double tolerance = 8 * epsilon(a.input.scalar_type());
      const Tensors ours = {output, h_n, c_n};
      for (size_t k = 0; k < ours.size(); ++k) {
        ASSERT_EQ(ours[k].sizes(), expected[k].sizes());
        EXPECT_TRUE(at::allclose(ours[k], expected[k], tolerance, tolerance))
            << "result " << k << ", packed with " << threads << " threads";
      }
    }
  }
}

// Bit for bit, but for float64: there MKL may round a row by its place in the matrix.
TEST_P(SequenceDtype, ReverseIsTheForwardSequenceOfTheFlippedInput) {
  const Arguments arguments = dense({6, 5, 3, 17}, 1);
  Arguments flipped = reversed(arguments, !reverse());
  flipped.input = arguments.input.flip(0);
  const Tensors one = sequence(arguments);
  Tensors other = sequence(flipped);
  other[0] = other[0].flip(0);
  for (size_t k = 0; k < one.size(); ++k) {
    EXPECT_TRUE(
        dtype() == at::kDouble ? at::allclose(one[k], other[k], 1e-14, 1e-14)
                               : identical(one[k], other[k]))
        << "result " << k;
  }
}

TEST_P(SequenceDtype, LastStatesAreThoseOfTheLastStepTaken) {
  const Tensors outputs = sequence(dense({6, 5, 3, 17}, 1));
  EXPECT_TRUE(identical(outputs[0][reverse() ? 0 : 5], outputs[1]));
}

TEST_P(SequenceDtype, EqualBatchSizesGiveTheDenseSequence) {
  const Arguments arguments = dense({6, 5, 3, 17}, 1);
  Arguments packed = arguments;
  packed.input = arguments.input.flatten(0, 1);
  packed.batch_sizes = at::full({6}, 5, at::kLong);
  const Tensors one = sequence(arguments);
  const Tensors other = sequence(packed);
  EXPECT_TRUE(identical(one[0].flatten(0, 1), other[0]));
  EXPECT_TRUE(identical(one[1], other[1]));
  EXPECT_TRUE(identical(one[2], other[2]));
}

TEST_P(SequenceDtype, BatchSizesMayBeStrided) {
  const Arguments arguments = packed({7, 5, 5, 2}, 3, 5, 1);
  Arguments strided = arguments;
  const at::Tensor sizes = *arguments.batch_sizes;
  strided.batch_sizes =
      at::stack({sizes, at::full_like(sizes, 1000)}, 1).flatten().slice(0, 0, std::nullopt, 2);
  EXPECT_TRUE(identical(sequence(arguments), sequence(strided)));
}

// Where only the gradient of the state is wanted, the steps alone see that a gradient cannot
// be decomposed to bf16x3. With nothing negative anywhere, and nothing saturated, it stays
// infinite back to the first step.
TEST_P(SequenceDtype, AnInfiniteGradientOfManyRowsReachesTheState) {
  if (dtype() == at::kBFloat16) GTEST_SKIP() << "its rounding saturates activations";
  Arguments arguments = dense({4, 40, 3, 35}, 1);
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

// Over more steps than the problems of properties.h have.
TEST_P(SequenceDtype, AnInfiniteGradientOfManyStepsIsThatOfPlainPyTorch) {
  const Arguments arguments = dense({300, 4, 3, 7}, 1);
  const Tensors grad_outputs = random_gradients(arguments, 2);
  grad_outputs[0][2][1][0].fill_(std::numeric_limits<double>::infinity());
  const Evaluation ours = evaluate(sequence, arguments, grad_outputs);
  const Evaluation eager = evaluate(eager_sequence, arguments, grad_outputs);
  for (size_t k = 0; k < ours.gradients.size(); ++k) {
    EXPECT_TRUE(identical(ours.gradients[k].isnan(), eager.gradients[k].isnan()))
        << "gradient of " << kArgumentNames[k];
  }
}

// Products that overflow, of either sign, in many rows: infinite pre-activations
// of finite arguments.
TEST_P(SequenceDtype, OverflowingProductsAreThoseOfPlainPyTorch) {
  if (dtype() != at::kFloat && dtype() != at::kDouble) GTEST_SKIP() << "rounded otherwise";
  const c10::InferenceMode guard;
  Arguments arguments = dense({1, 40, 3, 35}, 1);
  const double large = dtype() == at::kFloat ? 1e30 : 1e200;
  arguments.input = arguments.input * large;
  arguments.weights = arguments.weights * large;
  const Tensors ours = sequence(arguments);
  const Tensors eager = eager_sequence(arguments);
  EXPECT_GT(eager[2].isinf().sum().item<int64_t>(), 100);
  for (size_t k = 0; k < ours.size(); ++k) {
    EXPECT_TRUE(at::allclose(ours[k], eager[k], 1e-5, 1e-5, /*equal_nan=*/true)) << "result " << k;
  }
}

TEST_P(SequenceDtype, InferenceAndTrainingGiveTheSameValues) {
  const Arguments arguments = dense({6, 17, 33, 65}, 1);
  const Tensors grad_outputs = random_gradients(arguments, 2);
  const Expected expected = expect(arguments, grad_outputs);
  const Tensors training = sequence(requiring_grad(arguments));
  const Tensors no_grad = sequence(arguments);
  const c10::InferenceMode guard;
  const Tensors inference = sequence(arguments);
  for (size_t k = 0; k < training.size(); ++k) {
    EXPECT_TRUE(is_accurate(no_grad[k], training[k], expected.outputs[k])) << "output " << k;
    EXPECT_TRUE(identical(inference[k], no_grad[k])) << "output " << k;
  }
}

// Large enough to be shared out, by rows and by hidden units.
TEST_P(SequenceDtype, ResultsDoNotDependOnTheNumberOfThreadsNorOnTheRun) {
  for (const int count : {2, 3}) {
    for (const Sizes& sizes :
         {Sizes{2, 33, 17, 70},
          Sizes{2, 33, 150, 70},
          Sizes{2, 1, 17, 300},
          Sizes{34, 3, 17, 130},
          Sizes{2, 500, 3, 10}}) {
      check_threads(sequence, count, dense(sizes, 1));
    }
    check_threads(sequence, count, packed({4, 4, 3, 1}, 17, 130, 1));
  }
}

// Sizes that are padded in one way or another.
TEST_P(SequenceDtype, ResultsDoNotDependOnUninitialisedMemory) {
  for (const Sizes& sizes : kSequenceSizes) check_uninitialised_memory(sequence, dense(sizes, 1));
  for (const Packed& lengths : kPacked) {
    check_uninitialised_memory(
        sequence, packed(lengths.lengths, lengths.input_size, lengths.hidden_size, 1));
  }
}

TEST(SequenceAutograd, AnOutputChangedInPlaceIsRefused) {
  const Tensors outputs = sequence(requiring_grad(sequence_problem({3, 2, 3, 4}, at::kFloat, 1)));
  {
    const at::NoGradGuard no_grad;
    outputs[0].add_(1);
  }
  EXPECT_THROW((outputs[0].sum() + outputs[1].sum()).backward(), c10::Error);
}

}  // namespace
}  // namespace lltm_test
