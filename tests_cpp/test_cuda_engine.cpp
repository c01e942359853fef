// The CUDA backend on the CPU (cuda_on_host.cpp, persistent_on_host.cpp). The persistent engine
// computes supported problems.
#include "cell_arguments.h"
#include "cuda/engine/engine.h"
#include "cuda_on_host.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

namespace lltm_test {
namespace {

template <bool kPersistent>
std::shared_ptr<void> persistent() {
  return std::make_shared<PersistentSetting>(kPersistent);
}

// The persistent engine supports H in 16-bit dtypes. Only the LLTM tests strides of each argument.
std::vector<Form> of_cells(Form form) {
  std::vector<Form> forms;
  form.sizes = {form.step ? 1 : 3, 5, 9, 16};
  for (const char* cell : kCells) {
    form.name = cell;
    form.cell = cell;
    form.positions = positions_of(cell);
    if (form.cell != "lltm") form.positions = {form.positions.back()};
    forms.push_back(form);
  }
  return forms;
}
std::vector<Form> steps() {
  return of_cells({.name = "", .run = cell, .baseline = eager_cell, .step = true});
}
template <bool kPersistent>
std::vector<Form> sequences() {
  return of_cells(
      {.name = "",
       .run = sequence,
       .baseline = eager_sequence,
       .setting = persistent<kPersistent>});
}
std::vector<Form> checkpointed_sequences() {
  return of_cells(
      {.name = "",
       .run = checkpointed(2),
       .baseline = eager_sequence,
       .setting = persistent<false>});
}
constexpr std::array kSixteenBits = {at::kBFloat16, at::kHalf};
// In float64, PyTorch is the other cells' oracle.
constexpr std::array kDtypesBelowOracle = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr std::array kFloat64 = {at::kDouble};

#define LLTM_FORMS_OF(prefix, suite, forms, dtypes) \
  INSTANTIATE_TEST_SUITE_P(prefix, suite, each_case(forms, dtypes), form_case_name)
#define LLTM_EACH_PROPERTY_OF(prefix, forms, dtypes, dtypes_of_gradients) \
  LLTM_FORMS_OF(prefix, Properties, forms, dtypes);                       \
  LLTM_FORMS_OF(prefix, SequenceProperties, forms, dtypes);               \
  LLTM_FORMS_OF(prefix, GradientProperties, forms, dtypes_of_gradients)
LLTM_EACH_PROPERTY_OF(Cuda, sequences<false>(), kDtypes, kDtypesBelowOracle);
LLTM_EACH_PROPERTY_OF(SlowPersistent, sequences<true>(), kSixteenBits, kSixteenBits);
LLTM_EACH_PROPERTY_OF(SlowCheckpointed, checkpointed_sequences(), kDtypes, kDtypesBelowOracle);
LLTM_FORMS_OF(CudaStep, Properties, steps(), kDtypes);
LLTM_FORMS_OF(CudaStep, GradientProperties, steps(), kDtypesBelowOracle);
LLTM_FORMS_OF(CudaFloat64, GradientProperties, sequences<false>().front(), kFloat64);
LLTM_FORMS_OF(CudaStepFloat64, GradientProperties, steps().front(), kFloat64);
// LLTM only: the test memory holds three rows.
LLTM_FORMS_OF(Cuda, HostProperties, sequences<false>().front(), kDtypes);
LLTM_FORMS_OF(CudaStep, HostProperties, steps().front(), kDtypes);

class CudaStep : public FormTest {};
class CudaSequence : public FormTest {};
INSTANTIATE_TEST_SUITE_P(Cuda, CudaStep, each_case(steps(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    Cuda, CudaSequence, each_case(sequences<false>(), kDtypes), form_case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, CudaSequence, each_case(sequences<true>(), kSixteenBits), form_case_name);

Problem with_resets_and_mask(const Problem& problem) {
  return [=](uint64_t seed) {
    Arguments a = problem(seed);
    a.reset = random_reset(a, seed);
    a.recurrent_mask = random_mask(a, seed);
    return a;
  };
}

TEST_P(CudaSequence, CheckpointedValuesAndGradientsMatchOracle) {
  for (const Problem& problem :
       {dense({10, 3, 5, 7}), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 16)}) {
    for (const int64_t steps : {1, 3, 100}) {
      SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
      lltm_test::check(checkpointed(steps), eager_sequence, problem);
      if (lltm::cuda_persistent()) continue;
      const Arguments a = problem(1);
      const Tensors gradients = random_gradients(a);
      EXPECT_TRUE(identical(evaluate(checkpointed(steps), a, gradients).outputs, sequence(a)));
    }
  }
}

TEST_P(CudaSequence, ResetAndMaskedValuesAndGradientsMatchOracle) {
  for (const Problem& problem :
       {dense({6, 5, 3, 8}), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 16)}) {
    for (const int64_t steps : {0, 2}) {
      lltm_test::check(checkpointed(steps), eager_sequence, with_resets_and_mask(problem));
    }
  }
}

TEST_P(CudaSequence, InferenceIsBitwiseIdenticalToTraining) {
  for (const Arguments& a : {dense({5, 9, 3, 24})(1), packed({5, 4, 4, 1}, 3, 24)(1)}) {
    const Tensors trained = sequence(requiring_grad(a));
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(identical(sequence(a), trained));
  }
}

TEST_P(CudaSequence, ReadsOnlyInitializedMemory) {
  check_uninitialised_memory(sequence, packed({5, 4, 4, 1}, 3, 7)(1));
  check_uninitialised_memory(sequence, dense({4, 3, 5, 16})(1));
}
TEST_P(CudaStep, ReadsOnlyInitializedMemory) {
  check_uninitialised_memory(cell, dense({1, 3, 5, 7})(1));
}

// As with batch_first.
TEST_P(CudaSequence, GradientsOfTheOutputMayBeBatchFirst) {
  for (const Sizes& sizes : {Sizes{4, 5, 3, 16}, Sizes{4, 5, 3, 7}}) {
    const Arguments arguments = dense(sizes)(1);
    const Tensors gradients = random_gradients(arguments);
    Tensors batch_first = gradients;
    batch_first[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1);
    ASSERT_FALSE(batch_first[0].is_contiguous());
    EXPECT_TRUE(identical(
        evaluate(sequence, arguments, batch_first).gradients,
        evaluate(sequence, arguments, gradients).gradients));
  }
}

template <typename Backward>
void check_masks(const lltm::OutputMask& all, const Backward& backward) {
  const Tensors expected = backward(all);
  for (size_t k = 0; k < expected.size(); ++k) {
    EXPECT_EQ(expected[k].defined(), all[k]) << k;
    EXPECT_TRUE(!all[k] || expected[k].is_contiguous()) << k;
    for (size_t other = 0; other < k; ++other) {
      EXPECT_FALSE(all[k] && all[other] && expected[k].is_alias_of(expected[other]))
          << k << " and " << other;
    }
    lltm::OutputMask one = {}, others = all;
    one[k] = all[k];
    others[k] = false;
    const Tensors alone = backward(one), rest = backward(others);
    for (size_t n = 0; n < expected.size(); ++n) {
      SCOPED_TRACE(testing::Message() << n << ", chosen by " << k);
      EXPECT_TRUE(identical(alone[n], n == k ? expected[n] : at::Tensor()));
      EXPECT_TRUE(identical(rest[n], n == k ? at::Tensor() : expected[n]));
    }
  }
}
lltm::OutputMask all_of(const CellArguments& a) {
  const bool apart = a.weight_hh.has_value();
  return {true, true, true, true, apart, true, apart};
}

TEST_P(CudaSequence, OnlyRequestedGradientsAreComputed) {
  const CellArguments a = operands(dense({4, 3, 5, 8})(1));
  const auto [output, h_n, c_n, activations] =
      lltm::cuda::sequence_forward({sequence_inputs(a), /*save=*/true});
  const Tensors grads = random_like({output, h_n, c_n}, 2);
  check_masks(
      all_of(a), [&, &output = output, &activations = activations](const lltm::OutputMask& mask) {
        return as_list(
            lltm::cuda::sequence_backward(
                {sequence_inputs(a), output, activations, grads[0], grads[1], grads[2], mask}));
      });
}

TEST_P(CudaStep, OnlyRequestedGradientsAreComputed) {
  const CellArguments a = operands(dense({1, 3, 5, 8})(1));
  const auto [output, h, c, activations] =
      lltm::cuda::step_forward({step_inputs(a), /*save=*/true});
  const Tensors grads = random_like({h, c}, 2);
  check_masks(all_of(a), [&, &activations = activations](const lltm::OutputMask& mask) {
    return as_list(
        lltm::cuda::step_backward({step_inputs(a), {}, activations, {}, grads[0], grads[1], mask}));
  });
}

// With [W_hh, W_ih] and one bias, and with separate weights and biases.
std::array<CellArguments, 2> concatenated_and_apart(const Arguments& a) {
  CellArguments concatenated = operands(a), apart = operands(a);
  const int64_t hidden = a.h.size(1);
  if (a.weight_hh) {
    concatenated.weight_ih = at::cat({*a.weight_hh, a.weights}, 1);
    concatenated.weight_hh.reset();
    concatenated.bias_hh.reset();
    apart.bias_hh.reset();
  } else {
    apart.weight_hh = a.weights.slice(1, 0, hidden).contiguous();
    apart.weight_ih = a.weights.slice(1, hidden).contiguous();
  }
  return {concatenated, apart};
}
void expect_the_same(const std::array<Tensors, 2>& results, std::array<lltm::Gradients, 2> grads) {
  EXPECT_TRUE(identical(results[0], results[1]));
  auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = grads[1];
  weight_ih = at::cat({weight_hh, weight_ih}, 1);
  weight_hh = at::Tensor();
  EXPECT_TRUE(identical(as_list(grads[0]), as_list(grads[1])));
}

TEST_P(CudaSequence, AConcatenatedMatrixGivesTheSameResults) {
  for (const Arguments& a : {dense({4, 3, 5, 8})(1), packed({5, 4, 4, 1}, 3, 24)(1)}) {
    std::array<Tensors, 2> results;
    std::array<lltm::Gradients, 2> gradients;
    const std::array<CellArguments, 2> both = concatenated_and_apart(a);
    for (size_t k = 0; k < both.size(); ++k) {
      const lltm::SequenceInputs args = sequence_inputs(both[k]);
      results[k] = as_list(lltm::cuda::sequence_forward({args, /*save=*/true}));
      const auto& y = results[k];
      const bool apart = k == 1;
      gradients[k] = lltm::cuda::sequence_backward(
          {args, y[0], y[3], y[0], y[1], y[2], {true, true, true, true, apart, true, false}});
    }
    expect_the_same(results, gradients);
  }
}

TEST_P(CudaStep, AConcatenatedMatrixGivesTheSameResults) {
  std::array<Tensors, 2> results;
  std::array<lltm::Gradients, 2> gradients;
  const std::array<CellArguments, 2> both = concatenated_and_apart(dense({1, 3, 5, 7})(1));
  for (size_t k = 0; k < both.size(); ++k) {
    const lltm::SequenceInputs args = step_inputs(both[k]);
    results[k] = as_list(lltm::cuda::step_forward({args, /*save=*/true}));
    const auto& y = results[k];
    const bool apart = k == 1;
    gradients[k] = lltm::cuda::step_backward(
        {args, {}, y[3], {}, y[1], y[2], {true, true, true, true, apart, true, false}});
  }
  expect_the_same(results, gradients);
}

class CudaPerStep : public FormTest {
 protected:
  static lltm::SequenceResult forward(
      const Arguments& a, int64_t workspace_bytes = lltm::cuda::kWorkspaceBytes) {
    const CellArguments of_cell = operands(a);
    return lltm::cuda::per_step_forward({sequence_inputs(of_cell), /*save=*/true}, workspace_bytes);
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, CudaPerStep, each_case(sequences<false>(), kDtypes), form_case_name);

TEST_P(CudaPerStep, ASmallerWorkspaceGivesTheSameResults) {
  const int64_t slots = lltm::find_cell(form_.cell)->slots;
  const int64_t row = slots * 8 * (dtype() == at::kDouble ? 8 : 4);
  for (const Arguments& a : {dense({9, 4, 3, 8})(1), packed({9, 7, 7, 3, 1}, 3, 8)(1)}) {
    const Tensors all = as_list(forward(a));
    for (const int64_t rows : {0, 4, 5, 8, 9, 20}) {
      EXPECT_TRUE(identical(as_list(forward(a, rows * row)), all)) << rows << " rows at a time";
    }
  }
}

struct Calls {
  int64_t gemms, unaligned, operators;

