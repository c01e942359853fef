// What the operator tests share: seeded problems, plain PyTorch ("eager") as
// the baseline of accuracy, and the statement of accuracy itself.
#pragma once

#include "cell/cells.h"
#include "reference.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

namespace lltm_test {

// The library's cells, and those among them that torch::nn's modules have: with two matrices.
inline const std::vector<const char*> kCells = [] {
  std::vector<const char*> names;
  for (const lltm::CellInfo* cell : lltm::kCells) names.push_back(cell->name);
  return names;
}();
const lltm::CellInfo& info_of(std::string_view cell);
// Those whose weights may be quantised.
inline const std::vector<const char*> kBoundedCells = [] {
  std::vector<const char*> names;
  for (const lltm::CellInfo* cell : lltm::kCells) {
    if (cell->bounded) names.push_back(cell->name);
  }
  return names;
}();
inline const std::vector<const char*> kTorchCells = [] {
  std::vector<const char*> names;
  for (const lltm::CellInfo* cell : lltm::kCells) {
    if (!cell->joined) names.push_back(cell->name);
  }
  return names;
}();

// What a step or a sequence takes. One step: input is (B, I).
struct Arguments {
  at::Tensor input, h, c, weights;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> batch_sizes;
  bool reverse = false;
  // One of kCells. The others' weights are in two matrices, as torch.nn's: `weights` and `bias`
  // are those of the input, these are those of h. One of h alone has no c.
  std::string_view cell = "lltm";
  std::optional<at::Tensor> weight_hh, bias_hh;
  // Of a sequence, bool, (T, B) or packed (N): the rows that start anew.
  std::optional<at::Tensor> reset;
  std::optional<at::Tensor> recurrent_mask;
};

using Tensors = std::vector<at::Tensor>;

// From arguments to (h', c') of a step or (output, h_n, c_n) of a sequence, without the c that a
// cell does not have.
using Function = std::function<Tensors(const Arguments&)>;

// Names of the differentiable arguments, in the order of the gradients: of the LLTM, of any cell.
constexpr std::array<const char*, 5> kArgumentNames = {"input", "h", "c", "weights", "bias"};
std::vector<const char*> argument_names(const Arguments& arguments);

// The library: one step, a sequence, one that saves checkpoints, and one with weights that are
// packed, as they are or quantised.
Tensors cell(const Arguments& arguments);
Tensors sequence(const Arguments& arguments);
Function checkpointed(int64_t checkpoint_steps);
Function prepacked(std::optional<at::ScalarType> dtype = std::nullopt);
Tensors sequence_of_packed(const Arguments& arguments, const at::Tensor& packed_weights);

// An operator called by its name: from its arguments to its results.
using Stack = std::vector<c10::IValue>;
Stack call(const char* name, Stack stack);
// The arguments of the operators `step` and `sequence`, in the order of their schemas.
Stack step_stack(const Arguments& arguments);
Stack sequence_stack(const Arguments& arguments, int64_t checkpoint_steps = 0);

// For `reset`: about one row in four.
at::Tensor random_reset(const Arguments& arguments, uint64_t seed);
// For `recurrent_mask`: 0, or 1.5 for two in three.
at::Tensor random_mask(const Arguments& arguments, uint64_t seed);

// lltm::prepack of the weights of any cell.
at::Tensor pack(const Arguments& arguments, std::optional<at::ScalarType> dtype = std::nullopt);

// Which engine sequences on a GPU may take while it lives: the persistent one, or only the
// stepwise one.
class PersistentSetting {
 public:
  explicit PersistentSetting(bool enabled);
  ~PersistentSetting();
  PersistentSetting(const PersistentSetting&) = delete;
  PersistentSetting& operator=(const PersistentSetting&) = delete;

