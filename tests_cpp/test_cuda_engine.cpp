// The CUDA backend on the CPU (cuda_on_host.cpp). The persistent engine
// computes supported problems.
#include "cell_arguments.h"
#include "cuda/engine/engine.h"
#include "cuda_on_host.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <utility>

namespace lltm_test {
namespace {

// The persistent engine supports H in 16-bit dtypes.
std::vector<Form> steps() {
  return forms_of_cells(
      {.name = "", .run = cell, .baseline = eager_cell, .step = true, .sizes = {1, 5, 9, 16}});
}
template <bool kPersistent>
std::vector<Form> sequences(const Function& run = sequence) {
  return forms_of_cells(
      {.name = "",
       .run = run,
       .baseline = eager_sequence,
       .sizes = {3, 5, 9, 16},
       .setting = persistent<kPersistent>});
}
constexpr std::array kFloat64 = {at::kDouble};

#define LLTM_EACH_PROPERTY_OF(prefix, forms, dtypes, dtypes_of_gradients) \
  LLTM_EACH_CASE(prefix, Properties, forms, dtypes);                      \
  LLTM_EACH_CASE(prefix, SequenceProperties, forms, dtypes);              \
  LLTM_EACH_CASE(prefix, GradientProperties, forms, dtypes_of_gradients)
LLTM_EACH_PROPERTY_OF(Cuda, sequences<false>(), kDtypes, kDtypesBelowOracle);
LLTM_EACH_PROPERTY_OF(SlowPersistent, sequences<true>(), kSixteenBits, kSixteenBits);
LLTM_EACH_PROPERTY_OF(
    SlowCheckpointed, sequences<false>(checkpointed(2)), kDtypes, kDtypesBelowOracle);
LLTM_EACH_CASE(CudaStep, Properties, steps(), kDtypes);
LLTM_EACH_CASE(CudaStep, GradientProperties, steps(), kDtypesBelowOracle);
LLTM_EACH_CASE(CudaFloat64, GradientProperties, sequences<false>().front(), kFloat64);
LLTM_EACH_CASE(CudaStepFloat64, GradientProperties, steps().front(), kFloat64);
// LLTM only: the test memory holds three rows, which no tensor has allocated.
Form on_any_memory(Form form) {
  struct Setting {
    PersistentSetting per_step{false};
    Temporarily<bool> any{any_memory, true};
  };
  form.setting = []() -> std::shared_ptr<void> { return std::make_shared<Setting>(); };
  return form;
}
LLTM_EACH_CASE(Cuda, HostProperties, on_any_memory(sequences<false>().front()), kDtypes);
LLTM_EACH_CASE(CudaStep, HostProperties, on_any_memory(steps().front()), kDtypes);

class CudaSequence : public FormTest {};
LLTM_EACH_CASE(Cuda, CudaSequence, sequences<false>(), kDtypes);
LLTM_EACH_CASE(SlowPersistent, CudaSequence, sequences<true>(), kSixteenBits);

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

// Below the operators.
class CudaEngine : public FormTest {
 protected:
  // Output, h_n, c_n and activations; a step has no output.
  Tensors forward(const Arguments& a) const {
    const lltm::SequenceArgs args = {engine_inputs(a), /*save=*/true};
    return as_list(lltm::cuda::sequence_forward(args));
  }
  Tensors backward(
      const Arguments& a,
      const Tensors& results,
      const Tensors& grads,
      const lltm::OutputMask& mask) const {
    lltm::SequenceBackwardArgs args = {
        engine_inputs(a), form_.step ? a.h : results[0], results[3], {}, grads[1], grads[2], mask};
    if (!form_.step) args.grad_output = grads[0];
    return as_list(lltm::cuda::sequence_backward(args));
  }
};
LLTM_EACH_CASE(CudaStep, CudaEngine, steps(), kDtypes);
LLTM_EACH_CASE(Cuda, CudaEngine, sequences<false>(), kDtypes);
LLTM_EACH_CASE(SlowPersistent, CudaEngine, sequences<true>(), kSixteenBits);

TEST_P(CudaEngine, ReadsOnlyInitializedMemory) {
  check_uninitialised_memory(form_.run, dense({4, 3, 5, form_.step ? 7 : 16})(1));
  if (!form_.step) check_uninitialised_memory(form_.run, packed({5, 4, 4, 1}, 3, 7)(1));
}

lltm::OutputMask all_of(const Arguments& a) {
  const bool apart = a.weight_hh.has_value();
  return {true, true, true, true, apart, true, apart};
}

TEST_P(CudaEngine, OnlyRequestedGradientsAreComputed) {
  const Arguments a = dense({4, 3, 5, 8})(1);
  const Tensors results = forward(a);
  const Tensors grads = random_like({results[form_.step ? 1 : 0], results[1], results[2]}, 2);
  const lltm::OutputMask all = all_of(a);
  const Tensors expected = backward(a, results, grads, all);
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
    const Tensors alone = backward(a, results, grads, one);
    const Tensors rest = backward(a, results, grads, others);
    for (size_t n = 0; n < expected.size(); ++n) {
      SCOPED_TRACE(testing::Message() << n << ", chosen by " << k);
      EXPECT_TRUE(identical(alone[n], n == k ? expected[n] : at::Tensor()));
      EXPECT_TRUE(identical(rest[n], n == k ? at::Tensor() : expected[n]));
    }
  }
}

// [W_hh, W_ih] or separate weights, with one bias.
TEST_P(CudaEngine, AConcatenatedMatrixGivesTheSameResults) {
  std::vector<Problem> problems = {dense({4, 3, 5, form_.step ? 7 : 8})};
  if (!form_.step) problems.push_back(packed({5, 4, 4, 1}, 3, 24));
  for (const Problem& problem : problems) {
    Arguments concatenated = problem(1), apart = problem(1);
    const int64_t hidden = apart.h.size(1);
    if (apart.weight_hh) {
      concatenated.weights = at::cat({*apart.weight_hh, apart.weights}, 1);
      concatenated.weight_hh = concatenated.bias_hh = apart.bias_hh = std::nullopt;
    } else {
      apart.weight_hh = concatenated.weights.slice(1, 0, hidden).contiguous();
      apart.weights = concatenated.weights.slice(1, hidden).contiguous();
    }
    const Tensors y = forward(concatenated);
    EXPECT_TRUE(identical(forward(apart), y));
    Tensors gradients = backward(apart, y, y, {true, true, true, true, true, true, false});
    gradients[3] = at::cat({std::exchange(gradients[4], at::Tensor()), gradients[3]}, 1);
    EXPECT_TRUE(identical(gradients, backward(concatenated, y, y, all_of(concatenated))));
  }
}

class CudaPerStep : public FormTest {
 protected:
  static lltm::SequenceResult forward(
      const Arguments& a, int64_t workspace_bytes = lltm::cuda::workspace_of_cache()) {
    return lltm::cuda::per_step_forward({engine_inputs(a), /*save=*/true}, workspace_bytes);
  }
};
LLTM_EACH_CASE(Cuda, CudaPerStep, sequences<false>(), kDtypes);

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
      const Tensors y = as_list(forward(a));
      const Calls in_forward = Calls::of([&] { forward(a); });
      const Calls in_backward = Calls::of([&] {
        lltm::cuda::per_step_backward({engine_inputs(a), y[0], y[3], y[0], y[1], y[1], all_of(a)});
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
          << argument_names(a)[k];
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
