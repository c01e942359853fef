// The operators in PyTorch's dispatcher: which kernels stand behind them, what
// the meta device says of their results, what autocast does to them.
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <lltm/nn.h>

#include <algorithm>
#include <array>
#include <tuple>

namespace lltm_test {
namespace {

using c10::DispatchKey;

const char* const kOperators[] = {
    "lltm::prepack",
    "lltm::sequence",
    "lltm::sequence_backward",
    "lltm::sequence_forward",
    "lltm::sequence_prepacked",
    "lltm::step",
    "lltm::step_backward",
    "lltm::step_forward",
};

// The functions of the Python module, which have no kernels of their own.
const char* const kBindingOperators[] = {
    "lltm::_build_info",
    "lltm::_cpu_kernels",
    "lltm::_cuda_persistent",
    "lltm::_pair_backward",
    "lltm::_pair_forward",
    "lltm::_set_cuda_persistent",
    "lltm::_version",
};

// Those that are composed of other operators, and have no kernels of their own.
const char* const kCompositions[] = {
    "lltm::_cell",
    "lltm::_instructions",
    "lltm::_sequence_gradients",
    "lltm::_sequence_operands",
    "lltm::_sequence_step",
    "lltm::_sequence_step_backward",
    "lltm::layer",
    "lltm::layer_step"};

TEST(Dispatch, TheNamespaceHoldsTheseOperators) {
  std::vector<std::string> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() == "lltm") {
      names.push_back(name.name + name.overload_name);
    }
  }
  std::sort(names.begin(), names.end());
  std::vector<std::string> expected(std::begin(kBindingOperators), std::end(kBindingOperators));
  expected.insert(expected.end(), std::begin(kOperators), std::end(kOperators));
  expected.insert(expected.end(), std::begin(kCompositions), std::end(kCompositions));
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(names, expected);
}

TEST(Dispatch, EveryOperatorHasItsKernels) {
  for (const char* const name : kOperators) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    for (const DispatchKey key :
         {DispatchKey::CPU,
          DispatchKey::Meta,
          DispatchKey::Autograd,
          DispatchKey::FuncTorchBatched,
          DispatchKey::CompositeExplicitAutograd}) {
      EXPECT_TRUE(op.hasKernelForDispatchKey(key)) << name << ' ' << c10::toString(key);
    }
  }
  for (const char* const name : {"lltm::step", "lltm::sequence"}) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    for (const DispatchKey key : {DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}) {
      EXPECT_TRUE(op.hasKernelForDispatchKey(key)) << name << ' ' << c10::toString(key);
    }
  }
}

// Nothing is written to arguments and no result is a view of one: compiled
// graphs rely on it.
TEST(Dispatch, SchemasDeclareNoAliasing) {
  for (const char* const name : kOperators) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    for (const auto& argument : op.schema().arguments()) {
      EXPECT_EQ(argument.alias_info(), nullptr) << name << ' ' << argument.name();
    }
    for (const auto& result : op.schema().returns()) {
      EXPECT_EQ(result.alias_info(), nullptr) << name << ' ' << result.name();
    }
  }
}

// ---- operators called by name, with every argument in a stack --------------

Stack call(const char* name, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack;
}

// The same on the meta device, batch_sizes excepted.
Stack on_meta(Stack stack) {
  for (c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().scalar_type() != at::kLong) {
      value = value.toTensor().to(at::kMeta);
    }
  }
  return stack;
}

struct Call {
  const char* name;
  Stack stack;
};

// The arguments of backward: those of forward, and others.
Stack backward_stack(Stack forward, const Stack& others) {
  forward.insert(forward.end(), others.begin(), others.end());
  return forward;
}

