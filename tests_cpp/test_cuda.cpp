// The operators on a GPU; the baseline is PyTorch on it. Skipped without a GPU.
#include "properties.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <iostream>
#include <vector>

namespace lltm_test {
namespace {

// Keeps the strides. The gradient is copied by element: a strided copy's would sum repeated
// elements.
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

// Saves time.
Function without_parameter_gradients(const Function& function) {
  return [=](Arguments arguments) {
    arguments.weights = arguments.weights.detach();
    if (arguments.bias.has_value()) arguments.bias = arguments.bias->detach();
    return function(arguments);
  };
}

// With tens of thousands of rows, the summation order determines the accuracy of weight gradients
// (cuda/gemm/gemm.cpp).
void check_many_rows(const Function& ours, const Function& eager, const Problem& problem) {
  check(on_cuda(ours), on_cuda(eager), problem, kRandom, /*problems=*/1);
}

void check_states(const Function& ours, const Function& eager, const Problem& problem) {
  check(
      on_cuda(without_parameter_gradients(ours)),
      on_cuda(without_parameter_gradients(eager)),
      problem,
      kRandom,
      /*problems=*/1);
}

Form on_cuda(const char* name, const Function& ours, const Function& eager) {
  return {
      .name = name,
      .run = on_cuda(ours),
      .baseline = on_cuda(eager),
      .sizes = {3, 5, 9, 16},
      .positions = {kPositions.back()}};
}
Form cell_form() {
  Form form = on_cuda("cell", cell, eager_cell);
  form.step = true;
  return form;
}
Form sequence_form(const char* name, std::shared_ptr<void> (*setting)()) {
  Form form = on_cuda(name, sequence, eager_sequence);
  form.setting = setting;
  return form;
}

class CudaCell : public FormTest {};
class CudaSequence : public FormTest {};

LLTM_EACH_CASE(Cell, Properties, cell_form(), kDtypes);
LLTM_EACH_CASE(Cell, GradientProperties, cell_form(), kDtypes);
LLTM_EACH_CASE(Cell, CudaCell, cell_form(), kDtypes);

// Includes sizes that only the per-step engine supports.
const std::vector<Form> kSequences = {
    sequence_form("per_step", persistent<false>), sequence_form("persistent", persistent<true>)};
LLTM_EACH_CASE(Sequence, Properties, kSequences, kDtypes);
LLTM_EACH_CASE(Sequence, SequenceProperties, kSequences, kDtypes);
LLTM_EACH_CASE(Sequence, GradientProperties, kSequences, kDtypes);
LLTM_EACH_CASE(Sequence, CudaSequence, kSequences, kDtypes);

TEST_P(CudaCell, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes : {Sizes{1, 16, 32, 128}, Sizes{1, 17, 9, 33}, Sizes{1, 1, 130, 130}}) {
    check(dense(sizes));
  }
  check(dense({1, 5, 3, 24}, /*bias=*/false));
}

// Exceeds a grid's second dimension. 17 units use narrow kernels.
TEST_P(CudaCell, ValuesAndGradientsMatchOracleForLargeBatches) {
  check_many_rows(cell, eager_cell, dense({1, 70000, 2, 16}));
  check_many_rows(cell, eager_cell, dense({1, 70000, 2, 17}));
}

TEST_P(CudaSequence, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes : {Sizes{4, 16, 32, 128}, Sizes{4, 70, 65, 64}}) {
    check(dense(sizes));
  }
}

// All numbers of K units, with 1, 2 and 4 tiles and several launches. Not
// float64: cuBLAS' GEMM with K = 1024 has an error of 8 eps on an H100, PyTorch's linear 3 eps.
TEST_P(CudaSequence, ValuesAndGradientsMatchOracleForEveryKernel) {
  if (dtype() == at::kDouble) GTEST_SKIP() << "no persistent kernels";
  for (const int64_t hidden : {128, 256, 264, 512, 520, 776, 1024, 1032, 1536}) {
    check_states(sequence, eager_sequence, dense({3, 9, 64, hidden}));
  }
  for (const int64_t rows : {1, 8, 33, 65, 130}) {
    check_states(sequence, eager_sequence, dense({3, rows, 64, 768}));
  }
}

// In both directions, every step synchronizes all thread blocks.
TEST_P(CudaSequence, LongSequencesEndAndAreReproducible) {
  const Arguments arguments = dense({2000, 17, 8, 256})(1);
  const Tensors gradients = random_gradients(arguments);
  const Evaluation first = evaluate(on_cuda(sequence), arguments, gradients);
  for (int again = 0; again < 10; ++again) {
    EXPECT_TRUE(identical(evaluate(on_cuda(sequence), arguments, gradients), first)) << again;
  }
}

// Several chunks of pre-activations, wide kernels.
TEST_P(CudaSequence, ValuesAndGradientsMatchOracleForLargeBatches) {
  check_many_rows(sequence, eager_sequence, dense({9, 20000, 2, 16}));
}

}  // namespace
}  // namespace lltm_test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!at::hasCUDA() && !testing::FLAGS_gtest_list_tests) {
    std::cout << "skipped: no GPU found\n";
    return 77;  // SKIP_RETURN_CODE in tests.cmake
  }
  return RUN_ALL_TESTS();
}
