// CUDA custom cells on the CPU (cuda_on_host.h), compared with the ATen fallback.
#include "cell_arguments.h"
#include "cell_program.h"
#include "common/operator_args.h"
#include "cuda/engine/engine.h"
#include "cuda_on_host.h"
#include "properties.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

// The baseline is the ATen fallback, the oracle the ATen fallback in float64.
void check_kernels(const Function& ours, const Problem& problem) {
  const Evaluator fallback = [&](const Arguments& a, const Tensors& grads) {
    has_nvrtc = false;
    Evaluation evaluation = evaluate(ours, a, grads);
    has_nvrtc = true;
    return evaluation;
  };
  const Evaluator oracle = [&](const Arguments& a, const Tensors& grads) {
    Arguments a64 = with(a, in_double(differentiable(a)));
    if (a.recurrent_mask) a64.recurrent_mask = a.recurrent_mask->to(at::kDouble);
    return fallback(a64, in_double(grads));
  };
  // A cell may have several states as output.
  const OutputGradients gradients = [&](const Arguments& a, uint64_t seed) {
    return random_like(ours(a), seed);
  };
  check(ours, fallback, oracle, problem, gradients);
}

// Serialized cell, dtype, reverse.
using CustomCase = std::tuple<std::string, at::ScalarType, bool>;

class CudaCustomCells : public testing::TestWithParam<CustomCase> {
 protected:
  enum class Weights { kTwoMatrices, kWithoutBias, kConcatenated, kHeads };
  static constexpr Weights kForms[] = {
      Weights::kTwoMatrices, Weights::kWithoutBias, Weights::kConcatenated, Weights::kHeads};

  const std::string& text() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  const lltm::CellInfo& cell() const { return *lltm::find_cell(text()); }

  Arguments for_cell(Arguments a, uint64_t seed, Weights form) const {
    const int64_t hidden = a.h.size(1), input = a.input.size(-1);
    const auto random = [&](at::IntArrayRef shape, double scale) {
      return random_like(at::empty(shape, a.input.options()), ++seed + 2000).mul(scale);
    };
    const double scale = 1 / std::sqrt(hidden);
    a.cell = text();
    a.reverse = std::get<2>(GetParam());
    // Positive: sLSTM divides by a state.
    a.c = cell().has_c() ? random({a.h.size(0), cell().states * hidden}, 1).abs() : at::Tensor();
    a.weights = random({cell().x.count() * hidden, input}, scale);
    a.weight_hh = random({cell().h.count() * hidden, hidden}, scale);
    if (form == Weights::kConcatenated) {
      a.weights = random({cell().concatenated_blocks() * hidden, hidden + input}, scale);
      a.weight_hh = std::nullopt;
    }
    if (form == Weights::kHeads && hidden % 4 == 0 && cell().h.count() > 0) {
      a.weight_hh = random({4, cell().h.count() * hidden / 4, hidden / 4}, 2 * scale);
    }
    const bool bias = form != Weights::kWithoutBias;
    a.bias = a.bias_hh = std::nullopt;
    if (bias || cell().parameters > 0) {
      a.bias = random({(cell().x.count() + cell().parameters) * hidden}, scale);
    }
    if (bias) a.bias_hh = random({cell().h.count() * hidden}, scale);
    if (cell().given > 0) {
      std::vector<int64_t> sizes = a.input.sizes().vec();
      sizes.back() = cell().given * hidden;
      a.input = at::cat({a.input, random(sizes, 1)}, -1);
    }
    return a;
  }
  Problem dense(const Sizes& sizes, Weights form = Weights::kTwoMatrices) const {
    return [=, this](uint64_t seed) {
      return for_cell(sequence_problem(sizes, dtype(), seed), seed, form);
    };
  }
  Problem packed(const std::vector<int64_t>& lengths, int64_t hidden) const {
    return [=, this](uint64_t seed) {
      return for_cell(
          packed_problem(lengths, 3, hidden, dtype(), seed), seed, Weights::kTwoMatrices);
    };
  }
};
class CudaCustomSteps : public CudaCustomCells {};

// Without kEveryText: rounding may change its comparisons. See test_cuda_elementwise.cpp.
std::vector<CustomCase> custom_cases(const std::vector<bool>& directions) {
  std::vector<CustomCase> cases;
  for (const std::string& text : given_cell_or({kDuoText, kAloneText, kStagedText})) {
    for (const at::ScalarType dtype : kDtypes) {
      // The oracle's dtype.
      if (dtype == at::kDouble && std::getenv("LLTM_TEST_CELL") != nullptr) continue;
      for (const bool reverse : directions) cases.emplace_back(text, dtype, reverse);
    }
  }
  return cases;
}
std::string custom_name(const testing::TestParamInfo<CustomCase>& info) {
  const auto& [text, dtype, reverse] = info.param;
  return lltm::find_cell(text)->title() + ("_" + name(dtype)) + (reverse ? "_reverse" : "");
}
INSTANTIATE_TEST_SUITE_P(
    Texts, CudaCustomCells, testing::ValuesIn(custom_cases({false, true})), custom_name);
INSTANTIATE_TEST_SUITE_P(
    Texts, CudaCustomSteps, testing::ValuesIn(custom_cases({false})), custom_name);

TEST_P(CudaCustomSteps, ValuesAndGradientsMatchTheAtenFallback) {
  for (const Weights form : kForms) {
    for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{1, 3, 5, 7}, Sizes{1, 5, 3, 16}}) {
      SCOPED_TRACE(testing::PrintToString(sizes));
      check_kernels(lltm_test::cell, [&](uint64_t seed) {
        return for_cell(cell_problem(sizes, dtype(), seed), seed, form);
      });
    }
  }
}

