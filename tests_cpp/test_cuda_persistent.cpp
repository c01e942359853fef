// The persistent CUDA engine and its kernels' PTX on the CPU (cuda_on_host.h), with random
// schedules. Each test checks that it was used.
#include "cell_arguments.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/embedded_kernels.h"
#include "cuda_on_host.h"
#include "op/bidirectional.h"
#include "op/operators.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

lltm::SequenceArgs forward_args(const Arguments& a) {
  return {engine_inputs(a), /*save=*/true};
}
Tensors forward(const Arguments& a, int64_t workspace_bytes = lltm::cuda::workspace_of_cache()) {
  const lltm::SequenceArgs args = forward_args(a);
  const auto plan = lltm::cuda::plan_persistent(args);
  return as_list(lltm::cuda::persistent_forward(args, plan, workspace_bytes).value());
}

// The output gradients are ones.
lltm::SequenceBackwardArgs backward_args(const Arguments& a, const Tensors& results) {
  const lltm::OutputMask mask = {true, true, true, true};
  return {engine_inputs(a), results[0], results[3], at::ones_like(results[0]), {}, {}, mask};
}
Tensors backward(const Arguments& a, const Tensors& results) {
  return as_list(lltm::cuda::sequence_backward(backward_args(a, results)));
}

Tensors all_of(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}
Evaluation evaluated(const Arguments& a, const Function& function = sequence) {
  return evaluate(function, a, random_gradients(a));
}
Evaluation per_step_evaluated(const Arguments& a) {
  const PersistentSetting per_step(false);
  return evaluated(a);
}

// Forward and backward of each call need `each` launches.
void check_persistent(const Problem& problem, int64_t each = 1, uint64_t problems = 1) {
  int64_t calls = 0;
  const Function counted = [&](const Arguments& a) {
    ++calls;
    return sequence(a);
  };
  const int64_t launched =
      launches([&] { lltm_test::check(counted, eager_sequence, problem, kRandom, problems); });
  EXPECT_EQ(launched, 2 * each * calls);
}

class PersistentEngine : public FormTest {
 protected:
  int64_t row_bytes() const {  // pre-activations, H = 24
    return lltm::find_cell(form_.cell)->x.count() * 24 * static_cast<int64_t>(sizeof(float));
  }
};

// float16 has the kernels of bfloat16, and is in the tests below.
constexpr std::array<at::ScalarType, 2> kTypes = {at::kBFloat16, at::kFloat};
const Form kForm = {
    .name = "", .run = sequence, .baseline = eager_sequence, .setting = persistent<true>};
LLTM_EACH_CASE(Cells, PersistentEngine, forms_of_cells(kForm), kTypes);

// Full and partial slices of units and tiles of rows; sequences that end inside a tile and at its
// end.
TEST_P(PersistentEngine, ValuesAndGradientsMatchOracle) {
  for (const Problem& problem :
       {dense({3, 1, 16, 8}),
        dense({7, 8, 3, 16}),
        dense({3, 17, 9, 40}),
        dense({5, 3, 4, 24}, /*bias=*/false),
        packed({5}, 3, 8),
        packed({9, 1, 1, 1}, 2, 16),
        packed(falling_lengths(19, 6), 3, 24),
        with_resets_and_mask(dense({6, 3, 5, 24})),
        with_resets_and_mask(packed({7, 6, 5, 4, 3, 2, 1}, 3, 24))}) {
    check_persistent(problem, 1, 2);
  }
}

// With 2 and 4 tiles, 3 and 2 groups run all rows concurrently. Larger batches need several
// launches, the last with fewer groups.
TEST_P(PersistentEngine, LargerBatchesUseMoreTilesAndThenMoreLaunches) {
  const Temporarily small(multiprocessors, int64_t{6});  // 2 slices each
  check_persistent(with_resets_and_mask(dense({3, 41, 3, 24})), 1, 2);
  check_persistent(dense({3, 77, 3, 24}));
  check_persistent(with_resets_and_mask(packed(falling_lengths(80, 4), 3, 24)), 1, 2);
  check_persistent(dense({3, 200, 3, 24}), /*each=*/3);
}

