// The LSTM and the GRU by the CUDA engine, on the CPU, against torch's in float64. What holds of
// the engine whatever the cell is in test_cuda_engine.cpp, with the LLTM.
#include "cell/cells.h"
#include "cuda_engine_autograd.h"
#include "cuda_on_host.h"
#include "op/backend.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

// ---- torch's ------------------------------------------------------------------

// In a problem (testing.h) `weights` are [W_hh, W_ih] (G * H, H + I), and `bias` is [b_ih, b_hh]
// (2 * G * H) or, of the joined form, b_ih.
struct Parameters {
  at::Tensor w_ih, w_hh;
  OptionalTensor b_ih = {}, b_hh = {};
};

Parameters parameters(const Arguments& a) {
  const int64_t hidden = a.h.size(1), rows = a.weights.size(0);
  Parameters p = {
      a.weights.slice(1, hidden).contiguous(), a.weights.slice(1, 0, hidden).contiguous()};
  if (a.bias) {
    p.b_ih = a.bias->slice(0, 0, rows);
    p.b_hh = a.bias->size(0) > rows ? a.bias->slice(0, rows) : at::zeros_like(*p.b_ih);
  }
  return p;
}

Tensors torch_step(const std::string& cell, const Arguments& a) {
  const auto [w_ih, w_hh, b_ih, b_hh] = parameters(a);
  if (cell == "gru") return {at::gru_cell(a.input, a.h, w_ih, w_hh, b_ih, b_hh)};
  const auto [h, c] = at::lstm_cell(a.input, {a.h, a.c}, w_ih, w_hh, b_ih, b_hh);
  return {h, c};
}

// torch has the reverse direction only beside the forward one, which here has zero weights.
Tensors torch_sequence(const std::string& cell, const Arguments& a) {
  const auto [w_ih, w_hh, b_ih, b_hh] = parameters(a);
  const auto with_forward = [&](const at::Tensor& tensor) {
    return a.reverse ? at::stack({at::zeros_like(tensor), tensor}) : tensor.unsqueeze(0);
  };
  Tensors own = {w_ih, w_hh}, weights;
  if (a.bias) own.insert(own.end(), {*b_ih, *b_hh});
  if (a.reverse) {
    for (const at::Tensor& parameter : own) weights.push_back(at::zeros_like(parameter));
  }
  weights.insert(weights.end(), own.begin(), own.end());
  const at::Tensor h_0 = with_forward(a.h), c_0 = with_forward(a.c);
  const bool bias = a.bias.has_value(), both = a.reverse;
  Tensors results;
  const auto append = [&](const auto&... tensors) { results = {tensors...}; };
  if (cell == "gru") {
    std::apply(
        append,
        a.batch_sizes ? at::gru(a.input, *a.batch_sizes, h_0, weights, bias, 1, 0.0, false, both)
                      : at::gru(a.input, h_0, weights, bias, 1, 0.0, false, both, false));
  } else {
    const Tensors state = {h_0, c_0};
    std::apply(
        append,
        a.batch_sizes ? at::lstm(a.input, *a.batch_sizes, state, weights, bias, 1, 0.0, false, both)
                      : at::lstm(a.input, state, weights, bias, 1, 0.0, false, both, false));
  }
  results[0] = results[0].slice(-1, both ? a.h.size(1) : 0).contiguous();
  for (size_t k = 1; k < results.size(); ++k) results[k] = results[k][-1];
  return results;
}

// The problem with separate parameters.
Arguments steps_of(const std::string& cell, const Arguments& a) {
  const auto [w_ih, w_hh, b_ih, b_hh] = parameters(a);
  Arguments of_cell = a;
  of_cell.cell = cell;
  of_cell.weights = w_ih;
  of_cell.weight_hh = w_hh;
  of_cell.bias = b_ih;
  of_cell.bias_hh = b_hh;
  if (cell == "gru") of_cell.c = at::Tensor();
  return of_cell;
}

// The same step by step, with resets; and with matrix products as of TF32.
Tensors torch_steps(const std::string& cell, const Arguments& a) {
  return eager_sequence(steps_of(cell, a));
}
Tensors tf32_steps(const std::string& cell, const Arguments& a) {
  return eager_tf32_sequence(steps_of(cell, a));
}

// ---- ours -----------------------------------------------------------------------