  template <typename Body>
  static Calls of(const Body& body) {
    static thread_local int64_t operators;
    operators = 0;
    const at::CallbackHandle handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                                     ++operators;
                                     return std::unique_ptr<at::ObserverContext>();
                                   }).scopes({at::RecordScope::FUNCTION}));
    const int64_t gemms_before = gemm_calls, unaligned_before = unaligned_gemm_calls;
    body();
    at::removeCallback(handle);
    return {gemm_calls - gemms_before, unaligned_gemm_calls - unaligned_before, operators};
  }
};

// For any H and I, more steps add only aligned GEMMs. If the first pre-activations do not read h,
// an odd H misaligns the recurrent columns.
TEST_P(CudaPerStep, StepsUseAlignedGemmsAndNoCopies) {
  const lltm::CellInfo& cell = *lltm::find_cell(form_.cell);
  for (const auto& [I, H] :
       {std::pair<int64_t, int64_t>{3, 8}, {4, 7}, {16, 7}, {3, 12}, {8, 16}}) {
    if (cell.h.begin > 0 && H % 8 != 0) continue;
    SCOPED_TRACE(testing::Message() << "I=" << I << " H=" << H);
    const auto calls = [&, I = I, H = H](int64_t steps) {
      const Arguments a = dense({steps, 5, I, H})(1);
      const CellArguments of_cell = operands(a);
      const auto [output, h_n, c_n, activations] = forward(a);
      const Calls in_forward = Calls::of([&] { forward(a); });
      const Calls in_backward =
          Calls::of([&, output = output, h_n = h_n, activations = activations] {
            lltm::cuda::per_step_backward(
                {sequence_inputs(of_cell), output, activations, output, h_n, h_n, all_of(of_cell)});
          });
      return std::pair(in_forward, in_backward);
    };
    const auto [forward_3, backward_3] = calls(3);
    const auto [forward_30, backward_30] = calls(30);
    EXPECT_EQ(forward_3.gemms, 1 + 3);
    EXPECT_EQ(forward_30.gemms, 1 + 30);
    EXPECT_EQ(forward_30.unaligned, forward_3.unaligned);
    EXPECT_EQ(forward_30.operators, forward_3.operators);
    EXPECT_EQ(backward_30.gemms, backward_3.gemms + 27);
    EXPECT_EQ(backward_30.unaligned, backward_3.unaligned);
    EXPECT_EQ(backward_30.operators, backward_3.operators);
    EXPECT_GT(forward_3.operators, 0);
    // Forward's only operand that the engine cannot pad.
    if (I == 16) {
      EXPECT_EQ(forward_30.unaligned, 0);
    } else if (I == 3) {
      EXPECT_EQ(forward_30.unaligned, 1);
    }
  }
}