// As of layers with a large H.
TEST_P(PersistentEngine, WeightsInSharedMemoryMatchOracle) {
  const Temporarily shared(prefers_shared, true);
  check_persistent(with_resets_and_mask(dense({4, 9, 5, 200})), 1, 2);
  const Temporarily small(multiprocessors, int64_t{13});
  check_persistent(dense({3, 33, 3, 200}), /*each=*/2);
}

// Backward runs each segment as a call.
TEST_P(PersistentEngine, CheckpointsAreStatesBetweenSteps) {
  for (const Problem& problem :
       {dense({7, 9, 5, 24}),
        packed({7, 6, 6, 3, 1}, 3, 24),
        with_resets_and_mask(dense({7, 9, 5, 24}))}) {
    const Arguments a = problem(2);
    const at::Tensor output = sequence(a)[0];
    for (const int64_t steps : {1, 3, 7, 9}) {
      SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
      // A segment of 1 step uses the per-step engine.
      const int64_t segments = steps == 1 ? 0 : std::max<int64_t>(7 / steps, 1);
      const int64_t launched = launches(
          [&] { EXPECT_TRUE(identical(evaluated(a, checkpointed(steps)).outputs[0], output)); });
      EXPECT_EQ(launched, 1 + 2 * segments);
      lltm_test::check(checkpointed(steps), eager_sequence, problem);
    }
  }
}

TEST_P(PersistentEngine, ChunksGiveTheSameResultsAsASingleLaunch) {
  for (const Arguments& a :
       {dense({9, 11, 3, 24})(1), with_resets_and_mask(packed({9, 7, 7, 3, 1}, 3, 24))(2)}) {
    const Tensors all = forward(a);
    for (const int64_t rows : {0, 4, 5, 22, 23}) {
      Tensors chunks;
      EXPECT_GT(launches([&] { chunks = forward(a, rows * row_bytes()); }), 1);
      EXPECT_TRUE(identical(chunks, all)) << rows << " rows at a time";
    }
  }
}

TEST_P(PersistentEngine, ArgumentsMayHaveAnyAlignment) {
  const Layout shifted = {
      "", [](const at::Tensor& t) {
        return at::constant_pad_nd(t.flatten(), {1, 0}).slice(0, 1).view(t.sizes());
      }};
  const Arguments a = dense({3, 5, 0, 24})(1);
  EXPECT_TRUE(identical(evaluated(laid_out(a, shifted, form_.positions.back())), evaluated(a)));
}

// Most warps have a part of K: warps without element-wise work get one step ahead.
TEST_P(PersistentEngine, EveryScheduleIsBitwiseIdentical) {
  for (const Arguments& a :
       {dense({6, 7, 5, 200})(1), packed({7, 6, 6, 6, 3, 2, 2, 2, 2, 1}, 3, 40)(1)}) {
    const Temporarily seed(schedule_seed, uint64_t{1000});
    const Evaluation first = evaluated(a);
    for (int again = 0; again < 5; ++again) ASSERT_TRUE(identical(evaluated(a), first)) << again;
  }
}

