// The CUDA engine's loops on the CPU, with the products and kernels of
// cuda_on_host.cpp: the same sources that run on a GPU, the same oracle.
#include "cuda/engine.h"
#include "cuda/products.h"
#include "testing.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

namespace lltm_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}
std::optional<at::Tensor> or_nothing(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// What autograd.cpp does for the operators, for the engine alone. As there, a
// gradient that is not defined is one that nobody asked for or gave.
std::array<bool, 5> wanted(const AutogradContext& context, bool bias) {
  std::array<bool, 5> wanted;
  for (size_t k = 0; k < 4; ++k) wanted[k] = context.needs_input_grad(k);
  wanted[4] = bias && context.needs_input_grad(4);
  return wanted;
}

variable_list as_list(const lltm::Gradients& gradients) {
  const auto& [d_input, d_h, d_c, d_weights, d_bias] = gradients;
  return {d_input, d_h, d_c, d_weights, d_bias};
}

struct EngineCell : torch::autograd::Function<EngineCell> {
  static variable_list forward(
      AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h,
      const at::Tensor& c,
      const at::Tensor& weights,
      const std::optional<at::Tensor>& bias) {
    const auto [h_next, c_next, activations] =
        lltm::cuda::cell_forward(input, h, c, weights, bias, /*save=*/true);
    context->set_materialize_grads(false);
    context->save_for_backward({input, h, weights, activations});
    context->saved_data["bias"] = bias.has_value();
    return {h_next, c_next};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    return as_list(
        lltm::cuda::cell_backward(
            grads[0],
            grads[1],
            saved[0],
            saved[1],
            saved[2],
            saved[3],
            wanted(*context, context->saved_data["bias"].toBool())));
  }
};

struct EngineSequence : torch::autograd::Function<EngineSequence> {
  static variable_list forward(
      AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h_0,
      const at::Tensor& c_0,
      const at::Tensor& weights,
      const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& batch_sizes,
      bool reverse) {
    const auto [output, h_n, c_n, activations] = lltm::cuda::stepwise_forward(
        {input, h_0, c_0, weights, bias, batch_sizes, reverse, /*save=*/true});
    context->set_materialize_grads(false);
    context->save_for_backward(
        {input, h_0, weights, output, activations, or_undefined(batch_sizes)});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["reverse"] = reverse;
    return {output, h_n, c_n};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const std::optional<at::Tensor> batch_sizes = or_nothing(saved[5]);
    variable_list gradients = as_list(
        lltm::cuda::stepwise_backward(
            {grads[0],
             grads[1],
             grads[2],
             saved[0],
             saved[1],
             saved[2],
             saved[3],
             saved[4],
             batch_sizes,
             context->saved_data["reverse"].toBool(),
             wanted(*context, context->saved_data["bias"].toBool())}));
    gradients.resize(7);
    return gradients;
  }
};

Tensors engine_cell(const Arguments& a) {
  return EngineCell::apply(a.input, a.h, a.c, a.weights, a.bias);
}

Tensors engine_sequence(const Arguments& a) {
  return EngineSequence::apply(a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse);
}

// As users call it without gradients: nothing saved.
Tensors engine_inference(const Arguments& a) {
  const auto [output, h_n, c_n, activations] = lltm::cuda::stepwise_forward(
      {a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, /*save=*/false});
  EXPECT_FALSE(activations.defined());
  return {output, h_n, c_n};
}

// ---- operands -------------------------------------------------------------

// PyTorch keeps any stride for a dimension of one element; cuBLAS looks at it.
TEST(CudaOperands, ASingleRowOrColumnHasTheRowLengthAsStride) {
  const int64_t far = int64_t{1} << 40;
  const at::Tensor memory = at::randn({5});
  const at::Tensor row = memory.as_strided({1, 5}, {far, 1});
  const at::Tensor column = memory.as_strided({5, 1}, {1, far});
  for (const at::Tensor& tensor : {row, column}) {
    ASSERT_TRUE(lltm::cuda::as_operand(tensor).is_same(tensor));
    const lltm::cuda::Operand operand = lltm::cuda::operand(tensor);
    EXPECT_EQ(operand.data, memory.const_data_ptr());
    EXPECT_EQ(operand.rows, tensor.size(0));
    EXPECT_EQ(operand.cols, tensor.size(1));
    EXPECT_EQ(operand.stride, tensor.size(1));
    EXPECT_FALSE(operand.transposed);
    EXPECT_EQ(lltm::cuda::transposed(operand).stride, operand.stride);
  }
  EXPECT_EQ(lltm::cuda::result(row).stride, 5);
  EXPECT_EQ(lltm::cuda::result(memory.as_strided({0, 5}, {far, 1})).stride, 5);
}

TEST(CudaOperands, RowsThatOverlapAreCopied) {
  const at::Tensor windows = at::randn({10}).unfold(0, 5, 1);
  for (const at::Tensor& tensor : {windows, windows.t(), windows[0].expand({6, 5})}) {
    const at::Tensor operand = lltm::cuda::as_operand(tensor);
    EXPECT_TRUE(operand.is_contiguous());
    EXPECT_TRUE(identical(operand, tensor));
  }
}

// ---- one step -------------------------------------------------------------

class CudaEngineCell : public testing::TestWithParam<at::ScalarType> {
 protected:
  void check_cell(const Problem& problem, const OutputGradients& gradients = kRandom) {
    check(engine_cell, eager_cell, problem, gradients);
  }
  Problem problems(const Sizes& sizes, bool bias = true) const {
    return [=, this](uint64_t seed) { return cell_problem(sizes, GetParam(), seed, bias); };
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

class CudaEngineSequence : public testing::TestWithParam<std::tuple<at::ScalarType, bool>> {
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
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaEngineSequence,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
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
  const int64_t row = 3 * 8 * (dtype() == at::kDouble ? 8 : 4);
  for (const Arguments& a : {dense({9, 4, 3, 8})(1), packed({9, 7, 7, 3, 1}, 3, 8)(1)}) {
    const auto with_workspace = [&](int64_t bytes) {
      const auto [output, h_n, c_n, activations] = lltm::cuda::stepwise_forward(
          {a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, /*save=*/true}, bytes);
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
          Arguments arguments = packed(lengths, 3, 5)(seed);
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
