// Seeded problems for the operators, the accuracy baseline (PyTorch operations, "eager") and bound.
#pragma once

#include "cell/cells.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <concepts>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

namespace lltm_test {

inline const std::vector<const char*> kCells = [] {
  std::vector<const char*> names;
  for (const lltm::CellInfo* cell : lltm::kCells) names.push_back(cell->name);
  return names;
}();
const lltm::CellInfo& info_of(std::string_view cell);
inline const std::vector<const char*> kBoundedCells = [] {
  std::vector<const char*> names;
  for (const lltm::CellInfo* cell : lltm::kCells) {
    if (cell->bounded) names.push_back(cell->name);
  }
  return names;
}();

// A step's input is (B, I).
struct Arguments {
  at::Tensor input, h, c, weights;
  std::optional<at::Tensor> bias;
  std::optional<at::Tensor> batch_sizes;
  bool reverse = false;
  // One of kCells. Others than the LLTM have two matrices: `weights` and `bias` for the input, the
  // members below for h.
  std::string_view cell = "lltm";
  std::optional<at::Tensor> weight_hh, bias_hh;
  // (T, B) or packed (N), bool.
  std::optional<at::Tensor> reset;
  std::optional<at::Tensor> recurrent_mask;
};

using Tensors = std::vector<at::Tensor>;

// A step's (h', c') or a sequence's (output, h_n, c_n), without c if the cell has none.
using Function = std::function<Tensors(const Arguments&)>;

// In gradient order.
std::vector<const char*> argument_names(const Arguments& arguments);

// Library calls. Prepacked weights are quantized if a dtype is given.
Tensors cell(const Arguments& arguments);
Tensors sequence(const Arguments& arguments);
Function checkpointed(int64_t checkpoint_steps);
Function prepacked(std::optional<at::ScalarType> dtype = std::nullopt);
Tensors sequence_of_packed(const Arguments& arguments, const at::Tensor& packed_weights);

using Stack = std::vector<c10::IValue>;
Stack call(const char* name, Stack stack);
// Arguments in schema order.
Stack step_stack(const Arguments& arguments);
Stack sequence_stack(const Arguments& arguments, int64_t checkpoint_steps = 0);

// About a quarter of the batch elements.
at::Tensor random_reset(const Arguments& arguments, uint64_t seed);
// 1.5 for two thirds of the elements, otherwise 0.
at::Tensor random_mask(const Arguments& arguments, uint64_t seed);

at::Tensor pack(const Arguments& arguments, std::optional<at::ScalarType> dtype = std::nullopt);

// Sets the number of threads.
class ThreadCount {
 public:
  explicit ThreadCount(int count);
  ~ThreadCount();
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

class TemporaryFolder : public testing::Test {
 protected:
  TemporaryFolder();
  ~TemporaryFolder() override;

  std::string path(const std::string& name) const { return folder_ + name; }

 private:
  std::string folder_;  // ends with /
};

// Collects warnings.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

class PersistentSetting {
 public:
  explicit PersistentSetting(bool enabled);
  ~PersistentSetting();
  PersistentSetting(const PersistentSetting&) = delete;
  PersistentSetting& operator=(const PersistentSetting&) = delete;