 private:
  bool before_;
};

// The errors that Python raises as ValueError, TypeError and RuntimeError.
inline const std::type_info& kValueError = typeid(c10::ValueError);
inline const std::type_info& kTypeError = typeid(c10::TypeError);
inline const std::type_info& kRuntimeError = typeid(c10::Error);

// `call` throws an error of exactly that class with exactly that text.
void expect_error(
    const std::function<void()>& call, const std::type_info& error, const std::string& text);

// Whether a rounding error of a pre-activation may be an error of any size in a gradient, since the
// derivative jumps: then only the distribution of errors says something (tests_py/accuracy.py).
bool has_jumps(const Arguments& arguments);

// The distance from 1 to the next larger number.
double epsilon(at::ScalarType dtype);

// The same in plain PyTorch operations on the same arguments; a step of a cell of torch.nn is that
// of ATen, such as at::lstm_cell.
Tensors eager_cell(const Arguments& arguments);
Tensors eager_sequence(const Arguments& arguments);

// input, h, c, weights, bias, weight_hh, bias_hh: those that there are.
Tensors differentiable(const Arguments& arguments);

// A copy whose differentiable arguments are replaced, in that order.
Arguments with(const Arguments& arguments, const Tensors& replaced);

// A copy whose differentiable arguments are fresh leaves that require a
// gradient; strides are kept, since the leaves share the memory.
Arguments requiring_grad(const Arguments& arguments);

// Sizes of a problem; a step has no T.
struct Sizes {
  int64_t T = 1, B = 1, I = 1, H = 1;
};
void PrintTo(const Sizes& sizes, std::ostream* stream);

// Random arguments with weights of the usual initialisation, ±1/sqrt(H).
Arguments cell_problem(
    const Sizes& sizes,
    at::ScalarType dtype,
    uint64_t seed,
    bool bias = true,
    std::string_view cell = "lltm");
Arguments sequence_problem(
    const Sizes& sizes,
    at::ScalarType dtype,
    uint64_t seed,
    bool bias = true,
    std::string_view cell = "lltm");

// A packed one: row b of the batch has lengths[b] steps, in falling order.
Arguments packed_problem(
    const std::vector<int64_t>& lengths,
    int64_t input_size,
    int64_t hidden_size,
    at::ScalarType dtype,
    uint64_t seed,
    std::string_view cell = "lltm");

// Normally distributed values shaped as `like`, of its dtype.
at::Tensor random_like(const at::Tensor& like, uint64_t seed);
Tensors random_like(const Tensors& like, uint64_t seed);

// Values and gradients of one call.
struct Evaluation {
  Tensors outputs;
  Tensors gradients;  // in the order of `differentiable`; zero where autograd gives none
};

// Calls `function` and backpropagates grad_outputs, of which undefined ones
// are outputs that the caller does not use.
Evaluation evaluate(
    const Function& function, const Arguments& arguments, const Tensors& grad_outputs);

// The same by the oracle; undefined grad_outputs are zero. That of the LLTM is reference.h, that of
// the others plain PyTorch in float64.
struct Expected {
  std::vector<reference::Matrix<>> outputs;
  std::vector<reference::Matrix<>> gradients;
};
Expected expect(const Arguments& arguments, const Tensors& grad_outputs);

// A bound that few draws keep (the rule of docs/accuracy.md is of distributions), with
// e(y) = max|y - y64| / max|y64|:
//     e(ours) <= 2 max(e(eager), 4 eps of the dtype).
// The maxima go over everything that is added. In a result of few elements
// they are a matter of luck, so small problems are judged several at a time.
class Comparison {
 public:
  void add(const at::Tensor& ours, const at::Tensor& eager, const reference::Matrix<>& y64);
  ::testing::AssertionResult result() const;