// As in the per-step engine, without a deadlock. NaNs have all bits set, like an absent word.
// Infinities: TF32 has other arithmetic.
TEST_P(PersistentEngine, NaNsAndInfinitiesPropagate) {
  const double tolerance = 64 * epsilon(dtype());
  const Temporarily in_shared(prefers_shared, std::get<2>(GetParam()));
  for (const bool infinite : {false, true}) {
    if (infinite && dtype() != at::kFloat) continue;
    const Arguments clean = dense(infinite ? Sizes{3, 3, 4, 136} : Sizes{4, 9, 4, 24})(1);
    const Tensors tensors = differentiable(clean);
    const auto results = [&](const Tensors& inputs) {
      const auto end = inputs.begin() + static_cast<std::ptrdiff_t>(tensors.size());
      const auto [outputs, gradients] =
          evaluate(sequence, with(clean, {inputs.begin(), end}), {end, inputs.end()});
      return all_of(outputs, gradients);
    };
    const Tensors inputs = all_of(tensors, random_gradients(clean));
    for (size_t k = 0; k < inputs.size(); ++k) {
      const int64_t count = inputs[k].numel();
      bool has_nan = infinite;
      for (const int64_t position : {int64_t{0}, count / 2, count - 2}) {
        if (infinite && position != 0) continue;
        SCOPED_TRACE(testing::Message() << "argument or gradient " << k << " at " << position);
        Tensors replaced = inputs;
        replaced[k] = inputs[k].clone();
        const at::Tensor two = replaced[k].view(-1).slice(0, position, position + 2);
        infinite ? two.fill_(-std::numeric_limits<float>::infinity())
                 : two.view(at::kByte).fill_(0xFF);
        const Tensors ours = results(replaced);
        const PersistentSetting per_step(false);
        const Tensors theirs = results(replaced);
        for (size_t n = 0; n < ours.size(); ++n) {
          has_nan = has_nan || theirs[n].isnan().any().item<bool>();
          EXPECT_TRUE(at::allclose(ours[n], theirs[n], tolerance, tolerance, /*equal_nan=*/true))
              << n;
        }
      }
      EXPECT_TRUE(has_nan) << "argument or gradient " << k;
    }
  }
}

TEST(PersistentPlan, UnsupportedCallsHaveAReason) {
  struct Call {
    const char* why_not;
    Sizes sizes;
    at::ScalarType dtype = at::kHalf;
    int64_t multiprocessors = 132;
    bool training = true;
    int capability = 80;
  };
  const Temporarily little(shared_bytes, int64_t{99} << 10);
  for (const Call& call : std::vector<Call>{
           {nullptr, {3, 3, 4, 16}},
           {"dtype is float64", {3, 3, 4, 16}, at::kDouble},
           {"nothing to compute", {0, 3, 4, 16}},
           {"nothing to compute", {3, 0, 4, 16}},
           {"nothing to compute", {3, 3, 4, 0}},
           {"H is not a multiple of 8", {3, 3, 4, 20}},
           {"H is too large", {3, 1, 4, 2056}},
           {"too few steps", {2, 3, 4, 16}},
           {"too few steps", {1, 3, 4, 48}, at::kHalf, 132, /*training=*/false},
           {nullptr, {2, 3, 4, 48}, at::kHalf, 132, /*training=*/false},
           {nullptr, {3, 128, 4, 48}, at::kHalf, 3},
           {"B is too large", {3, 129, 4, 48}, at::kHalf, 3},
           {"too few thread blocks run concurrently on this device", {3, 3, 4, 56}, at::kHalf, 3},
           {nullptr, {3, 64, 4, 512}, at::kHalf, 32},
           {"B is too large", {3, 65, 4, 512}, at::kHalf, 32},
           {"compute capability is below 7.5", {3, 3, 4, 16}, at::kHalf, 132, true, 70},
           {nullptr, {3, 3, 4, 16}, at::kHalf, 132, true, 75},
           {"compute capability is below 8.0", {3, 3, 4, 16}, at::kFloat, 132, true, 75}}) {
    SCOPED_TRACE(testing::PrintToString(call.sizes));
    const Temporarily of_gpu(capability, call.capability);
    const Temporarily available(multiprocessors, call.multiprocessors);
    const Arguments a = sequence_problem(call.sizes, call.dtype, 1);
    EXPECT_STREQ(
        lltm::cuda::plan_persistent({engine_inputs(a), call.training}).why_not, call.why_not);
  }
}

TEST(PersistentPlan, RowsHave32Bits) {
  Arguments a = sequence_problem({3, 4096, 4, 16}, at::kHalf, 1);
  const auto why_not = [&](int64_t steps) {
    a.input = at::zeros({1, 1, 4}, at::kHalf).expand({steps, 4096, 4});
    return lltm::cuda::plan_persistent({engine_inputs(a), /*save=*/true}).why_not;
  };
  EXPECT_STREQ(why_not((1 << 19) - 1), nullptr);
  EXPECT_STREQ(why_not(1 << 19), "input has too many rows");
}