// One bias goes with joined weights, as the two matrices go with two. A cell without c gets none.
CellArguments arguments_of(
    const std::string& cell, const Arguments& a, bool joined, int64_t checkpoint_steps = 0) {
  const auto [w_ih, w_hh, b_ih, b_hh] = parameters(a);
  CellArguments of_cell = {cell, a.input, a.h, a.c, w_ih, w_hh, b_ih, b_hh, a.batch_sizes};
  if (cell == "gru") of_cell.c = std::nullopt;
  if (joined) {
    of_cell.weight_ih = a.weights;
    of_cell.weight_hh = of_cell.bias_hh = std::nullopt;
  }
  of_cell.reverse = a.reverse;
  of_cell.checkpoint_steps = checkpoint_steps;
  of_cell.reset = a.reset;
  of_cell.recurrent_mask = a.recurrent_mask;
  return of_cell;
}

// Of a cell, a dtype, and reversed or not.
class CudaCells : public testing::TestWithParam<std::tuple<const char*, at::ScalarType, bool>> {
 protected:
  std::string cell() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  bool reverse() const { return std::get<2>(GetParam()); }

  // The problem with parameters of the cell in the place of the LLTM's.
  Arguments for_cell(Arguments a, uint64_t seed, bool joined) const {
    const int64_t hidden = a.h.size(1);
    const int64_t rows = lltm::find_cell(cell())->x.count() * hidden;
    const auto random = [&](at::IntArrayRef shape, uint64_t seed) {
      return random_like(at::empty(shape, a.input.options()), seed).div(std::sqrt(hidden));
    };
    a.weights = random({rows, a.weights.size(1)}, seed + 2000);
    if (a.bias) a.bias = random({joined ? rows : 2 * rows}, seed + 3000);
    a.reverse = reverse();
    return a;
  }
  Problem dense(const Sizes& sizes, bool bias = true, bool joined = false) const {
    return [=, this](uint64_t seed) {
      return for_cell(sequence_problem(sizes, dtype(), seed, bias), seed, joined);
    };
  }
  Problem packed(const std::vector<int64_t>& lengths, int64_t hidden, bool joined = false) const {
    return [=, this](uint64_t seed) {
      return for_cell(packed_problem(lengths, 3, hidden, dtype(), seed), seed, joined);
    };
  }
  Function ours(bool joined = false, int64_t checkpoint_steps = 0) const {
    return [=, this](const Arguments& a) {
      return run_sequence(arguments_of(cell(), a, joined, checkpoint_steps));
    };
  }
  Function torch() const {
    return [this](const Arguments& a) { return torch_sequence(cell(), a); };
  }
};
class CudaCellSteps : public CudaCells {};

std::string cells_name(const testing::TestParamInfo<CudaCells::ParamType>& info) {
  const auto [cell, dtype, reverse] = info.param;
  return std::string(cell) + "_" + name(dtype) + (reverse ? "_reverse" : "");
}
const auto kCells = testing::Values("lstm", "gru");
INSTANTIATE_TEST_SUITE_P(
    Torch,
    CudaCells,
    testing::Combine(kCells, testing::ValuesIn(kDtypes), testing::Bool()),
    cells_name);
INSTANTIATE_TEST_SUITE_P(
    Torch,
    CudaCellSteps,
    testing::Combine(kCells, testing::ValuesIn(kDtypes), testing::Values(false)),
    cells_name);

TEST_P(CudaCellSteps, ValuesAndGradientsMatchTorch) {
  for (const bool joined : {false, true}) {
    for (const bool bias : {true, false}) {
      for (const Sizes& sizes :
           {Sizes{1, 1, 1, 1}, Sizes{1, 3, 5, 7}, Sizes{1, 2, 3, 16}, Sizes{1, 17, 9, 33}}) {
        SCOPED_TRACE(
            testing::PrintToString(sizes) + (bias ? "" : ", without bias") +
            (joined ? ", joined" : ""));
        check_against(
            [&](const Arguments& a) { return run_step(arguments_of(cell(), a, joined)); },
            [&](const Arguments& a) { return torch_step(cell(), a); },
            [&](uint64_t seed) {
              return for_cell(cell_problem(sizes, dtype(), seed, bias), seed, joined);
            });
      }
    }
  }
}

TEST_P(CudaCells, ValuesAndGradientsMatchTorch) {
  for (const bool joined : {false, true}) {
    for (const bool bias : {true, false}) {
      for (const Sizes& sizes :
           {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}, Sizes{3, 17, 9, 33}}) {
        SCOPED_TRACE(
            testing::PrintToString(sizes) + (bias ? "" : ", without bias") +
            (joined ? ", joined" : ""));
        check_against(ours(joined), torch(), dense(sizes, bias, joined));
      }
    }
  }
}

