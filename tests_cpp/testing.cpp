#include "testing.h"

#include "common/heads.h"

#include <lltm/backends.h>
#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <numeric>
#include <sstream>

namespace lltm_test {
namespace {

using at::Tensor;

// LLTM_TEST_SEED: other random numbers in every problem.
at::Generator generator_of(uint64_t seed) {
  static const char* const all = std::getenv("LLTM_TEST_SEED");
  return at::detail::createCPUGenerator(seed + (all == nullptr ? 0 : 1'000'003 * std::stoull(all)));
}

at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype, at::Generator& generator) {
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(dtype);
}

Arguments states_and_weights(
    const Sizes& s,
    at::ScalarType dtype,
    at::Generator& generator,
    bool bias,
    std::string_view cell) {
  const double bound = s.H == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(s.H));
  const auto uniform = [&](at::IntArrayRef shape) {
    const at::Tensor unit = at::rand(shape, generator, at::TensorOptions(at::kDouble));
    return unit.mul(2 * bound).sub(bound).to(dtype);
  };
  Arguments arguments;
  arguments.h = normal({s.B, s.H}, dtype, generator);
  const lltm::CellInfo& info = info_of(cell);
  if (info.has_c()) arguments.c = normal({s.B, info.states * s.H}, dtype, generator);
  const int64_t of_x = info.x.count() * s.H, of_h = info.h.count() * s.H;
  arguments.cell = cell;
  arguments.weights = uniform({of_x, info.concatenated ? s.H + s.I : s.I});
  if (!info.concatenated) arguments.weight_hh = uniform({of_h, s.H});
  if (bias) arguments.bias = uniform({of_x});
  if (bias && !info.concatenated) arguments.bias_hh = uniform({of_h});
  return arguments;
}

std::vector<int64_t> rows_per_step(const Arguments& arguments) {
  if (arguments.batch_sizes) {
    const at::Tensor sizes = arguments.batch_sizes->contiguous();
    const int64_t* const first = sizes.const_data_ptr<int64_t>();
    return {first, first + sizes.numel()};
  }
  const int64_t steps = arguments.input.dim() == 3 ? arguments.input.size(0) : 1;
  return std::vector<int64_t>(static_cast<size_t>(steps), arguments.h.size(0));
}

bool is_step(const Arguments& arguments) {
  return arguments.input.dim() == 2 && !arguments.batch_sizes;
}

double largest(const Tensor& values) {
  return values.numel() == 0 ? 0 : values.abs().max().item<double>();
}

