// The CUDA engines' loops on the CPU, with the cuBLAS and the kernels of cuda_on_host.cpp and
// persistent_on_host.cpp: the same sources that run on a GPU, the same oracle. With the
// persistent engine, where it takes a problem; test_cuda_persistent.cpp has what is its own.
#include "cell/cell.h"
#include "cuda_engine_autograd.h"
#include "cuda_on_host.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

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

// ---- one step -------------------------------------------------------------

class CudaEngineCell : public testing::TestWithParam<at::ScalarType> {
 protected:
  void check_cell(const Problem& problem, const OutputGradients& gradients = kRandom) {
    check(engine_cell, eager_cell, problem, gradients);
  }
  Problem problems(const Sizes& sizes, bool bias = true) const {
    return
        [=, dtype = GetParam()](uint64_t seed) { return cell_problem(sizes, dtype, seed, bias); };
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEngineCell, testing::ValuesIn(kDtypes), [](const auto& info) {
  return name(info.param);
});

TEST_P(CudaEngineCell, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{1, 1, 1, 1}, Sizes{1, 3, 5, 7}, Sizes{1, 2, 3, 16}, Sizes{1, 17, 9, 33}}) {
    check_cell(problems(sizes));
  }
  check_cell(problems({1, 5, 3, 24}, /*bias=*/false));
}

TEST_P(CudaEngineCell, EmptySizes) {
  for (const Sizes& sizes : {Sizes{1, 0, 3, 5}, Sizes{1, 3, 0, 5}, Sizes{1, 3, 2, 0}}) {
    check_cell(problems(sizes));
  }
}

TEST_P(CudaEngineCell, ArgumentsAndGradientsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    for (const auto& positions : kPositions) {
      const Problem problem = [&](uint64_t seed) {
        return laid_out(cell_problem({1, 5, 3, 16}, GetParam(), seed), layout, positions);
      };
      check(engine_cell, contiguous(engine_cell), problem);
    }
    check_cell(problems({1, 5, 3, 16}), [&](const Tensors& outputs, uint64_t seed) {
      return laid_out(random_like(outputs, seed), layout);
    });
  }
}

TEST_P(CudaEngineCell, UnusedResultsHaveZeroGradients) {
  for (const size_t unused : {0, 1}) {
    check_cell(problems({1, 5, 3, 8}), [&](const Tensors& outputs, uint64_t seed) {
      Tensors gradients = random_like(outputs, seed);
      gradients[unused] = at::Tensor();
      return gradients;
    });
  }
}

// ---- a sequence -----------------------------------------------------------

class CudaEngineSequence : public testing::TestWithParam<std::tuple<at::ScalarType, bool, bool>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  Arguments reversed(Arguments arguments) const {
    arguments.reverse = std::get<1>(GetParam());
    return arguments;
  }
  Problem dense(const Sizes& sizes, bool bias = true) const {
    return
        [=, this](uint64_t seed) { return reversed(sequence_problem(sizes, dtype(), seed, bias)); };
  }
  Problem packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H) const {
    return
        [=, this](uint64_t seed) { return reversed(packed_problem(lengths, I, H, dtype(), seed)); };
  }
  static void check_sequence(const Problem& problem, const OutputGradients& gradients = kRandom) {
    check(engine_sequence, eager_sequence, problem, gradients);
    const Arguments arguments = problem(1);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(identical(engine_inference(arguments), engine_sequence(arguments)));
  }

 private:
  const PersistentSetting setting_{std::get<2>(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaEngineSequence,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool(), testing::Values(false)),
    [](const auto& info) {
      return name(std::get<0>(info.param)) + (std::get<1>(info.param) ? "_reverse" : "");
    });
INSTANTIATE_TEST_SUITE_P(
    SlowPersistent,
    CudaEngineSequence,
    testing::Combine(
        testing::Values(at::kBFloat16, at::kHalf), testing::Bool(), testing::Values(true)),
    [](const auto& info) {
      return name(std::get<0>(info.param)) + (std::get<1>(info.param) ? "_reverse" : "");
    });

TEST_P(CudaEngineSequence, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}, Sizes{3, 17, 9, 33}}) {
    check_sequence(dense(sizes));
  }
  check_sequence(dense({5, 3, 5, 7}, /*bias=*/false));
}

TEST_P(CudaEngineSequence, CheckpointedValuesAndGradientsMatchOracle) {
  for (const int64_t steps : {1, 3, 5, 100}) {
    SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
    for (const Problem& problem :
         {dense({10, 3, 5, 7}),
          dense({10, 3, 5, 7}, /*bias=*/false),
          packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, 16)}) {
      check(engine_checkpointed(steps), eager_sequence, problem);
      const Arguments arguments = problem(1);
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(identical(engine_checkpointed(steps)(arguments), engine_inference(arguments)));
    }
  }
}

TEST_P(CudaEngineSequence, PackedValuesAndGradientsMatchOracle) {
  check_sequence(packed({5}, 3, 4));
  check_sequence(packed({3, 3, 3}, 5, 7));
  check_sequence(packed({7, 6, 5, 4, 3, 2, 1}, 3, 9));
  check_sequence(packed({9, 1, 1, 1}, 2, 16));
  check_sequence(packed({4, 4, 4, 4, 2, 2, 1}, 3, 8));
}

