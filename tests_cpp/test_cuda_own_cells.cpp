// Cells that users have written by the CUDA engines, on the CPU: the pages that are printed for
// NVRTC, compiled by the host's compiler, against the library's CPU engines, which execute the
// programs.
#include "cell_program.h"
#include "cuda_engine_autograd.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

// A text, a dtype, and reversed or not.
using OwnCase = std::tuple<std::string, at::ScalarType, bool>;

class CudaOwnCells : public testing::TestWithParam<OwnCase> {
 protected:
  enum class Form { kTwoMatrices, kWithoutBias, kJoined };

  const std::string& text() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  const lltm::CellInfo& cell() const { return *lltm::find_cell(text()); }

  // The problem with states and parameters of the cell in the place of the LLTM's.
  Arguments for_cell(Arguments a, uint64_t seed, Form form) const {
    const int64_t hidden = a.h.size(1), input = a.input.size(-1);
    const auto random = [&](at::IntArrayRef shape, double scale) {
      return random_like(at::empty(shape, a.input.options()), ++seed + 2000).mul(scale);
    };
    const double scale = 1 / std::sqrt(hidden);
    a.cell = text();
    a.reverse = std::get<2>(GetParam());
    a.c = cell().has_c() ? random({a.h.size(0), cell().states * hidden}, 1) : at::Tensor();
    a.weights = random({cell().x.count() * hidden, input}, scale);
    a.weight_hh = random({cell().h.count() * hidden, hidden}, scale);
    if (form == Form::kJoined) {
      a.weights = random({cell().joined_blocks() * hidden, hidden + input}, scale);
      a.weight_hh = std::nullopt;
    }
    const bool bias = form != Form::kWithoutBias;
    a.bias = a.bias_hh = std::nullopt;
    if (bias || cell().parameters > 0) {
      a.bias = random({(cell().x.count() + cell().parameters) * hidden}, scale);
    }
    if (bias) a.bias_hh = random({cell().h.count() * hidden}, scale);
    return a;
  }
  Problem dense(const Sizes& sizes, Form form = Form::kTwoMatrices) const {
    return [=, this](uint64_t seed) {
      return for_cell(sequence_problem(sizes, dtype(), seed), seed, form);
    };
  }
  Problem packed(const std::vector<int64_t>& lengths, int64_t hidden) const {
    return [=, this](uint64_t seed) {
      return for_cell(packed_problem(lengths, 3, hidden, dtype(), seed), seed, Form::kTwoMatrices);
    };
  }
  static Problem with_reset(const Problem& problem) {
    return [=](uint64_t seed) {
      Arguments a = problem(seed);
      a.reset = random_reset(a, seed);
      a.recurrent_mask = random_mask(a, seed);
      return a;
    };
  }

  static CellArguments arguments_of(const Arguments& a, int64_t checkpoint_steps = 0) {
    return {
        std::string(a.cell),
        a.input,
        a.h,
        lltm::or_nullopt(a.c),
        a.weights,
        a.weight_hh,
        a.bias,
        a.bias_hh,
        a.batch_sizes,
        a.reverse,
        checkpoint_steps,
        a.reset,
        a.recurrent_mask};
  }
  static Tensors ours(const Arguments& a) { return run_sequence(arguments_of(a)); }
  static Tensors one_step(const Arguments& a) { return run_step(arguments_of(a)); }
};
class CudaOwnSteps : public CudaOwnCells {};

// The last one decides by comparisons, which rounding may change: test_cuda_elementwise.cpp has it.
std::vector<OwnCase> own_cases(const std::vector<bool>& directions) {
  std::vector<OwnCase> cases;
  for (const std::string& text : kCellTexts) {
    for (const at::ScalarType dtype : kDtypes) {
      if (text == kEveryText) continue;
      for (const bool reverse : directions) cases.emplace_back(text, dtype, reverse);
    }
  }
  return cases;
}
std::string own_name(const testing::TestParamInfo<OwnCase>& info) {
  const auto& [text, dtype, reverse] = info.param;
  return lltm::find_cell(text)->title() + ("_" + name(dtype)) + (reverse ? "_reverse" : "");
}
INSTANTIATE_TEST_SUITE_P(
    Texts, CudaOwnCells, testing::ValuesIn(own_cases({false, true})), own_name);
INSTANTIATE_TEST_SUITE_P(Texts, CudaOwnSteps, testing::ValuesIn(own_cases({false})), own_name);

TEST_P(CudaOwnSteps, ValuesAndGradientsMatchTheCpu) {
  for (const Form form : {Form::kTwoMatrices, Form::kWithoutBias, Form::kJoined}) {
    for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{1, 3, 5, 7}, Sizes{1, 5, 3, 16}}) {
      SCOPED_TRACE(testing::PrintToString(sizes));
      check_against(one_step, lltm_test::cell, [&](uint64_t seed) {
        return for_cell(cell_problem(sizes, dtype(), seed), seed, form);
      });
    }
  }
}

TEST_P(CudaOwnCells, ValuesAndGradientsMatchTheCpu) {
  for (const Form form : {Form::kTwoMatrices, Form::kWithoutBias, Form::kJoined}) {
    for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}}) {
      SCOPED_TRACE(testing::PrintToString(sizes));
      check_against(ours, sequence, dense(sizes, form));
    }
  }
}

TEST_P(CudaOwnCells, PackedValuesAndGradientsMatchTheCpu) {
  for (const int64_t hidden : {7, 16}) {
    check_against(ours, sequence, packed({7, 6, 5, 4, 3, 2, 1}, hidden));
  }
}

TEST_P(CudaOwnCells, ResetsMasksAndCheckpointsMatchTheCpu) {
  for (const Problem& problem : {dense({10, 3, 5, 7}), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 16)}) {
    check_against(ours, sequence, with_reset(problem));
    for (const int64_t steps : {1, 3}) {
      const Function checkpointed = [=](const Arguments& a) {
        return run_sequence(arguments_of(a, steps));
      };
      check_against(checkpointed, sequence, with_reset(problem));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(identical(checkpointed(problem(1)), ours(problem(1))));
    }
  }
}

TEST_P(CudaOwnCells, NoMoreIsReadThanWasWritten) {
  check_uninitialised_memory(ours, dense({4, 3, 5, 7})(1));
}
TEST_P(CudaOwnSteps, NoMoreIsReadThanWasWritten) {
  check_uninitialised_memory(
      one_step, for_cell(cell_problem({1, 3, 5, 7}, dtype(), 1), 1, Form::kTwoMatrices));
}

TEST_P(CudaOwnSteps, OnlyWantedGradientsAreComputed) {
  const Arguments a = dense({4, 3, 5, 8})(1);
  const Tensors all = evaluate(ours, a, random_like(ours(a), 1)).gradients;
  for (size_t k = 0; k < all.size(); ++k) {
    Tensors leaves = differentiable(a);
    leaves[k] = leaves[k].detach().requires_grad_();
    const Tensors outputs = ours(with(a, leaves));
    const at::Tensor one = torch::autograd::grad(
        outputs, {leaves[k]}, random_like(ours(a), 1), {}, false, /*allow_unused=*/true)[0];
    EXPECT_TRUE(identical(one, all[k])) << argument_names(a)[k];
  }
}

}  // namespace
}  // namespace lltm_test