TEST_P(CudaCells, PackedValuesAndGradientsMatchTorch) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {5}, {3, 3, 3}, {7, 6, 5, 4, 3, 2, 1}, {9, 1, 1, 1}, {4, 4, 4, 4, 2, 2, 1}}) {
    for (const int64_t hidden : {7, 16}) {
      SCOPED_TRACE(testing::PrintToString(lengths) + ", H=" + std::to_string(hidden));
      check_against(ours(), torch(), packed(lengths, hidden));
    }
  }
}

TEST_P(CudaCells, CheckpointedValuesAndGradientsMatchTorch) {
  for (const int64_t steps : {1, 3, 100}) {
    SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
    for (const bool joined : {false, true}) {
      for (const Problem& problem :
           {dense({10, 3, 5, 7}, true, joined), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 16, joined)}) {
        check_against(ours(joined, steps), torch(), problem);
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(identical(ours(joined, steps)(problem(1)), ours(joined)(problem(1))));
      }
    }
  }
}

TEST_P(CudaCells, ResetValuesAndGradientsMatchTorch) {
  const auto with_reset = [](const Problem& problem) -> Problem {
    return [=](uint64_t seed) {
      Arguments a = problem(seed);
      a.reset = random_reset(a, seed);
      a.recurrent_mask = random_mask(a, seed);
      return a;
    };
  };
  for (const Problem& problem : {dense({10, 3, 5, 7}), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 16)}) {
    for (const int64_t checkpoint_steps : {0, 3}) {
      check_against(
          ours(/*joined=*/false, checkpoint_steps),
          [this](const Arguments& a) { return torch_steps(cell(), a); },
          with_reset(problem));
    }
  }
}

// Chunks of steps, and memory that held something else.
TEST_P(CudaCells, ASmallerWorkspaceGivesTheSame) {
  const int64_t row = lltm::find_cell(cell())->slots * 8 * (dtype() == at::kDouble ? 8 : 4);
  for (const Arguments& a : {dense({9, 4, 3, 8})(1), packed({9, 7, 7, 3, 1}, 8)(1)}) {
    const CellArguments of_cell = arguments_of(cell(), a, /*joined=*/false);
    const lltm::SequenceArgs args = {sequence_inputs(of_cell), /*save=*/true};
    const auto with_workspace = [&](int64_t bytes) {
      const auto [output, h_n, c_n, activations] = lltm::cuda::stepwise_forward(args, bytes);
      return Tensors{output, h_n, c_n, activations};
    };
    const Tensors all = with_workspace(lltm::cuda::kWorkspaceBytes);
    for (const int64_t rows : {0, 4, 5, 8, 9, 20}) {
      EXPECT_TRUE(identical(with_workspace(rows * row), all)) << rows << " rows at a time";
    }
    check_uninitialised_memory(ours(), a);
  }
}

TEST_P(CudaCellSteps, NoMoreIsReadThanWasWritten) {
  const auto step = [&](const Arguments& a) { return run_step(arguments_of(cell(), a, false)); };
  check_uninitialised_memory(step, for_cell(cell_problem({1, 3, 5, 7}, dtype(), 1), 1, false));
}

// ---- which gradients are wanted ------------------------------------------------

constexpr std::array<const char*, 7> kGradients = {
    "input", "h", "c", "weight_ih", "weight_hh", "bias_ih", "bias_hh"};

// backward(mask) computes what it computes for all, and nothing else.
template <typename Backward>
void check_masks(const lltm::OutputMask& all, const Backward& backward) {
  const Tensors expected = backward(all);
  for (size_t k = 0; k < expected.size(); ++k) {
    EXPECT_EQ(expected[k].defined(), all[k]) << kGradients[k];
    EXPECT_TRUE(!all[k] || expected[k].is_contiguous()) << kGradients[k];
    for (size_t other = 0; other < k; ++other) {
      EXPECT_FALSE(all[k] && all[other] && expected[k].is_alias_of(expected[other]))
          << kGradients[k] << " and " << kGradients[other];
    }
    lltm::OutputMask one = {}, others = all;
    one[k] = all[k];
    others[k] = false;
    const Tensors alone = backward(one), rest = backward(others);
    for (size_t n = 0; n < expected.size(); ++n) {
      SCOPED_TRACE(testing::Message() << kGradients[n] << ", chosen by " << kGradients[k]);
      EXPECT_TRUE(identical(alone[n], n == k ? expected[n] : at::Tensor()));
      EXPECT_TRUE(identical(rest[n], n == k ? at::Tensor() : expected[n]));
    }
  }
}