// max|y - y64|; infinity if y is not finite.
double largest_error(const Tensor& y, const Tensor& y64) {
  const double error = largest(y.detach().to(at::kDouble) - y64);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace

bool has_jumps(const Arguments& arguments) {
  return arguments.cell == "rnn_relu" && arguments.input.scalar_type() != at::kDouble;
}

const lltm::CellInfo& info_of(std::string_view cell) {
  for (const lltm::CellInfo* info : lltm::kCells) {
    if (cell == info->name) return *info;
  }
  TORCH_CHECK(false, "no cell ", cell);
}

void expect_error(
    const std::function<void()>& call, const std::type_info& error, const std::string& text) {
  try {
    call();
  } catch (const c10::Error& caught) {
    EXPECT_EQ(std::string(caught.what_without_backtrace()), text);
    EXPECT_TRUE(typeid(caught) == error) << typeid(caught).name();
    return;
  }
  ADD_FAILURE() << "nothing was thrown; expected: " << text;
}

namespace {

struct DtypeInfo {
  at::ScalarType dtype;
  const char* name;
  double epsilon;
};
const DtypeInfo& info_of(at::ScalarType dtype) {
  static constexpr DtypeInfo all[] = {
      {at::kDouble, "float64", 0x1p-52},
      {at::kFloat, "float32", 0x1p-23},
      {at::kBFloat16, "bfloat16", 0x1p-7},
      {at::kHalf, "float16", 0x1p-10}};
  for (const DtypeInfo& info : all) {
    if (info.dtype == dtype) return info;
  }
  TORCH_CHECK(false, "no test of ", dtype);
}

}  // namespace

double epsilon(at::ScalarType dtype) {
  return info_of(dtype).epsilon;
}

std::string name(at::ScalarType dtype) {
  return info_of(dtype).name;
}

namespace {

// Several states besides h are concatenated in c.
Tensors states_of(const Arguments& a) {
  int64_t count = a.c.defined() ? 1 : 0;
  for (const lltm::CellInfo* const info : lltm::kCells) {
    if (a.cell == info->name) count = info->states;
  }
  if (a.c.defined() && a.cell.starts_with("lltm-cell")) count = a.c.size(1) / a.h.size(1);
  if (count == 0) return {a.h};
  if (count == 1) return {a.h, a.c};
  Tensors states = a.c.chunk(count, 1);
  states.insert(states.begin(), a.h);
  return states;
}

Tensors with_states(Tensors first, const Tensors& states) {
  first.push_back(states[0]);
  if (states.size() == 2) first.push_back(states[1]);
  if (states.size() > 2) first.push_back(at::cat(at::TensorList(states).slice(1), 1));
  return first;
}

Tensors sequence_saving(const Arguments& a, int64_t checkpoint_steps) {
  const auto [output, states] = lltm::sequence(
      a.cell,
      a.input,
      states_of(a),
      a.weights,
      a.weight_hh,
      a.bias,
      a.bias_hh,
      a.batch_sizes,
      a.reverse,
      a.reset,
      checkpoint_steps,
      a.recurrent_mask);
  return with_states({output}, states);
}

}  // namespace

Tensors cell(const Arguments& a) {
  return with_states(
      {}, lltm::step(a.cell, a.input, states_of(a), a.weights, a.weight_hh, a.bias, a.bias_hh));
}

Tensors sequence(const Arguments& a) {
  return sequence_saving(a, /*checkpoint_steps=*/0);
}

Function checkpointed(int64_t checkpoint_steps) {
  return [=](const Arguments& a) { return sequence_saving(a, checkpoint_steps); };
}

Stack call(const char* name, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack;
}

Stack step_stack(const Arguments& a) {
  return {
      std::string(a.cell),
      a.input,
      a.h,
      a.c.defined() ? c10::IValue(a.c) : c10::IValue(),
      a.weights,
      a.weight_hh,
      a.bias,
      a.bias_hh};
}

Stack sequence_stack(const Arguments& a, int64_t checkpoint_steps) {
  Stack stack = step_stack(a);
  stack.insert(
      stack.end(), {a.batch_sizes, a.reverse, a.reset, checkpoint_steps, a.recurrent_mask});
  return stack;
}

Tensor random_reset(const Arguments& a, uint64_t seed) {
  const at::IntArrayRef rows = a.input.sizes().slice(0, a.input.dim() - 1);
  return random_like(at::empty(rows, at::kFloat), seed) < -0.5;
}

Tensor random_mask(const Arguments& a, uint64_t seed) {
  at::manual_seed(seed);
  return at::dropout(at::ones_like(a.h), 1 / 3.0, /*train=*/true);
}

Tensor pack(const Arguments& a, std::optional<at::ScalarType> dtype) {
  return lltm::prepack(a.cell, a.weights, a.weight_hh, dtype);
}

Tensors sequence_of_packed(const Arguments& a, const Tensor& weights) {
  Arguments with_packed = a;
  with_packed.weights = weights;
  with_packed.weight_hh = {};
  return sequence(with_packed);
}

Function prepacked(std::optional<at::ScalarType> dtype) {
  return [=](const Arguments& a) { return sequence_of_packed(a, pack(a, dtype)); };
}

ThreadCount::ThreadCount(int count) : before_(at::get_num_threads()) {
  at::set_num_threads(count);
}
ThreadCount::~ThreadCount() {
  at::set_num_threads(before_);
}

TemporaryFolder::TemporaryFolder() : folder_(testing::TempDir() + "lltm-XXXXXX") {
  TORCH_CHECK(mkdtemp(folder_.data()) != nullptr, "no temporary folder");
  folder_ += '/';
}
TemporaryFolder::~TemporaryFolder() {
  std::filesystem::remove_all(folder_);
}

PersistentSetting::PersistentSetting(bool enabled) : before_(lltm::cuda_persistent()) {
  lltm::set_cuda_persistent(enabled);
}
PersistentSetting::~PersistentSetting() {
  lltm::set_cuda_persistent(before_);
}

namespace {

// PyTorch's GRU. The GEMM reads `read` instead of h.
Tensors eager_gru(const Arguments& a, const at::Tensor& read) {
  const Tensors x = at::linear(a.input, a.weights, a.bias).chunk(3, 1);
  const Tensors h = at::linear(read, *a.weight_hh, a.bias_hh).chunk(3, 1);
  const at::Tensor r = at::sigmoid(x[0] + h[0]), u = at::sigmoid(x[1] + h[1]);
  return {at::lerp(at::tanh(x[2] + r * h[2]), a.h, u)};
}

}  // namespace

Tensors eager_cell(const Arguments& a) {
  at::Tensor read = a.h;
  if (a.recurrent_mask.has_value()) {
    read = read * a.recurrent_mask->narrow(0, 0, a.h.size(0)).to(a.h.scalar_type());
  }
  if (a.cell == "lstm") {
    const auto [h, c] =
        at::lstm_cell(a.input, {read, a.c}, a.weights, *a.weight_hh, a.bias, a.bias_hh);
    return {h, c};
  }
  if (a.cell == "gru" && a.recurrent_mask.has_value()) return eager_gru(a, read);
  if (a.cell != "lltm") {
    const std::string name = "aten::" + std::string(a.cell) + "_cell";
    return {call(name.c_str(), {a.input, read, a.weights, a.weight_hh, a.bias, a.bias_hh})[0]
                .toTensor()};
  }
  const at::Tensor z = at::linear(at::cat({read, a.input}, 1), a.weights, a.bias);
  const Tensors gates = z.chunk(3, 1);
  const at::Tensor c = a.c + at::sigmoid(gates[0]) * at::elu(gates[2]);
  return {at::sigmoid(gates[1]) * at::tanh(c), c};
}

Tensors eager_sequence(const Arguments& a) {
  const std::vector<int64_t> rows = rows_per_step(a);
  const auto steps = static_cast<int64_t>(rows.size());
  const bool packed = a.batch_sizes.has_value();
  const Tensors inputs = packed ? a.input.split_with_sizes(rows, 0) : a.input.unbind(0);
  Tensors resets;
  if (a.reset.has_value()) {
    resets = packed ? a.reset->split_with_sizes(rows, 0) : a.reset->unbind(0);
  }
  Tensors outputs(rows.size());
  Tensors states = {a.h};
  if (a.c.defined()) states.push_back(a.c);
  Arguments step = a;
  if (a.weight_hh) step.weight_hh = lltm::without_heads(*a.weight_hh);
  for (int64_t s = 0; s < steps; ++s) {
    const auto t = static_cast<size_t>(a.reverse ? steps - 1 - s : s);
    step.input = inputs[t];
    step.h = states[0].narrow(0, 0, rows[t]);
    if (a.c.defined()) step.c = states[1].narrow(0, 0, rows[t]);
    if (a.reset.has_value()) {
      const at::Tensor mask = resets[t].unsqueeze(1);
      step.h = step.h.masked_fill(mask, 0);
      if (a.c.defined()) step.c = step.c.masked_fill(mask, 0);
    }
    const Tensors next = eager_cell(step);
    outputs[t] = next[0];
    for (size_t k = 0; k < states.size(); ++k) {  // finished sequences keep their state
      const int64_t others = states[k].size(0) - rows[t];
      states[k] = at::cat({next[k], states[k].narrow(0, rows[t], others)});
    }
  }
  if (steps == 0) {
    const at::Tensor none = packed ? a.h : a.h.unsqueeze(0);
    for (at::Tensor& state : states) state = state.clone();
    states.insert(states.begin(), none.narrow(0, 0, 0));
    return states;
  }
  states.insert(states.begin(), packed ? at::cat(outputs) : at::stack(outputs));
  return states;
}

namespace {

template <typename Arguments, typename Visit>
void for_each_argument(Arguments& a, const Visit& visit) {
  const bool concatenated = a.cell == "lltm";
  visit("input", a.input);
  visit("h", a.h);
  if (a.c.defined()) visit("c", a.c);
  visit(concatenated ? "weights" : "weight_ih", a.weights);
  if (a.bias) visit(concatenated ? "bias" : "bias_ih", *a.bias);
  if (a.weight_hh) visit("weight_hh", *a.weight_hh);
  if (a.bias_hh) visit("bias_hh", *a.bias_hh);
}

}  // namespace

std::vector<const char*> argument_names(const Arguments& arguments) {
  std::vector<const char*> names;
  for_each_argument(arguments, [&](const char* name, const at::Tensor&) { names.push_back(name); });
  return names;
}

Tensors differentiable(const Arguments& arguments) {
  Tensors tensors;
  for_each_argument(
      arguments, [&](const char*, const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

Arguments with(const Arguments& arguments, const Tensors& replaced) {
  Arguments result = arguments;
  size_t k = 0;
  for_each_argument(result, [&](const char*, at::Tensor& tensor) { tensor = replaced.at(k++); });
  return result;
}

Arguments requiring_grad(const Arguments& arguments) {
  Tensors leaves;
  for (const at::Tensor& tensor : differentiable(arguments)) {
    leaves.push_back(tensor.detach().requires_grad_());
  }
  return with(arguments, leaves);
}

void PrintTo(const Sizes& sizes, std::ostream* stream) {
  *stream << "T=" << sizes.T << " B=" << sizes.B << " I=" << sizes.I << " H=" << sizes.H;
}

Arguments cell_problem(
    const Sizes& sizes, at::ScalarType dtype, uint64_t seed, bool bias, std::string_view cell) {
  at::Generator generator = generator_of(seed);
  Arguments arguments = states_and_weights(sizes, dtype, generator, bias, cell);
  arguments.input = normal({sizes.B, sizes.I}, dtype, generator);
  return arguments;
}

Arguments sequence_problem(
    const Sizes& sizes, at::ScalarType dtype, uint64_t seed, bool bias, std::string_view cell) {
  at::Generator generator = generator_of(seed);
  Arguments arguments = states_and_weights(sizes, dtype, generator, bias, cell);
  arguments.input = normal({sizes.T, sizes.B, sizes.I}, dtype, generator);
  return arguments;
}

Arguments packed_problem(
    const std::vector<int64_t>& lengths,
    int64_t input_size,
    int64_t hidden_size,
    at::ScalarType dtype,
    uint64_t seed,
    std::string_view cell) {
  at::Generator generator = generator_of(seed);
  std::vector<int64_t> batch_sizes(lengths.empty() ? 0 : static_cast<size_t>(lengths.front()));
  for (const int64_t length : lengths) {
    std::for_each_n(batch_sizes.begin(), length, [](int64_t& rows) { ++rows; });
  }
  const Sizes sizes = {0, static_cast<int64_t>(lengths.size()), input_size, hidden_size};
  Arguments arguments = states_and_weights(sizes, dtype, generator, true, cell);
  const int64_t rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  arguments.input = normal({rows, input_size}, dtype, generator);
  arguments.batch_sizes = at::tensor(batch_sizes, at::kLong);
  return arguments;
}

std::vector<int64_t> falling_lengths(int64_t rows, int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t row = 0; row < rows; ++row) lengths.push_back(longest - row * longest / rows);
  return lengths;
}

at::Tensor random_like(const at::Tensor& like, uint64_t seed) {
  at::Generator generator = generator_of(seed);
  return normal(like.sizes(), like.scalar_type(), generator);
}

Tensors random_like(const Tensors& like, uint64_t seed) {
  Tensors result;
  for (const at::Tensor& tensor : like) {
    result.push_back(random_like(tensor, seed++));
  }
  return result;
}

Tensors like_outputs(const Arguments& a) {
  std::vector<int64_t> shape = a.input.sizes().vec();
  shape.back() = a.h.size(1);
  Tensors outputs = {at::empty(shape, a.input.options())};
  if (!is_step(a)) outputs.push_back(at::empty_like(a.h));
  if (a.c.defined()) outputs.push_back(at::empty_like(a.c));
  return outputs;
}

Tensors random_gradients(const Arguments& arguments, uint64_t seed) {
  return random_like(like_outputs(arguments), seed);
}

Evaluation evaluate(
    const Function& function, const Arguments& arguments, const Tensors& grad_outputs) {
  const Arguments leaves = requiring_grad(arguments);
  const Tensors outputs = function(leaves), x = differentiable(leaves);
  Tensors used, gradients;
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (grad_outputs.at(k).defined()) {
      used.push_back(outputs[k]);
      gradients.push_back(grad_outputs[k]);
    }
  }
  gradients = torch::autograd::grad(
      used,
      x,
      gradients,
      /*retain_graph=*/std::nullopt,
      /*create_graph=*/false,
      /*allow_unused=*/true);
  for (size_t k = 0; k < gradients.size(); ++k) {
    if (!gradients[k].defined()) gradients[k] = at::zeros_like(x[k]);
  }
  return {outputs, gradients};
}

Tensors in_double(Tensors tensors) {
  for (Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.to(at::kDouble);
  }
  return tensors;
}

Evaluation expect(const Arguments& arguments, const Tensors& grad_outputs) {
  return evaluate(
      is_step(arguments) ? eager_cell : eager_sequence,
      with(arguments, in_double(differentiable(arguments))),
      in_double(grad_outputs));
}

namespace {

class Comparison {
 public:
  void add(const Tensor& ours, const Tensor& eager, const Tensor& y64) {
    if (!ours.defined() || !eager.defined()) {
      mismatch_ = "a result is undefined";
      return;
    }
    if (ours.sizes() != eager.sizes() || ours.scalar_type() != eager.scalar_type()) {
      std::ostringstream text;
      text << ours.scalar_type() << ' ' << ours.sizes() << ", but PyTorch gives "
           << eager.scalar_type() << ' ' << eager.sizes();
      mismatch_ = text.str();
      return;
    }
    ours_ = std::max(ours_, largest_error(ours, y64));
    eager_ = std::max(eager_, largest_error(eager, y64));
    scale_ = std::max(scale_, largest(y64));
    eps_ = epsilon(ours.scalar_type());
  }

  testing::AssertionResult result() const {
    if (!mismatch_.empty()) return testing::AssertionFailure() << mismatch_;
    if (!std::isfinite(eager_)) {
      return testing::AssertionFailure()
             << "the PyTorch reference is infinitely wrong here, so the comparison is meaningless";
    }
    // Scaled by max|y64|, which may be 0.
    const double bound = 2 * std::max(eager_, 4 * eps_ * scale_);
    if (ours_ <= bound) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "largest error: ours " << ours_ << ", eager " << eager_ << ", largest value "
           << scale_ << ", eps " << eps_ << ": " << ours_ / bound << " times what is allowed";
  }

 private:
  double ours_ = 0;   // max|y - y64|
  double eager_ = 0;  // max|y - y64|
  double scale_ = 0;  // max|y64|
  double eps_ = 0;
  std::string mismatch_;  // dtype or shape mismatch of ours and eager
};

struct Comparisons {
  std::vector<Comparison> outputs, gradients;

  void add(const Evaluation& ours, const Evaluation& eager, const Evaluation& expected) {
    outputs.resize(expected.outputs.size());
    gradients.resize(expected.gradients.size());
    ASSERT_EQ(ours.outputs.size(), outputs.size());
    ASSERT_EQ(ours.gradients.size(), gradients.size());
    for (size_t k = 0; k < outputs.size(); ++k) {
      outputs[k].add(ours.outputs[k], eager.outputs[k], expected.outputs[k]);
      EXPECT_TRUE(ours.outputs[k].is_contiguous()) << "output " << k;
    }
    for (size_t k = 0; k < gradients.size(); ++k) {
      gradients[k].add(ours.gradients[k], eager.gradients[k], expected.gradients[k]);
    }
  }

  void expect_accurate(const Arguments& arguments) const {
    const std::vector<const char*> names = argument_names(arguments);
    for (size_t k = 0; k < outputs.size(); ++k) {
      EXPECT_TRUE(outputs[k].result()) << "output " << k;
    }
    if (has_jumps(arguments)) return;
    for (size_t k = 0; k < gradients.size(); ++k) {
      EXPECT_TRUE(gradients[k].result()) << "gradient of " << names[k];
    }
  }
};

std::string describe(const Arguments& a, uint64_t seed) {
  std::ostringstream text;
  text << a.cell << ", seeds 1 to " << seed << "; " << a.input.scalar_type() << ", input "
       << a.input.sizes() << " strides " << a.input.strides() << ", h " << a.h.sizes() << ", bias "
       << a.bias.has_value() << ", reverse " << a.reverse;
  if (a.batch_sizes) {
    text << ", batch_sizes " << rows_per_step(a);
  }
  return text.str();
}

constexpr int64_t kFewestElements = 100;

int64_t fewest_elements(const Evaluation& expected) {
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (const Tensors& results : {expected.outputs, expected.gradients}) {
    for (const Tensor& result : results) {
      if (result.numel() > 0) fewest = std::min(fewest, result.numel());
    }
  }
  return fewest;
}

}  // namespace

testing::AssertionResult is_accurate(const Tensor& ours, const Tensor& eager, const Tensor& y64) {
  Comparison comparison;
  comparison.add(ours, eager, y64);
  return comparison.result();
}

void check(
    const Functions& ours,
    const Evaluator& baseline,
    const Evaluator& oracle,
    const Problem& problem,
    const OutputGradients& output_gradients,
    uint64_t problems) {
  std::vector<Comparisons> comparisons(ours.size());
  int64_t elements = 0;
  uint64_t seed = 0;
  while (seed < problems || elements < kFewestElements) {
    const Arguments arguments = problem(++seed);
    const Tensors grad_outputs = output_gradients(arguments, seed + 1000);
    const Evaluation eager = baseline(arguments, grad_outputs);
    const Evaluation expected = oracle(arguments, grad_outputs);
    for (size_t k = 0; k < ours.size(); ++k) {
      comparisons[k].add(evaluate(ours[k], arguments, grad_outputs), eager, expected);
    }
    elements += std::min(fewest_elements(expected), kFewestElements);
  }
  const Arguments first = problem(1);
  SCOPED_TRACE(describe(first, seed));
  for (size_t k = 0; k < ours.size(); ++k) {
    SCOPED_TRACE(testing::Message() << "function " << k << " of " << ours.size());
    comparisons[k].expect_accurate(first);
  }
}

void check(
    const Functions& ours,
    const Function& baseline,
    const Problem& problem,
    const OutputGradients& output_gradients,
    uint64_t problems) {
  const Evaluator eager = [&](const Arguments& arguments, const Tensors& grad_outputs) {
    return evaluate(baseline, arguments, grad_outputs);
  };
  check(ours, eager, expect, problem, output_gradients, problems);
}

void check_threads(const Function& function, int count, const Arguments& arguments) {
  SCOPED_TRACE(describe(arguments, 1) + ", threads " + std::to_string(count));
  const Tensors grad_outputs = random_gradients(arguments, 1000);
  const auto run = [&](int threads) {
    const ThreadCount thread_count(threads);
    return evaluate(function, arguments, grad_outputs);
  };
  const Evaluation one = run(1);
  const Evaluation several = run(count);
  Comparisons comparisons;
  comparisons.add(several, one, expect(arguments, grad_outputs));
  comparisons.expect_accurate(arguments);
  for (int repetition = 0; repetition < 3; ++repetition) {
    const Evaluation again = run(count);
    EXPECT_TRUE(identical(several, again));
  }
}

namespace {

class FilledMemory {
 public:
  FilledMemory()
      : algorithms_(at::globalContext().deterministicAlgorithms()),
        warn_(at::globalContext().deterministicAlgorithmsWarnOnly()),
        fill_(at::globalContext().deterministicFillUninitializedMemory()) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
    TORCH_CHECK(at::empty({1}).isnan().item<bool>(), "memory was not filled");
  }
  ~FilledMemory() {
    at::globalContext().setDeterministicAlgorithms(algorithms_, warn_);
    at::globalContext().setDeterministicFillUninitializedMemory(fill_);
  }
  FilledMemory(const FilledMemory&) = delete;
  FilledMemory& operator=(const FilledMemory&) = delete;

 private:
  bool algorithms_, warn_, fill_;
};

}  // namespace

void check_uninitialised_memory(const Function& function, const Arguments& arguments) {
  SCOPED_TRACE(describe(arguments, 1));
  const Tensors grad_outputs = random_gradients(arguments, 1000);
  const Evaluation before = evaluate(function, arguments, grad_outputs);
  const FilledMemory filled;
  const Evaluation after = evaluate(function, arguments, grad_outputs);
  EXPECT_TRUE(identical(after, before));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(close(function(arguments), before.outputs));
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> layouts = {
      {"transposed",
       [](const Tensor& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); }},
      {"every other column",
       [](const Tensor& t) {
         return at::stack({t, t + 1}, -1).flatten(-2).slice(-1, 0, std::nullopt, 2);
       }},
      {"every other row",
       [](const Tensor& t) {
         return at::stack({t, t + 1}, 1).flatten(0, 1).slice(0, 0, std::nullopt, 2);
       }},
      {"columns of a wider matrix",
       [](const Tensor& t) {
         return at::cat({t, t, t}, -1).slice(-1, t.size(-1), 2 * t.size(-1));
       }},
      {"overlapping rows",
       [](const Tensor& t) {
         return t.flatten().as_strided(t.sizes(), std::vector<int64_t>(t.dim(), 1));
       }},
      {"one row expanded", [](const Tensor& t) { return t.narrow(0, 0, 1).expand_as(t); }},
      {"one column expanded", [](const Tensor& t) { return t.narrow(-1, 0, 1).expand_as(t); }},
      {"one element expanded", [](const Tensor& t) { return t.flatten()[0].expand_as(t); }},
  };
  return layouts;
}

