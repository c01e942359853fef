// The CUDA engines' loops on the CPU, with the cuBLAS and the kernels of cuda_on_host.cpp and
// persistent_on_host.cpp: the same sources that run on a GPU, the same oracle. With the
// persistent engine, where it takes a problem; test_cuda_persistent.cpp has what is its own.
#include "cuda_engine_autograd.h"
#include "cuda_on_host.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

namespace lltm_test {
namespace {

// As users call it without gradients: nothing saved.
Tensors engine_inference(const Arguments& a) {
  const auto [output, h_n, c_n, activations] =
      lltm::cuda::sequence_forward(sequence_args(a, /*save=*/false));
  EXPECT_FALSE(activations.defined());
  return {output, h_n, c_n};
}

// ---- what holds of every form -----------------------------------------------

template <bool kPersistent>
std::shared_ptr<void> persistent() {
  return std::make_shared<PersistentSetting>(kPersistent);
}

// H is such that the persistent engine takes it in 16 bits.
const Form kCell = {
    .name = "cell",
    .run = engine_cell,
    .baseline = eager_cell,
    .step = true,
    .sizes = {1, 5, 3, 16}};
const Form kStepwise = {
    .name = "stepwise",
    .run = engine_sequence,
    .baseline = eager_sequence,
    .sizes = {3, 5, 9, 16},
    .setting = persistent<false>};
const Form kPersistent = {
    .name = "persistent",
    .run = engine_sequence,
    .baseline = eager_sequence,
    .sizes = {3, 5, 9, 16},
    .setting = persistent<true>};
const Form kCheckpointed = {
    .name = "checkpointed",
    .run = engine_checkpointed(2),
    .baseline = eager_sequence,
    .sizes = {3, 5, 9, 16},
    .positions = {kPositions.back()},
    .setting = persistent<false>};
// As users call it without gradients, which gives the same bits: nothing saved.
const Form kStepwiseInference = {
    .name = "stepwise inference",
    .run = engine_inference,
    .baseline = engine_sequence,
    .differentiable = false,
    .sizes = {3, 5, 9, 16},
    .setting = persistent<false>};
const Form kPersistentInference = {
    .name = "persistent inference",
    .run = engine_inference,
    .baseline = engine_sequence,
    .differentiable = false,
    .sizes = {3, 5, 9, 16},
    .setting = persistent<true>};
constexpr std::array<at::ScalarType, 2> kSixteenBits = {at::kBFloat16, at::kHalf};

INSTANTIATE_TEST_SUITE_P(CudaCell, Properties, each_case(kCell, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(CudaCell, GradientProperties, each_case(kCell, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(CudaCell, HostProperties, each_case(kCell, kDtypes), case_name);

INSTANTIATE_TEST_SUITE_P(Cuda, Properties, each_case(kStepwise, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Cuda, SequenceProperties, each_case(kStepwise, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Cuda, GradientProperties, each_case(kStepwise, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(Cuda, HostProperties, each_case(kStepwise, kDtypes), case_name);

INSTANTIATE_TEST_SUITE_P(
    CudaInference, Properties, each_case(kStepwiseInference, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    CudaInference, SequenceProperties, each_case(kStepwiseInference, kDtypes), case_name);

INSTANTIATE_TEST_SUITE_P(
    SlowCheckpointed, Properties, each_case(kCheckpointed, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowCheckpointed, SequenceProperties, each_case(kCheckpointed, kDtypes), case_name);

INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, Properties, each_case(kPersistent, kSixteenBits), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, SequenceProperties, each_case(kPersistent, kSixteenBits), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, GradientProperties, each_case(kPersistent, kSixteenBits), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, HostProperties, each_case(kPersistent, kSixteenBits), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistentInference, Properties, each_case(kPersistentInference, kSixteenBits), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistentInference,
    SequenceProperties,
    each_case(kPersistentInference, kSixteenBits),
    case_name);

// ---- a sequence -----------------------------------------------------------

class CudaEngineSequence : public FormTest {};

INSTANTIATE_TEST_SUITE_P(Cuda, CudaEngineSequence, each_case(kStepwise, kDtypes), case_name);
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent, CudaEngineSequence, each_case(kPersistent, kSixteenBits), case_name);

TEST_P(CudaEngineSequence, CheckpointedValuesAndGradientsMatchOracle) {
  for (const int64_t steps : {1, 3, 5, 100}) {
    SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
    for (const Problem& problem :
         {dense({10, 3, 5, 7}),
          dense({10, 3, 5, 7}, /*bias=*/false),
          packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 16)}) {
      lltm_test::check(engine_checkpointed(steps), eager_sequence, problem);
      const Arguments arguments = problem(1);
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(identical(engine_checkpointed(steps)(arguments), engine_inference(arguments)));
    }
  }
}

// Each step in a chunk of its own, some together, and all.
TEST_P(CudaEngineSequence, ASmallerWorkspaceGivesTheSame) {
  const bool persistent = lltm::cuda_persistent();
  const int64_t row = lltm::Lltm::kSlots * 8 * (dtype() == at::kDouble ? 8 : 4);
  for (const Arguments& a : {dense({9, 4, 3, 8})(1), packed({9, 7, 7, 3, 1}, 3, 8)(1)}) {
    const auto with_workspace = [&](int64_t bytes) {
      const lltm::SequenceArgs args = sequence_args(a, /*save=*/true);
      const auto [output, h_n, c_n, activations] = persistent
                                                       ? persistent_forward(args, bytes).value()
                                                       : lltm::cuda::stepwise_forward(args, bytes);
      return Tensors{output, h_n, c_n, activations};
    };
    const Tensors all = with_workspace(lltm::cuda::kWorkspaceBytes);
    for (const int64_t rows : {0, 4, 5, 8, 9, 20}) {
      EXPECT_TRUE(identical(with_workspace(rows * row), all)) << rows << " rows at a time";
    }
  }
}

// ---- what it asks of cuBLAS, and of ATen -------------------------------------

// What `body` calls: GEMMs, those of them that are not aligned, and ATen's operators.
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

// Whatever H and I are, the GEMM of a step is aligned and nothing is copied for it: with more
// steps there are more aligned GEMMs, and no other calls.
TEST_P(CudaEngineSequence, StepsTakeAlignedGemmsAndNoCopies) {
  for (const auto& [I, H] :
       {std::pair<int64_t, int64_t>{3, 8}, {4, 7}, {16, 7}, {3, 12}, {8, 16}}) {
    SCOPED_TRACE(testing::Message() << "I=" << I << " H=" << H);
    const auto calls = [&, I = I, H = H](int64_t steps) {
      const Arguments a = dense({steps, 5, I, H})(1);
      const auto [output, h_n, c_n, activations] =
          lltm::cuda::stepwise_forward(sequence_args(a, /*save=*/true));
      const Calls forward =
          Calls::of([&] { lltm::cuda::stepwise_forward(sequence_args(a, /*save=*/true)); });
      const Calls backward = Calls::of([&, output = output, h_n = h_n, activations = activations] {
        lltm::cuda::stepwise_backward(
            {sequence_args(a, /*save=*/true),
             output,
             activations,
             output,
             h_n,
             h_n,
             {true, true, true, true, false, true, false}});
      });
      return std::pair(forward, backward);
    };
    const auto [forward_3, backward_3] = calls(3);
    const auto [forward_30, backward_30] = calls(30);
    EXPECT_EQ(forward_30.gemms, forward_3.gemms + 27);
    EXPECT_EQ(forward_30.unaligned, forward_3.unaligned);
    EXPECT_EQ(forward_30.operators, forward_3.operators);
    EXPECT_EQ(backward_30.gemms, backward_3.gemms + 27);
    EXPECT_EQ(backward_30.unaligned, backward_3.unaligned);
    EXPECT_EQ(backward_30.operators, backward_3.operators);
    EXPECT_GT(forward_3.operators, 0);
    // Of all that forward multiplies, only an input of such rows is not ours to pad.
    if (I == 16) {
      EXPECT_EQ(forward_30.unaligned, 0);
    } else if (I == 3) {
      EXPECT_EQ(forward_30.unaligned, 1);
    }
  }
}

// One product over all rows would have several times the error that is allowed. Beside the rounded
// oracle: plain PyTorch has one product too, and on some CPUs MKL adds it up as badly.
class CudaEngineWeightGradients : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { sums_in_order = true; }
  void TearDown() override { sums_in_order = false; }

  static void check_gradients(
      const Function& ours_function, const Function& eager_function, const Arguments& a) {
    const Tensors gradients = random_like(eager_function(a), 2);
    const Evaluation ours = evaluate(ours_function, a, gradients);
    const Expected expected = expect(a, gradients);
    for (size_t k = 0; k < ours.gradients.size(); ++k) {
      const at::Tensor best = at::empty_like(ours.gradients[k], at::kDouble);
      std::copy(
          expected.gradients[k].data.begin(),
          expected.gradients[k].data.end(),
          best.mutable_data_ptr<double>());
      EXPECT_TRUE(
          is_accurate(ours.gradients[k], best.to(a.input.scalar_type()), expected.gradients[k]))
          << kArgumentNames[k];
    }
  }

 private:
  const PersistentSetting setting_{false};
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes, CudaEngineWeightGradients, testing::Values(at::kFloat), [](const auto& info) {
      return name(info.param);
    });
INSTANTIATE_TEST_SUITE_P(
    SlowDtypes,
    CudaEngineWeightGradients,
    testing::Values(at::kDouble, at::kHalf, at::kBFloat16),
    [](const auto& info) { return name(info.param); });

TEST_P(CudaEngineWeightGradients, AreAccurateOverManyRows) {
  check_gradients(
      engine_sequence, eager_sequence, sequence_problem({4, 25'000, 4, 4}, GetParam(), 1));
}

TEST_P(CudaEngineWeightGradients, OfSegmentsAreAccurateOverManyRows) {
  for (const int64_t steps : {1, 3}) {
    check_gradients(
        engine_checkpointed(steps),
        eager_sequence,
        sequence_problem({4, 25'000, 4, 4}, GetParam(), 1));
  }
}

TEST_P(CudaEngineWeightGradients, OfAStepAreAccurateOverManyRows) {
  check_gradients(engine_cell, eager_cell, cell_problem({1, 100'000, 4, 4}, GetParam(), 1));
}

// ---- TF32 ---------------------------------------------------------------------

TEST(CudaEngineTf32, ValuesAndGradientsMatchOracle) {
  const PersistentSetting stepwise(false);
  allow_tf32 = true;
  for (const bool reverse : {false, true}) {
    check(engine_sequence, eager_tf32_sequence, [&](uint64_t seed) {
      Arguments arguments = packed_problem({7, 6, 5, 5, 2, 1}, 3, 9, at::kFloat, seed);
      arguments.reverse = reverse;
      return arguments;
    });
    check(engine_sequence, eager_tf32_sequence, [&](uint64_t seed) {
      Arguments arguments = sequence_problem({5, 3, 5, 16}, at::kFloat, seed);
      arguments.reverse = reverse;
      return arguments;
    });
  }
  allow_tf32 = false;
}

// ---- more of a sequence -------------------------------------------------------

// As a layer with batch_first has it.
TEST_P(CudaEngineSequence, GradientsOfTheOutputMayLieBatchFirst) {
  for (const Sizes& sizes : {Sizes{4, 5, 3, 16}, Sizes{4, 5, 3, 7}}) {
    const Arguments arguments = dense(sizes)(1);
    const Tensors gradients = random_like(eager_sequence(arguments), 2);
    Tensors batch_first = gradients;
    batch_first[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1);
    ASSERT_FALSE(batch_first[0].is_contiguous());
    EXPECT_TRUE(identical(
        evaluate(engine_sequence, arguments, batch_first).gradients,
        evaluate(engine_sequence, arguments, gradients).gradients));
  }
}

TEST_P(CudaEngineSequence, ResetAndMaskedValuesAndGradientsMatchOracle) {
  for (const int64_t checkpoint_steps : {0, 2}) {
    lltm_test::check(engine_checkpointed(checkpoint_steps), eager_sequence, [&](uint64_t seed) {
      Arguments a = dense({6, 5, 3, 8})(seed);
      a.reset = random_reset(a, seed);
      a.recurrent_mask = random_mask(a, seed);
      return a;
    });
  }
}

}  // namespace
}  // namespace lltm_test