TEST_P(CudaCells, OnlyWantedGradientsAreComputed) {
  for (const bool joined : {false, true}) {
    const Arguments a = dense({4, 3, 5, 8}, true, joined)(1);
    const CellArguments of_cell = arguments_of(cell(), a, joined);
    const auto [output, h_n, c_n, activations] =
        lltm::cuda::stepwise_forward({sequence_inputs(of_cell), /*save=*/true});
    const Tensors grads = random_like({output, h_n, c_n}, 2);
    check_masks(
        {true, true, true, true, !joined, true, !joined},
        [&, &output = output, &activations = activations](const lltm::OutputMask& mask) {
          return as_list(
              lltm::cuda::stepwise_backward(
                  {sequence_inputs(of_cell),
                   output,
                   activations,
                   grads[0],
                   grads[1],
                   grads[2],
                   mask}));
        });
  }
}

TEST_P(CudaCellSteps, OnlyWantedGradientsAreComputed) {
  for (const bool joined : {false, true}) {
    const Arguments a = for_cell(cell_problem({1, 3, 5, 8}, dtype(), 1), 1, joined);
    const CellArguments of_cell = arguments_of(cell(), a, joined);
    const auto [h, c, activations] =
        lltm::cuda::step_forward({step_inputs(of_cell), /*save=*/true});
    const Tensors grads = random_like({h, c}, 2);
    check_masks(
        {true, true, true, true, !joined, true, !joined},
        [&, &activations = activations](const lltm::OutputMask& mask) {
          return as_list(
              lltm::cuda::step_backward(
                  {step_inputs(of_cell), activations, grads[0], grads[1], mask}));
        });
  }
}

// ---- which engine, and its GEMMs ------------------------------------------------

// Of the persistent engine, in the dtypes that it has.
class PersistentCells : public CudaCells {
 protected:
  PersistentCells() { allow_tf32 = true; }
  ~PersistentCells() override { allow_tf32 = false; }

  // Values and gradients, in `each` launches forward and backward.
  void check_persistent(const Problem& problem, int64_t each = 1) const {
    int64_t calls = 0;
    const Function counted = [&](const Arguments& a) {
      ++calls;
      return ours()(a);
    };
    const int64_t before = persistent_launches;
    // torch has no TF32 on the CPU.
    const Function tf32 = [this](const Arguments& a) { return tf32_steps(cell(), a); };
    check_against(counted, torch(), problem, dtype() == at::kFloat ? tf32 : nullptr);
    EXPECT_EQ(persistent_launches - before, 2 * each * calls);
  }

 private:
  PersistentSetting persistent_{true};
};
INSTANTIATE_TEST_SUITE_P(
    Torch,
    PersistentCells,
    testing::Combine(
        kCells, testing::Values(at::kBFloat16, at::kHalf, at::kFloat), testing::Bool()),
    cells_name);