std::vector<std::vector<size_t>> positions_of(std::string_view cell, bool weights) {
  const lltm::CellInfo& info = info_of(cell);
  std::vector<bool> is_weight = {false, false};      // input, h
  if (info.has_c()) is_weight.push_back(false);      // c
  is_weight.insert(is_weight.end(), {true, false});  // weights and bias, or input weights
  if (!info.concatenated) is_weight.insert(is_weight.end(), {true, false});  // recurrent weights
  std::vector<std::vector<size_t>> positions;
  std::vector<size_t> all;
  for (size_t k = 0; k < is_weight.size(); ++k) {
    if (is_weight[k] && !weights) continue;
    positions.push_back({k});
    all.push_back(k);
  }
  positions.push_back(all);
  return positions;
}

Function contiguous(const Function& function) {
  return [function](const Arguments& arguments) {
    Tensors tensors;
    for (const at::Tensor& tensor : differentiable(arguments)) {
      tensors.push_back(tensor.contiguous());
    }
    return function(with(arguments, tensors));
  };
}

Function against_the_steps(const Function& sequence) {
  return [sequence](const Arguments& arguments) {
    Arguments flipped = arguments;
    flipped.input = arguments.input.flip(0);
    if (arguments.reset) flipped.reset = arguments.reset->flip(0);
    flipped.reverse = !arguments.reverse;
    Tensors results = sequence(flipped);
    results[0] = results[0].flip(0);
    return results;
  };
}

