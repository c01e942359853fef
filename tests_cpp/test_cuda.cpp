// The operators on a GPU: values and gradients against the oracle, judged beside
// plain PyTorch on the same GPU. A program of its own, skipped as a whole where
// there is no GPU.
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <torch/csrc/autograd/custom_function.h>

#include <iostream>
#include <tuple>

namespace lltm_test {
namespace {

// A copy on the GPU that lies in memory as the tensor does. Gradients come back
// element by element: by way of the operations that make a layout, those of an
// element that stands for many would be summed.
struct ToCuda : torch::autograd::Function<ToCuda> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) {
    const at::Tensor memory = at::empty({0}, tensor.options()).set_(tensor.storage());
    return memory.to(at::kCUDA).as_strided(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, const torch::autograd::variable_list& gradients) {
    return {gradients[0].cpu()};
  }
};

// `function` on copies of the arguments on the GPU, its results brought back.
Function on_cuda(const Function& function) {
  return [=](const Arguments& arguments) {
    Tensors moved;
    for (const at::Tensor& tensor : differentiable(arguments)) {
      moved.push_back(ToCuda::apply(tensor));
    }
    Tensors outputs = function(with(arguments, moved));
    for (at::Tensor& output : outputs) output = output.cpu();
    return outputs;
  };
}

void check_on_cuda(
    const Function& ours,
    const Function& eager,
    const Problem& problem,
    const OutputGradients& gradients = kRandom) {
  check(on_cuda(ours), on_cuda(eager), problem, gradients);
}

// The same with weights and bias as constants, whose gradients are then zero on
// both sides. For sums over tens of thousands of rows: in float32 and float64 the
// order of summation decides how accurate they are, and that is cuBLAS's choice.
Function without_parameter_gradients(const Function& function) {
  return [=](Arguments arguments) {
    arguments.weights = arguments.weights.detach();
    if (arguments.bias.has_value()) arguments.bias = arguments.bias->detach();
    return function(arguments);
  };
}

void check_many_rows(const Function& ours, const Function& eager, const Problem& problem) {
  check(
      on_cuda(without_parameter_gradients(ours)),
      on_cuda(without_parameter_gradients(eager)),
      problem,
      kRandom,
      /*problems=*/1);
}

std::string with_direction(const std::string& name, bool reverse) {
  return name + (reverse ? "_reverse" : "");
}

class CudaCell : public testing::TestWithParam<at::ScalarType> {
 protected:
  Problem problems(const Sizes& sizes, bool bias = true) const {
    return [=, this](uint64_t seed) { return cell_problem(sizes, GetParam(), seed, bias); };
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaCell, testing::ValuesIn(kDtypes), [](const auto& info) {
  return name(info.param);
});

TEST_P(CudaCell, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{1, 1, 1, 1},
        Sizes{1, 3, 5, 7},
        Sizes{1, 16, 32, 128},
        Sizes{1, 17, 9, 33},
        Sizes{1, 1, 130, 130}}) {
    check_on_cuda(cell, eager_cell, problems(sizes));
  }
  check_on_cuda(cell, eager_cell, problems({1, 5, 3, 24}, /*bias=*/false));
}

// More rows than a grid has in its second dimension; the wide kernels and, with
// 17 units, the narrow ones.
TEST_P(CudaCell, ValuesAndGradientsMatchOracleForManyRows) {
  check_many_rows(cell, eager_cell, problems({1, 70000, 2, 16}));
  check_many_rows(cell, eager_cell, problems({1, 70000, 2, 17}));
}

TEST_P(CudaCell, EmptySizes) {
  for (const Sizes& sizes : {Sizes{1, 0, 3, 5}, Sizes{1, 3, 0, 5}, Sizes{1, 3, 2, 0}}) {
    check_on_cuda(cell, eager_cell, problems(sizes));
  }
}

TEST_P(CudaCell, ArgumentsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Problem problem = [&](uint64_t seed) {
      return laid_out(cell_problem({1, 5, 3, 16}, GetParam(), seed), layout, kPositions.back());
    };
    check_on_cuda(cell, eager_cell, problem);
  }
}

class CudaSequence : public testing::TestWithParam<std::tuple<at::ScalarType, bool>> {
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
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaSequence,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
    [](const auto& info) {
      return with_direction(name(std::get<0>(info.param)), std::get<1>(info.param));
    });

TEST_P(CudaSequence, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{1, 1, 1, 1},
        Sizes{5, 3, 5, 7},
        Sizes{4, 16, 32, 128},
        Sizes{3, 17, 9, 33},
        Sizes{4, 70, 65, 64}}) {
    check_on_cuda(sequence, eager_sequence, dense(sizes));
  }
  check_on_cuda(sequence, eager_sequence, dense({5, 3, 5, 7}, /*bias=*/false));
}

TEST_P(CudaSequence, PackedValuesAndGradientsMatchOracle) {
  check_on_cuda(sequence, eager_sequence, packed({3, 3, 3}, 5, 7));
  check_on_cuda(sequence, eager_sequence, packed({7, 6, 5, 4, 3, 2, 1}, 3, 9));
  check_on_cuda(sequence, eager_sequence, packed({4, 4, 4, 4, 2, 2, 1}, 33, 64));
}

// Rows enough for several chunks of pre-activations and for the wide kernels.
TEST_P(CudaSequence, ValuesAndGradientsMatchOracleOverManyRows) {
  check_many_rows(sequence, eager_sequence, dense({9, 20000, 2, 16}));
}

TEST_P(CudaSequence, EmptySizes) {
  for (const Sizes& sizes :
       {Sizes{0, 3, 2, 5},
        Sizes{4, 0, 2, 5},
        Sizes{0, 0, 2, 5},
        Sizes{4, 3, 0, 5},
        Sizes{4, 3, 2, 0}}) {
    check_on_cuda(sequence, eager_sequence, dense(sizes));
  }
  check_on_cuda(sequence, eager_sequence, packed({}, 2, 5));
}

TEST_P(CudaSequence, ArgumentsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Problem problem = [&](uint64_t seed) {
      return laid_out(
          reversed(sequence_problem({3, 5, 9, 16}, dtype(), seed)), layout, kPositions.back());
    };
    check_on_cuda(sequence, eager_sequence, problem);
  }
}

TEST_P(CudaSequence, RunsTwiceToTheSameBits) {
  const Arguments arguments = dense({20, 33, 17, 70})(1);
  const Tensors gradients = random_like(eager_sequence(arguments), 2);
  const Evaluation first = evaluate(on_cuda(sequence), arguments, gradients);
  for (int again = 0; again < 5; ++again) {
    const Evaluation second = evaluate(on_cuda(sequence), arguments, gradients);
    EXPECT_TRUE(identical(first.outputs, second.outputs));
    EXPECT_TRUE(identical(first.gradients, second.gradients));
  }
}

}  // namespace
}  // namespace lltm_test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!at::cuda::is_available()) {
    std::cout << "skipped: no GPU here\n";
    return 77;  // SKIP_RETURN_CODE in CMakeLists.txt
  }
  return RUN_ALL_TESTS();
}