// In one stream they run in order. A graph's launches cannot wait for other work.
TEST(PersistentLaunch, WaitsForTheEarlierLaunchOfAnotherStream) {
  const PersistentSetting persistent(true);
  const Temporarily eager(lltm_test::capturing, false);
  const Arguments a = sequence_problem({3, 3, 4, 16}, at::kHalf, 1);
  int64_t streams[2];
  const auto waits_in = [&](int64_t& stream) {
    const int64_t before = event_waits;
    const Temporarily current(lltm_test::stream, static_cast<void*>(&stream));
    sequence(a);
    return event_waits - before;
  };
  waits_in(streams[0]);
  for (const int64_t waits : {0, 0}) EXPECT_EQ(waits_in(streams[0]), waits);
  for (const int64_t waits : {1, 0}) EXPECT_EQ(waits_in(streams[1]), waits);
  EXPECT_EQ(waits_in(streams[0]), 1);
  const Temporarily graph(lltm_test::capturing, true);
  EXPECT_EQ(waits_in(streams[1]), 0);
  lltm::cuda::forget_self_checks();
}

// ctest checks the printed engines, with LLTM_SCHEDULE set.
TEST(PersistentSchedule, EachCallReportsItsEngine) {
  const Arguments a = sequence_problem({3, 19, 4, 16}, at::kHalf, 1);
  const Temporarily small(multiprocessors, int64_t{2});
  const PersistentSetting persistent(true);
  EXPECT_EQ(launches([&] { evaluated(a); }), 2);
  const PersistentSetting per_step(false);
  sequence(a);
}

// A thread block's words of the first row never arrive, but the launch ends.
TEST(PersistentLaunch, AWordThatTimesOutIsNaNAndAnErrorOfTheNextCall) {
  const PersistentSetting persistent(true);
  Arguments a = sequence_problem({4, 2, 4, 48}, at::kHalf, 1);
  a.recurrent_mask = at::ones_like(a.h);  // not published: the output
  const Tensors results = forward(a);
  const auto check = [&](const auto& run) {
    at::Tensor nan;
    {
      // Enough polls for words that do appear, with a fixed schedule.
      const Temporarily few(most_polls, 30);
      const Temporarily seed(schedule_seed, uint64_t{1});
      const Temporarily first_row(
          lost, std::function([](int slice, int thread) { return slice == 1 && thread < 16; }));
      nan = run().isnan();
    }
    EXPECT_FALSE(nan.select(1, 1).any().item<bool>());
    {
      const Temporarily other(lltm_test::stream, static_cast<void*>(&nan));
      const Temporarily eager(lltm_test::capturing, false);
      run();
      lltm::cuda::forget_self_checks();
    }
    expect_error(
        run,
        kRuntimeError,
        "lltm::sequence: the persistent kernel timed out in an earlier call on this stream of cpu, "
        "and its results are NaN; set lltm.backends.cuda.persistent = False");
    run();
    return nan.select(1, 0);
  };
  const at::Tensor nan = check([&] { return sequence(a)[0]; });
  EXPECT_EQ(nan.sum().item<int64_t>(), 3 * 48) << "after the first step";
  EXPECT_TRUE(check([&] { return backward(a, results)[0]; }).all().item<bool>());
}

// Another stream may occupy multiprocessors longer than a lane polls.
TEST_P(PersistentEngine, BlocksMayStartLate) {
  const Arguments a = dense({4, 9, 3, 40})(1);
  const Evaluation expected = evaluated(a);
  const Temporarily late(late_rounds, 900);
  const Temporarily few(most_polls, 1000);  // more than until the late block's first word
  EXPECT_TRUE(identical(evaluated(a), expected));
  EXPECT_FALSE(lltm::cuda::take_failure(lltm::cuda::current_stream()));
}

