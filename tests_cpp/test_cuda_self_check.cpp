// The CUDA backend detects defective kernels (cuda/engine/self_check.h) and uses PyTorch operations
// instead.
#include "aten/fallback.h"
#include "cell_arguments.h"
#include "cell_program.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda_on_host.h"
#include "op/bidirectional.h"
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>

namespace lltm_test {

namespace {

// Starts and ends with working, unchecked kernels.
class CudaSelfChecks : public testing::Test {
 protected:
  CudaSelfChecks() { lltm_test::capturing = false; }
  ~CudaSelfChecks() override {
    fault = persistent_fault = Fault::none;
    has_fault = nullptr;
    multiprocessors = multiprocessors_;
    allow_tf32 = false;
    lltm_test::capturing = true;
    lltm::cuda::forget_self_checks();
  }

  static Tensors by_aten_fallback(const Arguments& a) {
    const auto [output, h_n, c_n, saved] =
        lltm::aten_fallback::sequence_forward({engine_inputs(a), /*save=*/false});
    return {output, h_n, c_n};
  }

 private:
  const int64_t multiprocessors_ = multiprocessors;
};
class CudaSelfCheck : public CudaSelfChecks, public testing::WithParamInterface<Fault> {};
INSTANTIATE_TEST_SUITE_P(
    Faults, CudaSelfCheck, testing::Values(Fault::wrong, Fault::fails), [](const auto& info) {
      return info.param == Fault::wrong ? "wrong" : "fails";
    });

Arguments problem(const char* cell, at::ScalarType dtype = at::kFloat) {
  return sequence_problem({5, 3, 4, 16}, dtype, 1, /*bias=*/true, cell);
}

TEST_P(CudaSelfCheck, TheAtenFallbackReplacesFailingKernels) {
  const at::NoGradGuard no_grad;
  const Arguments lstm = problem("lstm"), other = problem("lstm", at::kDouble);
  Warnings warnings;
  fault = GetParam();
  EXPECT_TRUE(identical(sequence(lstm), by_aten_fallback(lstm)));
  fault = Fault::none;
  EXPECT_TRUE(identical(sequence(lstm), by_aten_fallback(lstm)));
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_EQ(
      warnings.texts[0].find(
          "lltm: the sequence kernels of the cell lstm in Float failed the self-check on cpu and "
          "will not be used: "),
      0)
      << warnings.texts[0];
  // Other kernels are checked separately.
  fault = GetParam();
  sequence(other);
  EXPECT_EQ(warnings.texts.size(), 2);
}

// Gradients are correct with either fallback.
TEST_P(CudaSelfCheck, TrainingContinues) {
  Warnings warnings;
  fault = GetParam();
  check(sequence, eager_sequence, [](uint64_t) { return problem("gru", at::kDouble); });
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST_P(CudaSelfCheck, ThePerStepEngineReplacesTheFailingPersistentKernel) {
  const at::NoGradGuard no_grad;
  const PersistentSetting persistent(true);
  multiprocessors = 1;
  const Arguments one_tile = sequence_problem({2, 3, 4, 16}, at::kHalf, 1);
  const Arguments four_tiles = sequence_problem({3, 20, 4, 16}, at::kHalf, 1);
  const lltm::SequenceArgs args = {engine_inputs(four_tiles), /*save=*/true};
  const Tensors results = as_list(lltm::cuda::per_step_forward(args));
  const lltm::SequenceBackwardArgs backward_args = {
      args, results[0], results[3], at::ones_like(results[0]), {}, {}, {true, true, true}};
  const Tensors gradients = as_list(lltm::cuda::per_step_backward(backward_args));
  const auto run = [&] {
    EXPECT_TRUE(identical(as_list(lltm::cuda::sequence_forward(args)), results));
    EXPECT_TRUE(identical(as_list(lltm::cuda::sequence_backward(backward_args)), gradients));
  };
  Warnings warnings;
  persistent_fault = GetParam();
  has_fault = [](const LaunchKind& kind) { return kind.tiles == 4; };
  run();
  persistent_fault = Fault::none;
  EXPECT_EQ(launches(run), 0);
  EXPECT_EQ(launches([&] { sequence(one_tile); }), 1 + 1 + 4) << "with the check";
  ASSERT_EQ(warnings.texts.size(), 2);
  for (const auto& [k, direction] : {std::pair(0, "forward"), std::pair(1, "backward")}) {
    const std::string text = std::string("lltm: the persistent ") + direction +
                             " kernel of the cell lltm in Half failed the self-check";
    EXPECT_EQ(warnings.texts[k].find(text), 0) << warnings.texts[k];
  }
}

// In one kind of launch only; the usual call of the test has none of them.
struct PartlyFaulty {
  const char* name;
  std::function<bool(const LaunchKind&)> has_fault;
  int directions = 1, faults = 2;  // forward and backward
};
class CudaSelfCheckOfLaunches : public CudaSelfChecks,
                                public testing::WithParamInterface<PartlyFaulty> {};
INSTANTIATE_TEST_SUITE_P(
    Kinds,
    CudaSelfCheckOfLaunches,
    testing::Values(
        PartlyFaulty{"usual", [](const LaunchKind& k) { return !k.mask; }},
        PartlyFaulty{"mask", [](const LaunchKind& k) { return k.mask; }},
        PartlyFaulty{
            "reverse", [](const LaunchKind& k) { return k.mask && k.ascending == k.backward; }},
        PartlyFaulty{"checkpoints", [](const LaunchKind& k) { return k.checkpoints; }, 1, 1},
        PartlyFaulty{"later_steps", [](const LaunchKind& k) { return k.later; }},
        PartlyFaulty{"later_rows", [](const LaunchKind& k) { return k.later_rows; }},
        PartlyFaulty{"second_direction", [](const LaunchKind& k) { return k.second; }, 2},
        PartlyFaulty{"first_of_two", [](const LaunchKind& k) { return k.directions == 2; }, 2}),
    [](const auto& info) { return info.param.name; });

TEST_P(CudaSelfCheckOfLaunches, FindsTheFault) {
  const PersistentSetting persistent(true);
  Arguments a = requiring_grad(sequence_problem({3, 3, 4, 16}, at::kHalf, 1));
  persistent_fault = Fault::wrong;
  has_fault = GetParam().has_fault;
  Warnings warnings;
  if (GetParam().directions == 1) {
    evaluate(sequence, a, random_gradients(a));
  } else {
    const lltm::SequenceArgs args = {engine_inputs(a), /*save=*/true};
    const auto [first, second] = lltm::sequences_side_by_side(args, args);
  }
  EXPECT_EQ(warnings.texts.size(), GetParam().directions == 1 ? GetParam().faults : 1);
}

// Another process may have occupied the GPU.
TEST_F(CudaSelfChecks, ARejectedLaunchIsTriedAgainLater) {
  const at::NoGradGuard no_grad;
  const PersistentSetting persistent(true);
  const Arguments a = sequence_problem({3, 3, 4, 16}, at::kHalf, 1);
  {
    const Temporarily rejects(launches_left, int64_t{0});
    EXPECT_EQ(launches([&] { sequence(a); }), 0);
  }
  EXPECT_EQ(
      launches([&] {
        for (int call = 0; call < 100; ++call) sequence(a);
      }),
      0);
  EXPECT_GT(launches([&] { sequence(a); }), 1) << "with the check";
  EXPECT_EQ(launches([&] { sequence(a); }), 1);
}

TEST_F(CudaSelfChecks, EachPersistentKernelIsCheckedAtItsFirstUse) {
  const at::NoGradGuard no_grad;
  const PersistentSetting persistent(true);
  Warnings warnings;
  for (const auto& [rows, hidden, is_checked] :
       {std::tuple{3, 16, true},
        {3, 24, false},
        {3, 264, true},
        {5, 272, false},
        {65, 264, true},
        {67, 272, false}}) {
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat}) {
      const Arguments a = sequence_problem({2, rows, 4, hidden}, dtype, 1);
      const int64_t launched = launches([&] { sequence(a); });
      EXPECT_EQ(launched > 1, is_checked) << rows << " rows, H = " << hidden;
    }
  }
  EXPECT_TRUE(warnings.texts.empty());
}

TEST_F(CudaSelfChecks, Tf32IsAFaultUnlessAllowed) {
  const at::NoGradGuard no_grad;
  const PersistentSetting persistent(true);
  for (const char* name : kCells) {
    Warnings warnings;
    fault = Fault::tf32;
    for (const bool allowed : {true, false}) {
      allow_tf32 = allowed;
      sequence(problem(name));
      cell(cell_problem({1, 3, 4, 16}, at::kFloat, 1, /*bias=*/true, name));
      EXPECT_EQ(warnings.texts.size(), allowed ? 0 : 2) << name;
    }
    lltm::cuda::forget_self_checks();
    fault = Fault::none;
    persistent_fault = Fault::tf32;
    sequence(problem(name));
    EXPECT_EQ(warnings.texts.size(), 3) << name;
    persistent_fault = Fault::none;
  }
}

// Graph capture must not wait; the next call outside checks the kernels.
TEST_P(CudaSelfCheck, NothingIsCheckedInAGraph) {
  const at::NoGradGuard no_grad;
  const Arguments a = problem("lltm", at::kDouble);
  Warnings warnings;
  lltm_test::capturing = true;
  const int64_t before = gemm_calls;
  sequence(a);
  EXPECT_EQ(gemm_calls - before, 1 + 5) << "of this call alone";
  fault = GetParam();
  lltm_test::capturing = false;
  EXPECT_TRUE(identical(sequence(a), by_aten_fallback(a)));
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST_F(CudaSelfChecks, WorkingKernelsAreCheckedOnce) {
  const at::NoGradGuard no_grad;
  Warnings warnings;
  const PersistentSetting persistent(true);
  const auto gemms_of_calls = [&] {
    const int64_t before = gemm_calls;
    for (const at::ScalarType dtype : kDtypes) {
      for (const char* name : kCells) {
        sequence(problem(name, dtype));
        cell(cell_problem({1, 3, 4, 16}, dtype, 1, /*bias=*/true, name));
      }
    }
    return gemm_calls - before;
  };
  const int64_t with_checks = gemms_of_calls(), without = gemms_of_calls();
  EXPECT_GT(with_checks, without);
  EXPECT_EQ(gemms_of_calls(), without);
  EXPECT_TRUE(warnings.texts.empty()) << warnings.texts[0];
}

TEST_F(CudaSelfChecks, KernelsOfCustomCellsAreCheckedToo) {
  Warnings warnings;
  for (const std::string& text : kCellTexts) {
    if (text == kEveryText) continue;  // sin and cos use local memory, which ptx.h lacks
    const lltm::CellInfo& cell = *lltm::find_cell(text);
    for (const at::ScalarType dtype : kDtypes) {
      const at::Tensor like = at::empty({0}, dtype);
      for (const auto engine : {lltm::cuda::Engine::step, lltm::cuda::Engine::per_step}) {
        EXPECT_EQ(lltm::cuda::why_not_kernels(cell, like, engine), nullptr) << cell.title();
      }
    }
  }
  EXPECT_TRUE(warnings.texts.empty());
}

TEST_F(CudaSelfChecks, ChecksKernelsForHeads) {
  Arguments a = problem("gru");
  const auto random = [&](at::IntArrayRef sizes) {
    return random_like(at::empty(sizes, a.input.options()), 1);
  };
  a.cell = kDuoText;
  a.h = random({3, 32}), a.c = random({3, 64});
  a.weights = random({96, a.input.size(-1)}), a.weight_hh = random({2, 48, 16});
  a.bias = random({128}), a.bias_hh = random({96});
  Warnings warnings;
  a = requiring_grad(a);
  // The second call checks nothing.
  for (const bool is_checked : {true, false}) {
    const int64_t launched = launches([&] { evaluate(sequence, a, random_gradients(a)); });
    EXPECT_EQ(launched > 2, is_checked);
  }
  EXPECT_TRUE(warnings.texts.empty()) << warnings.texts[0];
}

// Of 5 steps with 3 stages.
Arguments staged_problem(at::ScalarType dtype = at::kFloat) {
  Arguments a = problem("gru", dtype);
  const auto random = [&](at::IntArrayRef sizes) {
    return random_like(at::empty(sizes, a.input.options()), 1);
  };
  a.cell = kStagedText;
  a.input = random({5, 3, 4 + 16});
  a.c = random({3, 16});
  a.weights = random({32, 4}), a.weight_hh = random({48, 16});
  a.bias = random({48}), a.bias_hh = random({48});
  return a;
}

TEST_P(CudaSelfCheck, TheAtenFallbackReplacesFailingStages) {
  const at::NoGradGuard no_grad;
  const Arguments a = staged_problem();
  Warnings warnings;
  const Tensors expected = by_aten_fallback(a);
  int64_t before = 0;
  for (const Fault of : {GetParam(), Fault::none}) {
    before = step_launches;
    fault = of;
    const Tensors ours = sequence(a);
    for (size_t k = 0; k < 2; ++k) EXPECT_TRUE(identical(ours[k], expected[k])) << k;
  }
  EXPECT_EQ(step_launches, before);
  ASSERT_EQ(warnings.texts.size(), 1);
  const std::string text =
      "lltm: the sequence kernels of the cell staged in Float failed the self-check on cpu and "
      "will not be used: ";
  EXPECT_EQ(warnings.texts[0].find(text), 0) << warnings.texts[0];
}

TEST_F(CudaSelfChecks, EachCellWithoutKernelsWarnsOnce) {
  const at::NoGradGuard no_grad;
  const Arguments built_in = problem("lstm");
  Warnings warnings;
  has_nvrtc = false;
  for (const int call : {0, 1}) {
    EXPECT_TRUE(identical(sequence(built_in), by_aten_fallback(built_in))) << call;
  }
  sequence(staged_problem());
  has_nvrtc = true;
  ASSERT_EQ(warnings.texts.size(), 2);
  EXPECT_EQ(
      warnings.texts[0],
      "lltm: on CPU, the cell lstm runs as PyTorch's operations, many times slower than kernels "
      "(NVRTC was not found: as the test says); see the page \"On a GPU\" in lltm's "
      "documentation");
}

}  // namespace
}  // namespace lltm_test