// A single sum over all rows would have several times the permitted error. The baseline is the
// rounded oracle: MKL sums as inaccurately on some CPUs.
class CudaWeightGradients : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { sums_in_order = true; }
  void TearDown() override { sums_in_order = false; }

  static void check_gradients(const Function& ours_function, const Arguments& a) {
    const Tensors gradients = random_gradients(a);
    const Evaluation ours = evaluate(ours_function, a, gradients);
    const Evaluation expected = expect(a, gradients);
    for (size_t k = 0; k < ours.gradients.size(); ++k) {
      const at::Tensor& exact = expected.gradients[k];
      EXPECT_TRUE(is_accurate(ours.gradients[k], exact.to(a.input.scalar_type()), exact))
          << kArgumentNames[k];
    }
  }

 private:
  const PersistentSetting setting_{false};
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes, CudaWeightGradients, testing::Values(at::kFloat), [](const auto& info) {
      return name(info.param);
    });
INSTANTIATE_TEST_SUITE_P(
    SlowDtypes,
    CudaWeightGradients,
    testing::Values(at::kHalf, at::kBFloat16),
    [](const auto& info) { return name(info.param); });

TEST_P(CudaWeightGradients, AreAccurateForLargeBatches) {
  for (const int64_t checkpoint_steps : {0, 1, 3}) {
    check_gradients(
        checkpointed(checkpoint_steps), sequence_problem({4, 25'000, 4, 4}, GetParam(), 1));
  }
}

TEST_P(CudaWeightGradients, OfAStepAreAccurateForLargeBatches) {
  check_gradients(cell, cell_problem({1, 100'000, 4, 4}, GetParam(), 1));
}

}  // namespace
}  // namespace lltm_test