// One call of each operator, packed ones beside dense ones, every gradient
// wanted and only some.
std::vector<Call> calls(at::ScalarType dtype, const char* cell) {
  const std::vector<bool> all(7, true);
  const std::vector<bool> some = {true, false, true, false, true, true, false};
  const c10::IValue none;
  std::vector<Call> calls;

  const Arguments a = cell_problem({1, 4, 3, 5}, dtype, 1, /*bias=*/true, cell);
  const Stack step = step_stack(a);
  calls.push_back({"lltm::step", step});
  calls.push_back({"lltm::step_forward", step});
  const at::Tensor activations = call("lltm::step_forward", step)[2].toTensor();
  for (const auto& mask : {all, some}) {
    for (const c10::IValue& grad_c : {a.c.defined() ? c10::IValue(a.c) : none, none}) {
      calls.push_back(
          {"lltm::step_backward", backward_stack(step, {activations, a.h, grad_c, mask})});
    }
  }

  for (const Arguments& s :
       {sequence_problem({2, 4, 3, 5}, dtype, 1, /*bias=*/true, cell),
        packed_problem({3, 2, 2}, 3, 5, dtype, 1, cell),
        sequence_problem({0, 4, 3, 5}, dtype, 1, /*bias=*/true, cell)}) {
    for (const int64_t checkpoint_steps : {0, 1, 2, 5}) {
      const Stack stack = sequence_stack(s, checkpoint_steps);
      calls.push_back({"lltm::sequence", stack});
      calls.push_back({"lltm::sequence_forward", stack});
      const Stack results = call("lltm::sequence_forward", stack);
      for (const auto& mask : {all, some}) {
        calls.push_back(
            {"lltm::sequence_backward",
             backward_stack(stack, {results[0], results[3], results[0], results[1], none, mask})});
      }
    }
  }
  return calls;
}

class DispatchDtype : public testing::TestWithParam<std::tuple<at::ScalarType, const char*>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  const char* cell() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    DispatchDtype,
    testing::Combine(testing::ValuesIn(kDtypes), testing::ValuesIn(kCells)),
    [](const testing::TestParamInfo<DispatchDtype::ParamType>& info) {
      return name(std::get<0>(info.param)) + '_' + std::get<1>(info.param);
    });

TEST_P(DispatchDtype, MetaResultsLookLikeThoseOfTheCPU) {
  for (const Call& c : calls(dtype(), cell())) {
    SCOPED_TRACE(c.name);
    const Stack cpu = call(c.name, c.stack);
    const Stack meta = call(c.name, on_meta(c.stack));
    ASSERT_EQ(cpu.size(), meta.size());
    for (size_t k = 0; k < cpu.size(); ++k) {
      SCOPED_TRACE(testing::Message() << "result " << k);
      const at::Tensor& expected = cpu[k].toTensor();
      const at::Tensor& result = meta[k].toTensor();
      ASSERT_EQ(result.defined(), expected.defined());
      if (expected.defined()) {
        EXPECT_TRUE(result.is_meta());
        EXPECT_EQ(result.sizes(), expected.sizes());
        EXPECT_EQ(result.strides(), expected.strides());
        EXPECT_EQ(result.scalar_type(), expected.scalar_type());
      }
    }
  }
}

// Of the backward operators themselves: autograd would sum a bias gradient of
// (1, 3H) into one of (3H) without a word.
TEST_P(DispatchDtype, GradientsHaveTheShapesOfTheArguments) {
  const c10::IValue none;
  const std::vector<bool> all(7, true);
  const auto expect_shapes = [&](const Stack& arguments, const Stack& gradients) {
    // input, h, c, weight_ih, weight_hh, bias_ih, bias_hh follow the cell's name.
    for (size_t k = 0; k < all.size(); ++k) {
      const c10::IValue& argument = arguments[k + 1];
      const bool given = argument.isTensor() && argument.toTensor().defined();
      ASSERT_EQ(gradients[k].toTensor().defined(), given) << k;
      if (given) {
        EXPECT_EQ(gradients[k].toTensor().sizes(), argument.toTensor().sizes()) << k;
      }
    }
  };
  const Arguments a = cell_problem({1, 4, 3, 5}, dtype(), 1, /*bias=*/true, cell());
  const Stack step = step_stack(a);
  const at::Tensor activations = call("lltm::step_forward", step)[2].toTensor();
  expect_shapes(
      step,
      call(
          "lltm::step_backward",
          backward_stack(step, {activations, a.h, a.c.defined() ? c10::IValue(a.c) : none, all})));

  const Arguments s = sequence_problem({2, 4, 3, 5}, dtype(), 1, /*bias=*/true, cell());
  const Stack stack = sequence_stack(s);
  const Stack steps = call("lltm::sequence_forward", stack);
  expect_shapes(
      stack,
      call(
          "lltm::sequence_backward",
          backward_stack(
              stack,
              {steps[0], steps[3], steps[0], steps[1], a.c.defined() ? steps[2] : none, all})));
}

// What a user sees of a cell without c.
TEST(Dispatch, ACellWithoutCReturnsAnEmptyOne) {
  const Arguments a = cell_problem({1, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, "gru");
  EXPECT_EQ(call("lltm::step", step_stack(a))[1].toTensor().sizes(), at::IntArrayRef({0}));
  const Arguments s = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, "gru");
  EXPECT_EQ(call("lltm::sequence", sequence_stack(s))[2].toTensor().sizes(), at::IntArrayRef({0}));
}