// Half a slice of units, more than one slice, and half of the last one; rows that fill no
// tile, one, and more than one.
TEST_P(PersistentCells, ValuesAndGradientsMatchTorch) {
  for (const Sizes& sizes :
       {Sizes{2, 1, 16, 8}, Sizes{5, 3, 5, 24}, Sizes{7, 8, 3, 16}, Sizes{3, 17, 9, 40}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_persistent(dense(sizes));
  }
  check_persistent(dense({5, 3, 4, 24}, /*bias=*/false));
}

TEST_P(PersistentCells, PackedValuesAndGradientsMatchTorch) {
  check_persistent(packed({7, 6, 5, 4, 3, 2, 1}, 24));
  check_persistent(packed({6, 6, 6, 5, 5, 5, 5, 5, 5, 4, 4, 4, 4, 2, 2, 2, 2, 2, 1}, 24));
}

TEST_P(PersistentCells, ChunksAndTheJoinedMatrixGiveTheSame) {
  const Arguments a = packed({9, 7, 7, 3, 1}, 24, /*joined=*/true)(1);
  const auto run = [&](bool joined, int64_t bytes) {
    const CellArguments of_cell = arguments_of(cell(), a, joined);
    const auto [output, h_n, c_n, activations] =
        persistent_forward({sequence_inputs(of_cell), /*save=*/true}, bytes).value();
    return Tensors{output, h_n, c_n, activations};
  };
  const Tensors all = run(/*joined=*/false, lltm::cuda::kWorkspaceBytes);
  EXPECT_TRUE(identical(run(/*joined=*/true, lltm::cuda::kWorkspaceBytes), all));
  const int64_t row = lltm::find_cell(cell())->x.count() * 24 * 4;
  for (const int64_t rows : {0, 5, 22}) {
    EXPECT_TRUE(identical(run(/*joined=*/false, rows * row), all)) << rows << " rows at a time";
  }
}

// The engine under the operators' checks, as on a GPU.
struct OnHost {
  using DeviceGuard = lltm::NoDeviceGuard;
  static constexpr auto sequence_forward = lltm::cuda::sequence_forward;
  static constexpr auto sequence_backward = lltm::cuda::sequence_backward;
  static constexpr auto sequences_forward = lltm::cuda::sequences_forward;
  static constexpr auto sequences_backward = lltm::cuda::sequences_backward;
};

TEST_P(PersistentCells, OperatorsOfTwoCallsAtOnceGiveWhatThoseOfEachGive) {
  using Checked = lltm::CheckedBackend<OnHost>;
  for (const int64_t checkpoint_steps : {0, 2}) {
    const Arguments a = dense({5, 11, 3, 24})(1);
    std::array<CellArguments, 2> both = {
        arguments_of(cell(), a, /*joined=*/false),
        arguments_of(cell(), dense({5, 11, 3, 24})(2), /*joined=*/false)};
    both[1].reverse = !both[0].reverse;
    std::vector<lltm::SequenceArgs> args;
    for (CellArguments& of_cell : both) {
      of_cell.checkpoint_steps = checkpoint_steps;
      args.push_back({sequence_inputs(of_cell)});
    }
    const int64_t before = launches_of_two;
    const auto results = Checked::sequences(/*save=*/true, args);
    const auto inferred = Checked::sequences(/*save=*/false, args);
    std::vector<lltm::SequenceBackwardArgs> backward;
    for (size_t k = 0; k < both.size(); ++k) {
      EXPECT_EQ(std::get<3>(inferred[k]).defined(), false);
      const auto& [output, h_n, c_n, saved] = results[k];
      const lltm::OutputMask mask = {true, k == 0, k == 1, true, true, true, true};
      backward.push_back({args[k], output, saved, at::ones_like(output), h_n, c_n, mask});
    }
    const auto gradients = Checked::sequences_backward(backward);
    EXPECT_EQ(launches_of_two - before, checkpoint_steps == 0 ? 3 : 3 + 1);
    for (size_t k = 0; k < both.size(); ++k) {
      const auto as_tensors = [](const lltm::SequenceResult& result) {
        const auto& [output, h_n, c_n, saved] = result;
        return Tensors{output, h_n, c_n, saved};
      };
      EXPECT_TRUE(
          identical(as_tensors(results[k]), as_tensors(Checked::sequence_forward(args[k]))));
      EXPECT_TRUE(identical(std::get<0>(inferred[k]), std::get<0>(results[k])));
      EXPECT_TRUE(
          identical(as_list(gradients[k]), as_list(Checked::sequence_backward(backward[k]))));
    }
  }
}

// The largest size of some kernels, forward and backward: H in 16 bits, half of that in float32.
class PersistentCellKernels : public PersistentCells {};
INSTANTIATE_TEST_SUITE_P(
    SlowTorch,
    PersistentCellKernels,
    testing::Combine(kCells, testing::Values(at::kHalf, at::kFloat), testing::Values(false)),
    cells_name);

TEST_P(PersistentCellKernels, ValuesAndGradientsMatchTorch) {
  for (const int64_t size : {128, 192, 256, 512, 768}) {
    SCOPED_TRACE(size);
    check_persistent(dense({2, 9, 16, dtype() == at::kFloat ? size / 2 : size}));
  }
}

// What the weights of a thread leave room for: four slots that read h, or three.
TEST_P(PersistentCellKernels, TheLimitsOfHAreTheCells) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype()));
  const auto taken = [&](int64_t row_bytes) {
    const int64_t before = persistent_launches;
    const Arguments a = dense({1, 2, 4, row_bytes / element})(1);
    const Tensors results = ours()(a);
    return persistent_launches - before;
  };
  const bool lstm = cell() == "lstm";
  EXPECT_EQ(taken(lstm ? 2048 : 3072), 1);
  EXPECT_EQ(taken(lstm ? 2064 : 3088), 0);
}

// A GEMM for the input, and one for each step, which is aligned where rows of H are.
TEST_P(CudaCells, EachStepTakesOneAlignedGemm) {
  for (const int64_t steps : {3, 30}) {
    const CellArguments of_cell = arguments_of(cell(), dense({steps, 5, 16, 16})(1), false);
    const lltm::SequenceArgs args = {sequence_inputs(of_cell), /*save=*/true};
    const int64_t gemms = gemm_calls, unaligned = unaligned_gemm_calls;
    lltm::cuda::stepwise_forward(args);
    EXPECT_EQ(gemm_calls - gemms, 1 + steps);
    EXPECT_EQ(unaligned_gemm_calls, unaligned);
  }
}

}  // namespace
}  // namespace lltm_test