Arguments laid_out(
    const Arguments& arguments, const Layout& layout, const std::vector<size_t>& positions) {
  Tensors tensors = differentiable(arguments);
  for (const size_t position : positions) {
    tensors[position] = layout.apply(tensors[position]);
  }
  return with(arguments, tensors);
}

Tensors laid_out(const Tensors& tensors, const Layout& layout) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(layout.apply(tensor));
  }
  return result;
}

namespace {

bool agree(const Tensors& a, const Tensors& b, bool exactly) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [=](const at::Tensor& x, const at::Tensor& y) {
        if (!x.defined() || !y.defined()) return x.defined() == y.defined();
        const double eps = exactly ? 0 : epsilon(x.scalar_type());
        const double tolerance = (x.element_size() == 2 ? 4 : 128) * eps;
        return x.sizes() == y.sizes() &&
               at::allclose(x, y, tolerance, tolerance, /*equal_nan=*/true);
      });
}

}  // namespace

bool close(const Tensors& a, const Tensors& b) {
  return agree(a, b, /*exactly=*/false);
}

bool identical(const at::Tensor& a, const at::Tensor& b) {
  return identical(Tensors{a}, Tensors{b});
}

bool identical(const Tensors& a, const Tensors& b) {
  return agree(a, b, /*exactly=*/true);
}

bool identical(const Evaluation& a, const Evaluation& b) {
  return identical(a.outputs, b.outputs) && identical(a.gradients, b.gradients);
}

}  // namespace lltm_test