// ---- autocast -------------------------------------------------------------

class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype) : before_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::ScalarType before_;
};

struct AutocastCase {
  const char* name;
  Function function;
  Arguments arguments;
};

std::vector<AutocastCase> autocast_cases(at::ScalarType dtype) {
  return {
      {"LSTM cell", cell, cell_problem({1, 4, 3, 5}, dtype, 1, /*bias=*/true, "lstm")},
      {"GRU sequence", sequence, sequence_problem({3, 4, 3, 5}, dtype, 1, /*bias=*/true, "gru")},
      {"cell", cell, cell_problem({1, 4, 3, 5}, dtype, 1)},
      {"sequence", sequence, sequence_problem({3, 4, 3, 5}, dtype, 1)},
      {"packed sequence", sequence, packed_problem({3, 2, 2}, 3, 5, dtype, 1)},
      {"checkpointed sequence", checkpointed(2), sequence_problem({3, 4, 3, 5}, dtype, 1)},
  };
}

TEST(DispatchAutocast, ComputesInTheAutocastDtype) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& [name, function, arguments] : autocast_cases(at::kFloat)) {
      SCOPED_TRACE(testing::Message() << name << ' ' << dtype);
      Tensors casted;
      for (const at::Tensor& tensor : differentiable(arguments)) {
        casted.push_back(tensor.to(dtype));
      }
      const Tensors expected = function(with(arguments, casted));
      const Autocast autocast(dtype);
      const Tensors outputs = function(arguments);
      EXPECT_TRUE(identical(outputs, expected));
      EXPECT_EQ(outputs[0].scalar_type(), dtype);
    }
  }
}

TEST(DispatchAutocast, ArgumentsOfMixedDtypesAreBroughtTogether) {
  Arguments arguments = cell_problem({1, 4, 3, 5}, at::kFloat, 1);
  arguments.h = arguments.h.to(at::kBFloat16);
  arguments.input = arguments.input.to(at::kHalf);
  const Autocast autocast(at::kBFloat16);
  for (const at::Tensor& output : cell(arguments)) {
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  }
}

TEST(DispatchAutocast, GradientsHaveTheDtypeOfTheArguments) {
  for (const auto& [name, function, arguments] : autocast_cases(at::kFloat)) {
    SCOPED_TRACE(name);
    const Arguments leaves = requiring_grad(arguments);
    {
      const Autocast autocast(at::kBFloat16);
      function(leaves)[0].sum().backward();
    }
    for (const at::Tensor& leaf : differentiable(leaves)) {
      ASSERT_TRUE(leaf.grad().defined());
      EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
    }
  }
}

TEST(DispatchAutocast, AppliesToTheModules) {
  at::manual_seed(1);
  lltm::LLTM layer(lltm::LLTMOptions(3, 5).num_layers(2).bidirectional(true));
  lltm::LLTMCell step(3, 5);
  const at::Tensor input = at::randn({6, 4, 3});
  const lltm::State state{at::randn({4, 4, 5}), at::randn({4, 4, 5})};  // float32
  Tensors results;
  {
    const Autocast autocast(at::kBFloat16);
    const auto [output, final_state] = layer->forward(input, state);
    const auto [h, c] = step->forward(input[0]);
    results = {output, std::get<0>(final_state), std::get<1>(final_state), h, c};
  }
  at::Tensor total = at::zeros({});
  for (const at::Tensor& result : results) {
    EXPECT_EQ(result.scalar_type(), at::kBFloat16);
    total = total + result.to(at::kFloat).square().sum();
  }
  total.backward();
  for (const torch::nn::Module* module :
       {static_cast<torch::nn::Module*>(layer.get()),
        static_cast<torch::nn::Module*>(step.get())}) {
    for (const at::Tensor& parameter : module->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
  }
}

TEST(DispatchAutocast, Float64StaysAsItIs) {
  for (const auto& [name, function, arguments] : autocast_cases(at::kDouble)) {
    SCOPED_TRACE(name);
    const Tensors expected = function(arguments);
    const Autocast autocast(at::kBFloat16);
    const Tensors outputs = function(arguments);
    EXPECT_TRUE(identical(outputs, expected));
    EXPECT_EQ(outputs[0].scalar_type(), at::kDouble);
  }
}

}  // namespace
}  // namespace lltm_test