// Short sequences wait for the host. A layer adds an operation for zero states.
TEST(PersistentOperations, ATrainingCallNeedsFew) {
  const PersistentSetting persistent(true);
  const auto expect_operations = [](const char* cell, int64_t in_forward, int64_t in_backward) {
    SCOPED_TRACE(cell);
    const Arguments a = sequence_problem({5, 3, 8, 24}, at::kHalf, 1, /*bias=*/true, cell);
    Tensors r;
    EXPECT_EQ(device_operations([&] { r = forward(a); }), in_forward);
    lltm::SequenceBackwardArgs args = backward_args(a, r);
    args.output_mask = {true, false, false, true, true, true, true};
    EXPECT_EQ(device_operations([&] { lltm::cuda::sequence_backward(args); }), in_backward);
  };
  expect_operations("lstm", 4, 9);
  expect_operations("gru", 5, 12);
  expect_operations("lltm", 5, 9);
}

// LLTM_CUDA_EMBED compiles all kernels that calls of a size launch.
TEST(EmbeddedKernels, AreAllThatCallsLaunch) {
  const Temporarily small(multiprocessors, int64_t{2});
  for (const char* const name : kCells) {
    const auto embedded = lltm::cuda::embedded_kernels(*lltm::find_cell(name), {16});
    for (const at::ScalarType dtype : kDtypes) {
      launched_forms.clear();
      const Arguments step = cell_problem({1, 3, 4, 16}, dtype, 1, /*bias=*/true, name);
      evaluate(cell, step, random_gradients(step));
      for (const int64_t batch : {3, 27, 40}) {
        const Arguments a = sequence_problem({3, batch, 4, 16}, dtype, 1, /*bias=*/true, name);
        for (const bool persistent : {false, true}) {
          const PersistentSetting setting(persistent);
          evaluated(a);
        }
        const lltm::SequenceArgs args = {operator_inputs(a)};
        lltm::sequences_side_by_side(args, args);
      }
      EXPECT_GE(launched_forms.size(), dtype == at::kDouble ? 2 : 8) << name << ' ' << dtype;
      for (const auto& form : launched_forms) {
        EXPECT_TRUE(embedded.contains(form)) << name << ' ' << dtype << ' ' << form.tiles;
      }
    }
  }
}

// The per-step engine computes all steps of forward or backward, even if a later launch fails.
TEST(PersistentLaunch, IfRejectedTheCallUsesThePerStepEngine) {
  for (const Arguments& a :
       {sequence_problem({3, 70, 4, 24}, at::kHalf, 1),
        packed_problem(falling_lengths(36, 5), 3, 24, at::kHalf, 1)}) {
    const Temporarily small(multiprocessors, int64_t{2});
    const PersistentSetting persistent(true);
    const int64_t all = launches([&] { evaluated(a); });
    EXPECT_GE(all, 4);
    const Evaluation per_step = per_step_evaluated(a);
    const Evaluation backward_per_step = evaluated(a, [](const Arguments& leaves) {
      const Tensors results = sequence(leaves);
      lltm::set_cuda_persistent(false);
      return results;
    });
    lltm::set_cuda_persistent(true);
    for (int64_t left = 0; left < all; ++left) {
      const Temporarily refused(launches_left, left);
      EXPECT_TRUE(identical(evaluated(a), left < all / 2 ? per_step : backward_per_step)) << left;
    }
  }
}

// The kernel passes its self-check.
template <typename Args>
void expect_checked(lltm::cuda::Engine engine, const Args& args) {
  const Temporarily checked(lltm_test::capturing, false);
  const auto plan = lltm::cuda::plan_persistent(args);
  EXPECT_EQ(lltm::cuda::why_not_kernels(*args.cell, args.input, engine, plan), nullptr);
}