 private:
  bool before_;
};

// Raised in Python as ValueError, TypeError and RuntimeError.
inline const std::type_info& kValueError = typeid(c10::ValueError);
inline const std::type_info& kTypeError = typeid(c10::TypeError);
inline const std::type_info& kRuntimeError = typeid(c10::Error);

// Requires exactly this class and message.
void expect_error(
    const std::function<void()>& call, const std::type_info& error, const std::string& text);

// A derivative jumps: a small rounding error may cause a large gradient error, and only the error
// distribution is meaningful (tests_py/accuracy.py).
bool has_jumps(const Arguments& arguments);

double epsilon(at::ScalarType dtype);

// torch.nn cells use ATen functions such as at::lstm_cell.
Tensors eager_cell(const Arguments& arguments);
Tensors eager_sequence(const Arguments& arguments);

// Defined arguments in this order: input, h, c, weights, bias, weight_hh, bias_hh.
Tensors differentiable(const Arguments& arguments);

Arguments with(const Arguments& arguments, const Tensors& replaced);

// The differentiable arguments are new leaves that share memory: strides are kept.
Arguments requiring_grad(const Arguments& arguments);

// A step has no T.
struct Sizes {
  int64_t T = 1, B = 1, I = 1, H = 1;
};
void PrintTo(const Sizes& sizes, std::ostream* stream);

// Weights are initialized within ±1/sqrt(H).
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

// Batch element b has lengths[b] steps, in falling order.
Arguments packed_problem(
    const std::vector<int64_t>& lengths,
    int64_t input_size,
    int64_t hidden_size,
    at::ScalarType dtype,
    uint64_t seed,
    std::string_view cell = "lltm");

// From `longest` to about longest / rows.
std::vector<int64_t> falling_lengths(int64_t rows, int64_t longest);

at::Tensor random_like(const at::Tensor& like, uint64_t seed);
Tensors random_like(const Tensors& like, uint64_t seed);

struct Evaluation {
  Tensors outputs;
  Tensors gradients;  // in the order of `differentiable`; zero if undefined
};

// Undefined elements of grad_outputs mark unused outputs.
Evaluation evaluate(
    const Function& function, const Arguments& arguments, const Tensors& grad_outputs);

Tensors in_double(Tensors tensors);

// Such as `evaluate` with a certain function.
using Evaluator = std::function<Evaluation(const Arguments&, const Tensors& grad_outputs)>;

// The oracle: PyTorch in float64.
Evaluation expect(const Arguments& arguments, const Tensors& grad_outputs);

// A bound for few samples (docs/accuracy.md has the criterion):
//     e(ours) <= 2 max(e(eager), 4 eps of the dtype),  e(y) = max|y - y64| / max|y64|
::testing::AssertionResult is_accurate(
    const at::Tensor& ours, const at::Tensor& eager, const at::Tensor& y64);

using Problem = std::function<Arguments(uint64_t seed)>;

// With the shapes and dtype of the outputs, uninitialized or random.
Tensors like_outputs(const Arguments& arguments);
Tensors random_gradients(const Arguments& arguments, uint64_t seed = 2);

// Undefined gradients are of unused outputs.
using OutputGradients = std::function<Tensors(const Arguments& arguments, uint64_t seed)>;
inline const OutputGradients kRandom = random_gradients;

// One or several.
struct Functions : std::vector<Function> {
  using vector::vector;
  template <std::convertible_to<Function> F>
  Functions(const F& function) : vector{Function(function)} {}
};

// All outputs and gradients of `ours` meet the bound of is_accurate, with `baseline` instead of
// eager. Outputs must be contiguous. The maxima cover several small problems, because errors of
// single small results are random: at least `problems` seeds, until the smallest result has a
// hundred elements.
void check(
    const Functions& ours,
    const Function& baseline,
    const Problem& problem,
    const OutputGradients& output_gradients = kRandom,
    uint64_t problems = 3);
void check(
    const Functions& ours,
    const Evaluator& baseline,
    const Evaluator& oracle,
    const Problem& problem,
    const OutputGradients& output_gradients = kRandom,
    uint64_t problems = 3);

// With one thread as baseline; repeated runs bitwise.
void check_threads(const Function& function, int count, const Arguments& arguments);

// Uninitialized memory is filled with NaN.
void check_uninitialised_memory(const Function& function, const Arguments& arguments);

// A memory layout. Layouts that repeat elements change the values.
struct Layout {
  const char* name;
  at::Tensor (*apply)(const at::Tensor& tensor);
};
const std::vector<Layout>& layouts();

// Arguments at these positions, or all tensors.
Arguments laid_out(
    const Arguments& arguments, const Layout& layout, const std::vector<size_t>& positions);
Tensors laid_out(const Tensors& tensors, const Layout& layout);

// Each argument, then all, with or without weights.
std::vector<std::vector<size_t>> positions_of(std::string_view cell, bool weights = true);
inline const std::vector<std::vector<size_t>> kPositions = positions_of("lltm");

Function contiguous(const Function& function);

// Flips the input, runs in reverse and flips the output.
Function against_the_steps(const Function& sequence);

// Up to rounding; NaN equals NaN.
bool close(const Tensors& a, const Tensors& b);

// No tolerance: for copies, and for calls of the same kernels with the same operands and threads.
bool identical(const at::Tensor& a, const at::Tensor& b);
bool identical(const Tensors& a, const Tensors& b);
bool identical(const Evaluation& a, const Evaluation& b);

std::string name(at::ScalarType dtype);

constexpr std::array<at::ScalarType, 4> kDtypes = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

}  // namespace lltm_test