TEST_P(CudaCustomCells, ValuesAndGradientsMatchTheAtenFallback) {
  for (const Weights form : kForms) {
    for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}}) {
      SCOPED_TRACE(testing::PrintToString(sizes));
      for (const bool persistent : {false, true}) {
        const PersistentSetting setting(persistent);
        check_kernels(sequence, dense(sizes, form));
      }
    }
  }
}

// The other tests use it if H is a multiple of 8. Kernels with more tiles may need more registers.
TEST_P(CudaCustomCells, ThePersistentEngineComputesGroupsOfTiles) {
  const Temporarily small(multiprocessors, int64_t{6});
  const Problem problem = dense({4, 67, 3, 40});
  for (const int tiles : {1, 2, 4, 0}) {
    const Temporarily limit(tiles_without_spills, tiles);
    const int64_t before = persistent_launches;
    check_kernels(sequence, problem);
    // With fewer tiles, B is too large.
    const bool supports = cell().is_element_wise() && cell().h.count() > 0;
    const bool runs = supports && dtype() != at::kDouble && tiles >= 2;
    EXPECT_EQ(persistent_launches > before, runs) << tiles;
  }
}

TEST_P(CudaCustomCells, HeadsMatchTheAtenFallback) {
  // Heads in float64 run as a stage, like products, which the staged cell has.
  const bool persistent = cell().is_element_wise() && dtype() != at::kDouble;
  if (cell().h.count() == 0 || (cell().is_element_wise() && !persistent)) return;
  struct Case {
    int64_t hidden, heads;
  };
  // Heads of a slice, of two, and of half a slice.
  for (const Case& of : {Case{48, 3}, Case{64, 2}, Case{24, 3}}) {
    const int64_t hidden = of.hidden, heads = of.heads;
    SCOPED_TRACE(heads);
    const auto with_heads = [=, this](const Problem& problem) -> Problem {
      return [=, this](uint64_t seed) {
        Arguments a = problem(seed);
        const int64_t units = hidden / heads;
        a.weight_hh =
            a.weight_hh->narrow(1, 0, units).reshape({heads, cell().h.count() * units, units});
        return a;
      };
    };
    for (const Problem& problem : {dense({5, 9, 3, hidden}), packed({7, 6, 5, 2, 1}, hidden)}) {
      const int64_t before = persistent_launches;
      check_kernels(sequence, with_resets_and_mask(with_heads(problem)));
      EXPECT_EQ(persistent_launches > before, persistent);
    }
  }
}

TEST_P(CudaCustomCells, ResetsMasksAndCheckpointsMatchTheAtenFallback) {
  for (const Problem& problem : {dense({10, 3, 5, 7}), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 16)}) {
    check_kernels(sequence, with_resets_and_mask(problem));
    for (const int64_t steps : {1, 3}) {
      check_kernels(checkpointed(steps), with_resets_and_mask(problem));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(identical(checkpointed(steps)(problem(1)), sequence(problem(1))));
    }
  }
}

// test_cuda_build.py compares the printed numbers.
TEST_P(CudaCustomSteps, OperationsOfStages) {
  if (dtype() != at::kFloat || cell().outputs > 0) return;
  const auto form = cell().is_element_wise() ? Weights::kHeads : Weights::kTwoMatrices;
  const auto count = [&](int64_t steps) {
    const Arguments a = dense({steps, 3, 4, 16}, form)(1);
    const lltm::SequenceArgs args = {engine_inputs(a), /*save=*/true};
    Tensors r;
    const int64_t in_forward =
        device_operations([&] { r = as_list(lltm::cuda::per_step_forward(args)); });
    const at::Tensor ones = at::ones_like(r[0]);
    const lltm::SequenceBackwardArgs backward = {
        args, r[0], r[3], ones, {}, {}, {true, false, false, true, true, true, true}};
    const int64_t in_backward = device_operations([&] { lltm::cuda::per_step_backward(backward); });
    return std::pair(in_forward, in_backward);
  };
  const auto few = count(4), more = count(5);
  const int64_t in_forward = more.first - few.first, in_backward = more.second - few.second;
  std::cout << "operations: " << in_forward << ' ' << in_backward << '\n';
  if (text() == kStagedText) {
    EXPECT_EQ(in_forward, 6);
    EXPECT_EQ(in_backward, 6);
  }
}

TEST_P(CudaCustomCells, ReadsOnlyInitializedMemory) {
  check_uninitialised_memory(sequence, dense({4, 3, 5, 7})(1));
}
TEST_P(CudaCustomSteps, ReadOnlyInitializedMemory) {
  check_uninitialised_memory(
      lltm_test::cell, for_cell(cell_problem({1, 3, 5, 7}, dtype(), 1), 1, Weights::kTwoMatrices));
}

TEST_P(CudaCustomSteps, OnlyRequestedGradientsAreComputed) {
  const Arguments a = dense({4, 3, 5, 8})(1);
  const Tensors all = evaluate(sequence, a, random_like(sequence(a), 1)).gradients;
  for (size_t k = 0; k < all.size(); ++k) {
    Tensors leaves = differentiable(a);
    leaves[k] = leaves[k].detach().requires_grad_();
    const Tensors outputs = sequence(with(a, leaves));
    const at::Tensor one = torch::autograd::grad(
        outputs, {leaves[k]}, random_like(sequence(a), 1), {}, false, /*allow_unused=*/true)[0];
    EXPECT_TRUE(identical(one, all[k])) << argument_names(a)[k];
  }
}

}  // namespace
}  // namespace lltm_test