// The largest size of each LLTM kernel, and just above the previous kernel's limit. test_nvrtc.cpp
// compiles the kernels of other cells.
class PersistentKernels : public testing::TestWithParam<std::tuple<int64_t, int>> {};
std::string kernel_name(const testing::TestParamInfo<PersistentKernels::ParamType>& info) {
  const auto [size, tiles] = info.param;
  return "H" + std::to_string(size) + "_tiles" + std::to_string(tiles);
}
const auto kTiles = testing::Values(1, 2, 4);
INSTANTIATE_TEST_SUITE_P(
    Sizes, PersistentKernels, testing::Combine(testing::Values(176, 264), kTiles), kernel_name);
INSTANTIATE_TEST_SUITE_P(
    SlowSizes,
    PersistentKernels,
    testing::Combine(testing::Values(256, 512, 520, 768, 776, 1024), kTiles),
    kernel_name);
INSTANTIATE_TEST_SUITE_P(
    SlowLargeSizes,
    PersistentKernels,
    testing::Combine(testing::Values(1032, 1288, 1536), testing::Values(1)),
    kernel_name);

TEST_P(PersistentKernels, ValuesAndGradientsMatchOracle) {
  const auto [hidden, tiles] = GetParam();
  const PersistentSetting persistent(true);
  const Temporarily one_group(multiprocessors, (hidden + 15) / 16);
  const at::ScalarType dtype = tiles == 2 ? at::kHalf : at::kBFloat16;
  const int64_t rows = tiles == 1 ? 1 : 4 * tiles + 1;
  const Sizes sizes = {3, rows, 64, hidden};
  const Problem problem = [&](uint64_t seed) { return sequence_problem(sizes, dtype, seed); };
  check_persistent(problem);
  const Arguments a = problem(1);
  expect_checked(lltm::cuda::Engine::persistent_forward, forward_args(a));
  expect_checked(lltm::cuda::Engine::persistent_backward, backward_args(a, forward(a)));
}

// A layer's two directions run in the same launches if both fit.
TEST(PersistentPair, ResultsAreBitwiseIdenticalToSeparateCalls) {
  const PersistentSetting persistent(true);
  const auto layer = [](bool concurrent, int64_t checkpoint_steps) -> Function {
    return [=](const Arguments& a) {
      Arguments other = a;
      other.weights = -a.weights;
      other.reverse = true;
      const lltm::SequenceArgs first = {operator_inputs(a, checkpoint_steps)};
      const lltm::SequenceArgs second = {operator_inputs(other, checkpoint_steps)};
      const auto [ours, others] = concurrent
                                      ? lltm::sequences_side_by_side(first, second)
                                      : std::pair(lltm::op::call(first), lltm::op::call(second));
      const auto results = [&](const lltm::SequenceOutputs& outputs) {
        Tensors all = as_list(outputs);
        if (!a.c.defined()) all.pop_back();
        return all;
      };
      return all_of(results(ours), results(others));
    };
  };
  const auto check = [&](const Arguments& a, int64_t steps, int64_t separate, int64_t both) {
    SCOPED_TRACE(testing::Message() << a.cell << ", checkpoint_steps " << steps);
    const Tensors gradients = all_of(random_gradients(a, 2), random_gradients(a, 3));
    Evaluation expected, ours;
    EXPECT_EQ(launches([&] { expected = evaluate(layer(false, steps), a, gradients); }), separate);
    EXPECT_EQ(launches([&] { ours = evaluate(layer(true, steps), a, gradients); }), both);
    EXPECT_TRUE(identical(ours, expected));
  };
  for (const char* cell : {"lltm", "lstm", "gru"}) {
    const Arguments dense = sequence_problem({7, 19, 3, 24}, at::kHalf, 1, /*bias=*/true, cell);
    // Two slices of each direction, with up to 32 rows.
    const Temporarily few(multiprocessors, int64_t{4});
    check(dense, 0, 4, 2);
    check(packed_problem(falling_lengths(19, 6), 3, 24, at::kHalf, 1, cell), 0, 4, 2);
    // Each recomputes segments of 4 and 3 steps.
    check(dense, 4, 10, 8);
    const Temporarily fewer(multiprocessors, int64_t{3});
    check(dense, 0, 4, 4);
  }
}