TEST_P(CudaEngineSequence, EmptySizes) {
  for (const Sizes& sizes :
       {Sizes{0, 3, 2, 5},
        Sizes{4, 0, 2, 5},
        Sizes{0, 0, 2, 5},
        Sizes{4, 3, 0, 5},
        Sizes{4, 3, 2, 0}}) {
    check_sequence(dense(sizes));
  }
  check_sequence(packed({}, 2, 5));
}

TEST_P(CudaEngineSequence, StepsThatReachNoRowChangeNothing) {
  check_sequence([&](uint64_t seed) {
    Arguments arguments = reversed(packed_problem({3, 2}, 3, 5, dtype(), seed));
    arguments.batch_sizes = at::cat({*arguments.batch_sizes, at::zeros({2}, at::kLong)});
    return arguments;
  });
}

// Each step in a chunk of its own, some together, and all.
TEST_P(CudaEngineSequence, ASmallerWorkspaceGivesTheSame) {
  const bool persistent = std::get<2>(GetParam());
  const int64_t row = lltm::Cell::kGates * 8 * (dtype() == at::kDouble ? 8 : 4);
  for (const Arguments& a : {dense({9, 4, 3, 8})(1), packed({9, 7, 7, 3, 1}, 3, 8)(1)}) {
    const auto with_workspace = [&](int64_t bytes) {
      const lltm::SequenceArgs args = sequence_args(a, /*save=*/true);
      const auto [output, h_n, c_n, activations] =
          persistent ? lltm::cuda::persistent_forward(args, bytes).value()
                     : lltm::cuda::stepwise_forward(args, bytes);
      return Tensors{output, h_n, c_n, activations};
    };
    const Tensors all = with_workspace(lltm::cuda::kWorkspaceBytes);
    for (const int64_t rows : {0, 4, 5, 8, 9, 20}) {
      EXPECT_TRUE(identical(with_workspace(rows * row), all)) << rows << " rows at a time";
    }
  }
}

TEST_P(CudaEngineSequence, ArgumentsAndGradientsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    for (const auto& positions : kPositions) {
      const Problem problem = [&](uint64_t seed) {
        return laid_out(
            reversed(sequence_problem({3, 5, 9, 16}, dtype(), seed)), layout, positions);
      };
      check(engine_sequence, contiguous(engine_sequence), problem);
    }
    check_sequence(packed({4, 4, 2, 1}, 5, 8), [&](const Tensors& outputs, uint64_t seed) {
      return laid_out(random_like(outputs, seed), layout);
    });
    check_sequence(dense({4, 5, 3, 7}), [&](const Tensors& outputs, uint64_t seed) {
      return laid_out(random_like(outputs, seed), layout);
    });
  }
}

// Rows of a step, and steps, further apart than 32-bit indices reach.
TEST_P(CudaEngineSequence, StridesBeyond32BitsAreFollowed) {
  const FarApart far_apart(dtype());
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{1, 1}, {2}}) {
    check_sequence(
        [&](uint64_t seed) {
          Arguments arguments = packed(lengths, 3, 8)(seed);
          arguments.input = far_apart.copy(arguments.input, 0);
          arguments.h = far_apart.copy(arguments.h, 8);
          arguments.c = far_apart.copy(arguments.c, 16);
          return arguments;
        },
        [&](const Tensors& outputs, uint64_t seed) {
          const Tensors gradients = random_like(outputs, seed);
          return Tensors{
              far_apart.copy(gradients[0], 24),
              far_apart.copy(gradients[1], 32),
              far_apart.copy(gradients[2], 40)};
        });
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
            {output,
             h_n,
             h_n,
             a.input,
             a.h,
             a.weights,
             output,
             activations,
             {},
             a.reverse,
             {true, true, true, true, true}});
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

TEST_P(CudaEngineSequence, UnusedResultsHaveZeroGradients) {
  for (unsigned used = 1; used < 7; ++used) {
    SCOPED_TRACE(testing::Message() << "used " << used);
    const OutputGradients gradients = [&](const Tensors& outputs, uint64_t seed) {
      Tensors gradients = random_like(outputs, seed);
      for (size_t k = 0; k < gradients.size(); ++k) {
        if ((used >> k & 1) == 0) gradients[k] = at::Tensor();
      }
      return gradients;
    };
    check_sequence(dense({4, 5, 3, 8}), gradients);
    check_sequence(packed({4, 4, 2, 1}, 3, 8), gradients);
  }
}

TEST_P(CudaEngineSequence, EachSubsetOfArgumentsThatRequireGradGetsItsGradients) {
  const Arguments arguments = dense({4, 5, 3, 7})(1);
  const Tensors grad_outputs = random_like(eager_sequence(arguments), 2);
  const Evaluation all = evaluate(engine_sequence, arguments, grad_outputs);
  const Tensors tensors = differentiable(arguments);
  for (size_t subset = 1; subset < size_t{1} << tensors.size(); ++subset) {
    SCOPED_TRACE(testing::Message() << "subset " << subset);
    Tensors leaves;
    for (size_t k = 0; k < tensors.size(); ++k) {
      leaves.push_back(tensors[k].detach().requires_grad_((subset >> k & 1) != 0));
    }
    torch::autograd::backward(engine_sequence(with(arguments, leaves)), grad_outputs);
    for (size_t k = 0; k < leaves.size(); ++k) {
      ASSERT_EQ(leaves[k].grad().defined(), (subset >> k & 1) != 0) << kArgumentNames[k];
      if ((subset >> k & 1) != 0) {
        EXPECT_TRUE(identical(leaves[k].grad(), all.gradients[k])) << kArgumentNames[k];
      }
    }
  }
}

}  // namespace
}  // namespace lltm_test
