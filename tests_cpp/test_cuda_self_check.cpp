// The CUDA backend detects defective kernels (cuda/engine/self_check.h) and uses PyTorch operations
// instead.
#include "cell_arguments.h"
#include "cell_program.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda_on_host.h"
#include "op/aten_fallback.h"
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <tuple>
#include <vector>

namespace lltm_test {

void check_kernels_now() {
  using lltm::cuda::Engine;
  for (const char* name : kCells) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const Engine engine : {Engine::step, Engine::per_step, Engine::persistent}) {
        const at::Tensor like = at::empty({0}, dtype);
        lltm::cuda::why_not_kernels(*lltm::find_cell(name), like, engine);
      }
    }
  }
}

namespace {

struct CheckedKernels : testing::Environment {
  void SetUp() override { check_kernels_now(); }
};
const auto* const kCheckedKernels = testing::AddGlobalTestEnvironment(new CheckedKernels);

// Starts and ends with working, unchecked kernels.
class CudaSelfCheck : public testing::TestWithParam<Fault> {
 protected:
  CudaSelfCheck() { lltm::cuda::forget_self_checks(); }
  ~CudaSelfCheck() override {
    fault = persistent_fault = Fault::none;
    c10::cuda::capturing = false;
    lltm::cuda::forget_self_checks();
    check_kernels_now();
  }

  static Tensors by_aten_fallback(const Arguments& a) {
    const auto [output, h_n, c_n, saved] =
        lltm::aten_fallback::sequence_forward({engine_inputs(a), /*save=*/false});
    return {output, h_n, c_n};
  }
};
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
          "lltm: the sequence kernels of the cell lstm in Float failed their self-check on cpu and "
          "are disabled: "),
      0)
      << warnings.texts[0];
  // Other kernels are checked separately.
  fault = GetParam();
  sequence(other);
  EXPECT_EQ(warnings.texts.size(), 2);
}

TEST_P(CudaSelfCheck, AStepIsCheckedSeparately) {
  const at::NoGradGuard no_grad;
  const Arguments a = cell_problem({1, 3, 4, 16}, at::kFloat, 1);
  Warnings warnings;
  sequence(problem("lltm"));
  EXPECT_TRUE(warnings.texts.empty());
  fault = GetParam();
  const Tensors expected = by_aten_fallback(a);
  EXPECT_TRUE(identical(cell(a), {expected[1], expected[2]}));
  EXPECT_EQ(warnings.texts.size(), 1);
}

// Gradients are correct with either fallback.
TEST_P(CudaSelfCheck, TrainingContinues) {
  Warnings warnings;
  fault = GetParam();
  check(sequence, eager_sequence, [](uint64_t) { return problem("gru", at::kDouble); });
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST_P(CudaSelfCheck, ThePerStepEngineReplacesFailingPersistentKernels) {
  const at::NoGradGuard no_grad;
  const Arguments a = problem("lltm", at::kHalf);
  const PersistentSetting off(false);
  const Tensors per_step = sequence(a);
  const PersistentSetting persistent(true);
  Warnings warnings;
  persistent_fault = GetParam();
  const int64_t before = persistent_launches;
  EXPECT_TRUE(identical(sequence(a), per_step));
  const int64_t of_check = persistent_launches - before;
  persistent_fault = Fault::none;
  EXPECT_TRUE(identical(sequence(a), per_step));
  EXPECT_EQ(persistent_launches - before, of_check);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_EQ(warnings.texts[0].find("lltm: the persistent kernels of the cell lltm in Half"), 0);
}

// Graph capture must not wait; the next call outside checks the kernels.
TEST_P(CudaSelfCheck, NothingIsCheckedInAGraph) {
  const at::NoGradGuard no_grad;
  const Arguments a = problem("lltm");
  Warnings warnings;
  c10::cuda::capturing = true;
  const int64_t before = gemm_calls;
  sequence(a);
  EXPECT_EQ(gemm_calls - before, 1 + 5) << "of this call alone";
  fault = GetParam();
  c10::cuda::capturing = false;
  EXPECT_TRUE(identical(sequence(a), by_aten_fallback(a)));
  EXPECT_EQ(warnings.texts.size(), 1);
}

TEST(CudaSelfChecks, WorkingKernelsAreCheckedOnce) {
  lltm::cuda::forget_self_checks();
  const at::NoGradGuard no_grad;
  Warnings warnings;
  const PersistentSetting persistent(true);
  const auto calls = [&] {
    for (const at::ScalarType dtype : kDtypes) {
      for (const char* name : kCells) {
        sequence(problem(name, dtype));
        cell(cell_problem({1, 3, 4, 16}, dtype, 1, /*bias=*/true, name));
      }
    }
  };
  const auto gemms_of = [&] {
    const int64_t before = gemm_calls;
    calls();
    return gemm_calls - before;
  };
  const int64_t with_checks = gemms_of(), without = gemms_of();
  EXPECT_GT(with_checks, without);
  EXPECT_EQ(gemms_of(), without);
  EXPECT_TRUE(warnings.texts.empty()) << warnings.texts[0];
}

TEST(CudaSelfChecks, KernelsOfCustomCellsAreCheckedToo) {
  Warnings warnings;
  for (const std::string& text : kCellTexts) {
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

TEST(CudaSelfChecks, EachCellWithoutKernelsWarnsOnce) {
  const at::NoGradGuard no_grad;
  Arguments a = problem("gru");
  a.weights = at::ones({16, 4}), a.weight_hh = at::ones({16, 16});
  a.bias = a.bias_hh = at::ones({16});
  Warnings warnings;
  for (const std::string name : {"averaged", "other"}) {
    const std::string text =
        "lltm-cell 2\nname " + name +
        "\nweight_ih n\nweight_hh n\nforward\nm = mean z.n\nh' = tanh m\nsave h'\nbackward\n"
        "s = multiply h' h'\ng = subtract 1.0 s\ndm = multiply d.h' g\nd.z.n = mean dm\nend\n";
    a.cell = text;
    sequence(a);
    sequence(a);
  }
  ASSERT_EQ(warnings.texts.size(), 2);
  EXPECT_EQ(
      warnings.texts[0],
      "lltm: on CPU, the cell averaged runs as PyTorch's operations, many times slower than "
      "kernels (products, means, given gates, heads or states as output); see the page \"On a "
      "GPU\" in lltm's documentation");
}

}  // namespace
}  // namespace lltm_test