TEST(PersistentPair, FailuresAndTheSelfCheckConcernBothDirections) {
  const PersistentSetting persistent(true);
  const Arguments a = sequence_problem({3, 5, 4, 24}, at::kHalf, 1);
  const lltm::SequenceArgs args = {operator_inputs(a)};
  {
    const Temporarily checked(lltm_test::capturing, false);
    constexpr int64_t kOfCheck = 4;  // its steps
    EXPECT_EQ(launches([&] { lltm::sequences_side_by_side(args, args); }), kOfCheck + 1);
    lltm::cuda::forget_self_checks();
  }

  Arguments wrong = a;
  wrong.weights = wrong.weights.slice(1, 1);
  EXPECT_THROW(lltm::sequences_side_by_side(args, {operator_inputs(wrong)}), c10::Error);
  EXPECT_EQ(launches([&] { lltm::sequences_side_by_side(args, args); }), 1);
  const Temporarily refused(launches_left, int64_t{0});
  const auto [first, second] = lltm::sequences_side_by_side(args, args);
  const PersistentSetting per_step(false);
  EXPECT_TRUE(identical(std::get<0>(first), sequence(a)[0]));
  EXPECT_TRUE(identical(std::get<0>(second), sequence(a)[0]));
}

// More runs of equal steps than a launch supports. Small weights limit rounding errors.
class PersistentRuns : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(SlowDirections, PersistentRuns, testing::Bool());

TEST_P(PersistentRuns, BatchSizesMayChangeAtEveryStep) {
  constexpr int64_t kLengths = lltm::cuda::kMostRuns + 9;
  const PersistentSetting persistent(true);
  check_persistent(
      [](uint64_t seed) {
        Arguments a = packed_problem(falling_lengths(kLengths, kLengths), 16, 40, at::kHalf, seed);
        a.weights = a.weights * 0.25;
        a.reverse = GetParam();
        return a;
      },
      /*each=*/2);
}

// The largest floats round to infinity in TF32.
TEST(PersistentFloat32, TheLargestFloatsAreFinite) {
  Arguments a = sequence_problem({3, 9, 4, 136}, at::kFloat, 1, /*bias=*/true, "rnn_relu");
  a.h = at::full_like(a.h, 1e-30);
  a.weight_hh = a.weight_hh->detach().clone();
  a.weight_hh->select(1, 0).fill_(std::numeric_limits<float>::max());
  const auto run = [&](bool persistent) {
    const PersistentSetting setting(persistent);
    return sequence(a)[0][0];
  };
  EXPECT_TRUE(at::allclose(run(true), run(false)));
  EXPECT_TRUE(run(true).isfinite().all().item<bool>());
}

// TF32 has a thousand times the error. The per-step engine is more exact than on a GPU: GEMMs here
// sum in float64.
TEST(PersistentFloat32, ThePrecisionFollowsTheSettings) {
  const Arguments a = sequence_problem({20, 3, 4, 136}, at::kFloat, 1);
  const at::Tensor exact = expect(a, random_gradients(a)).outputs[0];
  const auto error = [&](std::optional<std::string> precision, int64_t expected_launches = 2) {
    lltm::set_cuda_float32(precision);
    Evaluation ours;
    EXPECT_EQ(launches([&] { ours = evaluated(a); }), expected_launches);
    lltm::set_cuda_float32(std::nullopt);
    return (ours.outputs[0].to(at::kDouble) - exact).abs().max().item<double>();
  };
  const double ieee = error("ieee", /*expected_launches=*/0);
  EXPECT_LT(error({}), 8 * ieee);
  EXPECT_LT(error("tf32x3"), 8 * ieee);
  EXPECT_GT(error("tf32"), 30 * ieee);
  const Temporarily allowed(allow_tf32, true);
  EXPECT_GT(error({}), 30 * ieee);
  EXPECT_LT(error("tf32x3"), 8 * ieee);
  EXPECT_LT(error("ieee", 0), 8 * ieee);
}

}  // namespace
}  // namespace lltm_test
