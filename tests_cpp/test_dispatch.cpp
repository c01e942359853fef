// The operators' dispatcher kernels and C++ errors. Python tests cover other devices, autocast and
// messages (test_opcheck.py, test_properties.py, test_errors.py).
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace lltm_test {
namespace {

using c10::DispatchKey;

const char* const kOperators[] = {
    "lltm::prepack",
    "lltm::sequence",
    "lltm::sequence_backward",
    "lltm::sequence_forward",
    "lltm::step",
    "lltm::step_backward",
    "lltm::step_forward",
};

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

// Arguments are not modified and results are no views: compiled graphs require it.
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

TEST(Dispatch, ACellWithoutCReturnsAnEmptyOne) {
  for (const char* const name : kCells) {
    const Arguments a = cell_problem({1, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, name);
    const Arguments s = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, name);
    const std::vector<int64_t> of_c = a.c.defined() ? a.c.sizes().vec() : std::vector<int64_t>{0};
    EXPECT_EQ(call("lltm::step", step_stack(a))[1].toTensor().sizes(), of_c) << name;
    EXPECT_EQ(call("lltm::sequence", sequence_stack(s))[2].toTensor().sizes(), of_c) << name;
  }
}

// Without storage, so that the first ATen operation fails.
TEST(Dispatch, ADeviceWithoutKernelsWarnsOnce) {
  const auto on_xpu = [](const at::Tensor& like) {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(DispatchKey::XPU), like.dtype(), c10::Device(c10::kXPU, 0));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
    return tensor;
  };
  Arguments a = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/false, "lstm");
  for (at::Tensor* tensor : {&a.input, &a.h, &a.c, &a.weights}) *tensor = on_xpu(*tensor);
  a.weight_hh = on_xpu(*a.weight_hh);
  Warnings warnings;
  for (int call = 0; call < 2; ++call) EXPECT_THROW(sequence(a), c10::Error);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_NE(warnings.texts[0].find("on XPU, the cell lstm runs as"), std::string::npos);
  EXPECT_NE(warnings.texts[0].find("(this build has no kernels for the"), std::string::npos);
}

enum class Op { kCell, kSequence, kPacked };

// Only C++ can pass an undefined tensor.
struct WrongCall {
  const char* name;
  Op op;
  void (*change)(Arguments& arguments);
  const std::type_info& error;
  const char* text;
};

// B = 4, I = 3, H = 5, T = 2. Packed: batch_sizes 4, 2, so N = 6.
// clang-format off
const WrongCall kWrongCalls[] = {
    {"shape", Op::kCell, [](Arguments& a) { a.h = at::zeros({4, 6}); }, kValueError,
     "lltm::step: expected h of shape (4, 5), got (4, 6)"},
    {"value", Op::kPacked, [](Arguments& a) { a.batch_sizes = *a.batch_sizes + 1; }, kValueError,
     "lltm::sequence: expected batch_sizes to begin with 4, the batch size of h_0, got 5"},
    {"dtype", Op::kCell, [](Arguments& a) { a.weights = a.weights.to(at::kHalf); }, kTypeError,
     "lltm::step: expected input of dtype float16, got float32"},
    {"device", Op::kSequence, [](Arguments& a) { a.c = a.c.to(at::kMeta); }, kRuntimeError,
     "lltm::sequence: expected c_0 on device cpu, got meta"},
    {"input_undefined", Op::kCell, [](Arguments& a) { a.input = at::Tensor(); }, kTypeError,
     "lltm::step: expected input to be a tensor, got an undefined tensor"},
    {"h_undefined", Op::kCell, [](Arguments& a) { a.h = at::Tensor(); }, kTypeError,
     "lltm::step: expected h to be a tensor, got an undefined tensor"},
    {"c_undefined", Op::kCell, [](Arguments& a) { a.c = at::Tensor(); }, kTypeError,
     "lltm::step: expected c to be a tensor, got an undefined tensor"},
    {"weights_undefined", Op::kCell, [](Arguments& a) { a.weights = at::Tensor(); }, kTypeError,
     "lltm::step: expected weight_ih to be a tensor, got an undefined tensor"},
    {"c_0_undefined", Op::kSequence, [](Arguments& a) { a.c = at::Tensor(); }, kTypeError,
     "lltm::sequence: expected c_0 to be a tensor, got an undefined tensor"},
};
// clang-format on

Arguments right_arguments(Op op) {
  switch (op) {
    case Op::kCell:
      return cell_problem({1, 4, 3, 5}, at::kFloat, 1);
    case Op::kSequence:
      return sequence_problem({2, 4, 3, 5}, at::kFloat, 1);
    default:
      return packed_problem({2, 2, 1, 1}, 3, 5, at::kFloat, 1);
  }
}

// The C++ function, and the operator, as Python and TorchScript call it.
void call_function(Op op, const Arguments& a) {
  op == Op::kCell ? cell(a) : sequence(a);
}
void call_operator(Op op, const Arguments& a) {
  op == Op::kCell ? call("lltm::step", step_stack(a)) : call("lltm::sequence", sequence_stack(a));
}

class Errors : public testing::TestWithParam<WrongCall> {};

INSTANTIATE_TEST_SUITE_P(
    WrongCalls,
    Errors,
    testing::ValuesIn(kWrongCalls),
    [](const testing::TestParamInfo<WrongCall>& info) { return std::string(info.param.name); });

TEST_P(Errors, AreTheSameForFunctionsAndOperators) {
  const auto& [_, op, change, error, text] = GetParam();
  for (const bool training : {false, true}) {
    Arguments a = right_arguments(op);
    if (training) a = requiring_grad(a);
    EXPECT_NO_THROW(call_function(op, a));
    EXPECT_NO_THROW(call_operator(op, a));
    change(a);
    expect_error([&, &name = op] { call_function(name, a); }, error, text);
    expect_error([&, &name = op] { call_operator(name, a); }, error, text);
  }
}

}  // namespace
}  // namespace lltm_test
