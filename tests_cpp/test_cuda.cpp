// The operators on a GPU; the baseline is PyTorch on it. Skipped without a GPU.
#include "properties.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iostream>
#include <string_view>
#include <tuple>
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

// For `make test-cuda-sanitize`, which is slow: one problem per access pattern and dtype:
//
// - Wide and narrow kernels, with partial last blocks and rows that are no multiple of 16 bytes.
//   Wide kernels need 2^17 elements (1821 rows of 72 units exceed this). State gradients have the
//   tensors' dtype in a step, the compute dtype in a sequence.
// - Wide kernels with and without 16-byte reads: gaps, or a repeated element.
// - Omitted bias and unused output gradients.
// - Offsets: reverse, decreasing batch sizes, from wide to narrow kernels, after the first chunk of
//   pre-activations (32 MiB).
// - Persistent kernels with one or several tiles and groups.
//
// float16 kernels differ from bfloat16 only in conversions: fewer problems (of_float16).
struct Access {
  const char* name;
  Sizes sizes;  // packed: I and H
  bool is_sequence = true;
  bool reverse = false;
  const char* layout = "";            // arguments and gradients; see layouts()
  bool all_present = true;            // otherwise no bias, only the first result used
  std::vector<int64_t> lengths = {};  // packed
  bool persistent = false;

  bool of_float16() const {
    return persistent || (!reverse && *layout == '\0' && all_present && lengths.size() <= 7);
  }
};

std::vector<int64_t> falling() {
  std::vector<int64_t> lengths(1821, 2);
  std::fill_n(lengths.begin(), lengths.size() / 2, 3);
  return lengths;
}

constexpr bool kStep = false, kSequence = true, kReverse = true, kPersistent = true;

const std::vector<Access>& accesses() {
  static const std::vector<Access> accesses = {
      {"step", {1, 3, 67, 67}, kStep},
      {"step_gaps", {1, 3, 67, 67}, kStep, false, "every other column"},
      {"step_wide", {1, 1821, 2, 72}, kStep},
      {"step_wide_gaps", {1, 1821, 2, 72}, kStep, false, "every other column"},
      {"step_wide_far_rows", {1, 1821, 2, 72}, kStep, false, "columns of a wider matrix"},
      {"step_wide_one_element", {1, 1821, 2, 72}, kStep, false, "one element expanded"},
      {"step_wide_absent", {1, 1821, 2, 72}, kStep, false, "", /*all_present=*/false},
      {"sequence", {5, 3, 67, 67}},
      {"sequence_reverse_absent", {5, 3, 67, 67}, kSequence, kReverse, "", false},
      {"sequence_wide", {2, 1821, 2, 72}},
      {"sequence_wide_reverse_gaps", {2, 1821, 2, 72}, kSequence, kReverse, "every other column"},
      {"sequence_chunks", {9, 20000, 2, 16}, kSequence, false, "", false},
      {"packed", {1, 1, 9, 67}, kSequence, false, "", true, {7, 6, 5, 4, 3, 2, 1}},
      {"packed_reverse", {1, 1, 9, 67}, kSequence, kReverse, "", true, {7, 6, 5, 4, 3, 2, 1}},
      {"packed_wide_then_narrow", {1, 1, 2, 72}, kSequence, false, "", true, falling()},
      {"persistent", {5, 11, 9, 72}, kSequence, false, "", true, {}, kPersistent},
      {"persistent_reverse_gaps",
       {5, 43, 9, 264},
       kSequence,
       kReverse,
       "every other column",
       true,
       {},
       kPersistent},
      {"persistent_absent", {3, 150, 9, 520}, kSequence, false, "", false, {}, kPersistent},
      {"persistent_packed",
       {1, 1, 9, 72},
       kSequence,
       false,
       "",
       true,
       {7, 6, 6, 6, 6, 6, 5, 4, 3, 2, 1},
       kPersistent},
      {"persistent_packed_reverse",
       {1, 1, 9, 72},
       kSequence,
       kReverse,
       "",
       true,
       {7, 6, 6, 6, 6, 6, 5, 4, 3, 2, 1},
       kPersistent},
  };
  return accesses;
}

Arguments problem_of(const Access& access, at::ScalarType dtype, uint64_t seed) {
  if (!access.is_sequence) return cell_problem(access.sizes, dtype, seed, access.all_present);
  const Sizes& sizes = access.sizes;
  Arguments arguments = access.lengths.empty()
                            ? sequence_problem(sizes, dtype, seed, access.all_present)
                            : packed_problem(access.lengths, sizes.I, sizes.H, dtype, seed);
  arguments.reverse = access.reverse;
  return arguments;
}

std::vector<std::tuple<Access, at::ScalarType>> problems_of_accesses() {
  std::vector<std::tuple<Access, at::ScalarType>> problems;
  for (const Access& access : accesses()) {
    for (const at::ScalarType dtype : kDtypes) {
      if (access.persistent && dtype == at::kDouble) continue;
      if (dtype == at::kHalf && !access.of_float16()) continue;
      problems.emplace_back(access, dtype);
    }
  }
  return problems;
}

class CudaAccess : public testing::TestWithParam<std::tuple<Access, at::ScalarType>> {};

INSTANTIATE_TEST_SUITE_P(
    Kinds, CudaAccess, testing::ValuesIn(problems_of_accesses()), [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" + name(std::get<1>(info.param));
    });

TEST_P(CudaAccess, ValuesAndGradientsMatchOracle) {
  const Access& access = std::get<0>(GetParam());
  const at::ScalarType dtype = std::get<1>(GetParam());
  const PersistentSetting setting(access.persistent);
  const auto layout = std::find_if(layouts().begin(), layouts().end(), [&](const Layout& known) {
    return access.layout == std::string_view(known.name);
  });
  const bool is_laid_out = layout != layouts().end();
  ASSERT_EQ(is_laid_out, *access.layout != '\0');
  const Function& ours = access.is_sequence ? sequence : cell;
  const Function& eager = access.is_sequence ? eager_sequence : eager_cell;
  check(
      on_cuda(without_parameter_gradients(ours)),
      on_cuda(without_parameter_gradients(eager)),
      [&](uint64_t seed) {
        const Arguments arguments = problem_of(access, dtype, seed);
        return is_laid_out ? laid_out(arguments, *layout, kPositions.back()) : arguments;
      },
      [&](const Arguments& arguments, uint64_t seed) {
        Tensors gradients = random_gradients(arguments, seed);
        if (is_laid_out) gradients = laid_out(gradients, *layout);
        if (!access.all_present) std::fill(gradients.begin() + 1, gradients.end(), at::Tensor());
        return gradients;
      },
      /*problems=*/1);
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