 private:
  double ours_ = 0;   // max|y - y64|
  double eager_ = 0;  // max|y - y64|
  double scale_ = 0;  // max|y64|
  double eps_ = 0;
  std::string mismatch_;  // of dtype or shape, between ours and eager
};

::testing::AssertionResult is_accurate(
    const at::Tensor& ours, const at::Tensor& eager, const reference::Matrix<>& y64);

// Arguments for each seed.
using Problem = std::function<Arguments(uint64_t seed)>;

// What flows back into the outputs; undefined for those that are not used.
using OutputGradients = std::function<Tensors(const Tensors& outputs, uint64_t seed)>;
inline const OutputGradients kRandom = [](const Tensors& outputs, uint64_t seed) {
  return random_like(outputs, seed);
};

// Every output and gradient of each of `ours` meets the statement, with `baseline` in
// the place of eager; outputs are contiguous. Seeds 1, 2, ... until the
// smallest result has had some hundred elements, and at least `problems`.
void check_all(
    const std::vector<Function>& ours,
    const Function& baseline,
    const Problem& problem,
    const OutputGradients& output_gradients = kRandom,
    uint64_t problems = 3);
void check(
    const Function& ours,
    const Function& baseline,
    const Problem& problem,
    const OutputGradients& output_gradients = kRandom,
    uint64_t problems = 3);

// The library against eager, by default with random output gradients.
void check_step(const Problem& problem, const OutputGradients& output_gradients = kRandom);
void check_sequence(const Problem& problem, const OutputGradients& output_gradients = kRandom);

// `count` threads against one in the place of eager, and against themselves:
// no element differs from run to run.
void check_threads(const Function& function, int count, const Arguments& arguments);

// The same results from memory that is NaN before it is written to as from any: no
// more is read than was written.
void check_uninitialised_memory(const Function& function, const Arguments& arguments);

// A way to lay out a tensor of at least one dimension in memory. Some repeat
// elements, so that the values change too.
struct Layout {
  const char* name;
  at::Tensor (*apply)(const at::Tensor& tensor);
};
const std::vector<Layout>& layouts();

// Those differentiable arguments of the given positions, or all tensors.
Arguments laid_out(
    const Arguments& arguments, const Layout& layout, const std::vector<size_t>& positions);
Tensors laid_out(const Tensors& tensors, const Layout& layout);

// The positions to try of a cell's arguments: one after another, then all; with the weights or not.
std::vector<std::vector<size_t>> positions_of(std::string_view cell, bool weights = true);
inline const std::vector<std::vector<size_t>> kPositions = positions_of("lltm");

// The function of contiguous copies of the arguments.
Function contiguous(const Function& function);

// A sequence of the flipped input in reverse, its output flipped again: the same results.
Function against_the_steps(const Function& sequence);

// A scalar of float64 tensors.
using Scalar = std::function<at::Tensor(const Tensors&)>;

// The outputs of `function`, weighted and summed: a function of the
// differentiable arguments followed by one weight per output.
Scalar weighted_sum(const Function& function, const Arguments& arguments);

// Those arguments and random weights.
Tensors weighted_sum_point(const Function& function, const Arguments& arguments, uint64_t seed);

// Relative difference between the derivative of `function` along random
// directions that autograd gives and the one by central differences.
double derivative_error(const Scalar& function, const Tensors& x, uint64_t seed);
constexpr double kDerivativeTolerance = 1e-7;

// The derivative of `function` along a random direction, as a function of the
// same tensors: applied once for second derivatives, twice for third ones.
Scalar derivative(const Scalar& function, uint64_t seed);

// The same for forward mode and every element of the outputs, absolute.
double forward_mode_error(const Function& function, const Arguments& arguments, uint64_t seed);

// Equal elements, without any tolerance; NaN equals NaN.
bool identical(const at::Tensor& a, const at::Tensor& b);
bool identical(const Tensors& a, const Tensors& b);

// Memory for matrices of up to three rows, each 2^31 elements after the one
// before. Only the pages that are written to take any room.
class FarApart {
 public:
  explicit FarApart(at::ScalarType dtype);
  ~FarApart();
  FarApart(const FarApart&) = delete;
  FarApart& operator=(const FarApart&) = delete;

  // A copy whose first element stands at `offset` of the first row of memory.
  at::Tensor copy(const at::Tensor& matrix, int64_t offset) const;

 private:
  size_t bytes_;
  void* memory_;
  at::Tensor elements_;
};

// "float32" and so on, for the names of tests.
std::string name(at::ScalarType dtype);

constexpr std::array<at::ScalarType, 4> kDtypes = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

}  // namespace lltm_test
