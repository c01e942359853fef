// Wrong arguments: the class of the error and its whole text, from the C++
// functions and from the dispatcher, with and without autograd.
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <typeinfo>
#include <utility>

namespace lltm_test {
namespace {

enum class Op { kCell, kSequence, kPacked };

// A call that would be right but for one change.
struct WrongCall {
  const char* name;
  Op op;
  void (*change)(Arguments& arguments);
  const std::type_info& error;
  const char* text;
};

at::Tensor sizes(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

// B = 4, I = 3, H = 5, T = 2. Packed: batch_sizes 4, 2, so N = 6.
// clang-format off
const WrongCall kWrongCalls[] = {
    // Ranks.
    {"input_of_rank_1", Op::kCell, [](Arguments& a) { a.input = at::zeros({3}); }, kValueError,
     "lltm::cell: expected input of shape (B, I), got (3,)"},
    {"input_of_rank_3", Op::kCell, [](Arguments& a) { a.input = at::zeros({1, 4, 3}); },
     kValueError, "lltm::cell: expected input of shape (B, I), got (1, 4, 3)"},
    {"input_of_rank_0", Op::kCell, [](Arguments& a) { a.input = at::zeros({}); }, kValueError,
     "lltm::cell: expected input of shape (B, I), got ()"},
    {"h_of_rank_1", Op::kCell, [](Arguments& a) { a.h = at::zeros({5}); }, kValueError,
     "lltm::cell: expected h of shape (4, 5), got (5,)"},
    {"h_of_rank_3", Op::kCell, [](Arguments& a) { a.h = at::zeros({1, 4, 5}); }, kValueError,
     "lltm::cell: expected h of shape (4, 5), got (1, 4, 5)"},
    {"c_of_rank_0", Op::kCell, [](Arguments& a) { a.c = at::zeros({}); }, kValueError,
     "lltm::cell: expected c of shape (4, 5), got ()"},
    {"weights_of_rank_1", Op::kCell, [](Arguments& a) { a.weights = at::zeros({120}); },
     kValueError, "lltm::cell: expected weights of shape (3H, H+I), got (120,)"},
    {"weights_of_rank_3", Op::kCell, [](Arguments& a) { a.weights = at::zeros({3, 5, 8}); },
     kValueError, "lltm::cell: expected weights of shape (3H, H+I), got (3, 5, 8)"},
    {"bias_of_rank_2", Op::kCell, [](Arguments& a) { a.bias = at::zeros({1, 15}); }, kValueError,
     "lltm::cell: expected bias of shape (15,), got (1, 15)"},
    {"sequence_input_of_rank_2", Op::kSequence, [](Arguments& a) { a.input = at::zeros({4, 3}); },
     kValueError, "lltm::sequence: expected input of shape (T, B, I), got (4, 3)"},
    {"packed_input_of_rank_3", Op::kPacked, [](Arguments& a) { a.input = at::zeros({2, 4, 3}); },
     kValueError, "lltm::sequence: expected input of shape (N, I), got (2, 4, 3)"},
    {"h_0_of_rank_3", Op::kSequence, [](Arguments& a) { a.h = at::zeros({1, 4, 5}); },
     kValueError, "lltm::sequence: expected h_0 of shape (B, H), got (1, 4, 5)"},
    {"packed_h_0_of_rank_1", Op::kPacked, [](Arguments& a) { a.h = at::zeros({5}); }, kValueError,
     "lltm::sequence: expected h_0 of shape (B, H), got (5,)"},
    {"c_0_of_rank_1", Op::kSequence, [](Arguments& a) { a.c = at::zeros({5}); }, kValueError,
     "lltm::sequence: expected c_0 of shape (4, 5), got (5,)"},
    {"batch_sizes_of_rank_0", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = at::scalar_tensor(4, at::kLong); }, kValueError,
     "lltm::sequence: expected batch_sizes of shape (T,), got ()"},
    {"batch_sizes_of_rank_2", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({4, 2}).unsqueeze(0); }, kValueError,
     "lltm::sequence: expected batch_sizes of shape (T,), got (1, 2)"},

    // Sizes.
    {"h_of_another_batch", Op::kCell, [](Arguments& a) { a.h = at::zeros({3, 5}); }, kValueError,
     "lltm::cell: expected h of shape (4, 5), got (3, 5)"},
    {"h_of_one_row", Op::kCell, [](Arguments& a) { a.h = at::zeros({1, 5}); }, kValueError,
     "lltm::cell: expected h of shape (4, 5), got (1, 5)"},
    {"h_of_another_size", Op::kCell, [](Arguments& a) { a.h = at::zeros({4, 6}); }, kValueError,
     "lltm::cell: expected h of shape (4, 5), got (4, 6)"},
    {"c_of_another_batch", Op::kCell, [](Arguments& a) { a.c = at::zeros({5, 5}); }, kValueError,
     "lltm::cell: expected c of shape (4, 5), got (5, 5)"},
    {"c_of_another_size", Op::kCell, [](Arguments& a) { a.c = at::zeros({4, 1}); }, kValueError,
     "lltm::cell: expected c of shape (4, 5), got (4, 1)"},
    {"input_of_another_size", Op::kCell, [](Arguments& a) { a.input = at::zeros({4, 2}); },
     kValueError, "lltm::cell: expected weights of shape (15, 7), got (15, 8)"},
    {"weights_transposed", Op::kCell, [](Arguments& a) { a.weights = at::zeros({8, 15}); },
     kValueError, "lltm::cell: expected weights of shape (3H, H+I), got (8, 15)"},
    {"weights_of_four_gates", Op::kCell, [](Arguments& a) { a.weights = at::zeros({20, 8}); },
     kValueError, "lltm::cell: expected weights of shape (3H, H+I), got (20, 8)"},
    {"weights_of_too_few_columns", Op::kCell, [](Arguments& a) { a.weights = at::zeros({15, 4}); },
     kValueError, "lltm::cell: expected weights of shape (15, 8), got (15, 4)"},
    {"bias_of_one_gate", Op::kCell, [](Arguments& a) { a.bias = at::zeros({5}); }, kValueError,
     "lltm::cell: expected bias of shape (15,), got (5,)"},
    {"h_0_of_another_batch", Op::kSequence, [](Arguments& a) { a.h = at::zeros({3, 5}); },
     kValueError, "lltm::sequence: expected h_0 of shape (4, 5), got (3, 5)"},
    {"c_0_of_another_size", Op::kSequence, [](Arguments& a) { a.c = at::zeros({4, 6}); },
     kValueError, "lltm::sequence: expected c_0 of shape (4, 5), got (4, 6)"},
    {"sequence_weights_of_another_size", Op::kSequence,
     [](Arguments& a) { a.weights = at::zeros({15, 9}); }, kValueError,
     "lltm::sequence: expected weights of shape (15, 8), got (15, 9)"},
    {"sequence_bias_of_another_size", Op::kSequence, [](Arguments& a) { a.bias = at::zeros({20}); },
     kValueError, "lltm::sequence: expected bias of shape (15,), got (20,)"},

    // Values of batch_sizes.
    {"batch_sizes_increase", Op::kPacked, [](Arguments& a) { a.batch_sizes = sizes({4, 1, 2}); },
     kValueError,
     "lltm::sequence: expected batch_sizes without negative or increasing values, got 2 after 1"},
    {"batch_sizes_negative", Op::kPacked, [](Arguments& a) { a.batch_sizes = sizes({4, 3, -1}); },
     kValueError,
     "lltm::sequence: expected batch_sizes without negative or increasing values, got -1 after 3"},
    {"batch_sizes_begin_with_fewer_rows", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({3, 3}); }, kValueError,
     "lltm::sequence: expected batch_sizes to begin with 4, the batch size of h_0, got 3"},
    {"batch_sizes_begin_with_more_rows", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({6}); }, kValueError,
     "lltm::sequence: expected batch_sizes to begin with 4, the batch size of h_0, got 6"},
    {"batch_sizes_begin_negative", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({-4, -2}); }, kValueError,
     "lltm::sequence: expected batch_sizes to begin with 4, the batch size of h_0, got -4"},
    {"batch_sizes_of_too_few_rows", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({4, 1}); }, kValueError,
     "lltm::sequence: expected input of shape (5, I), the sum of batch_sizes, got 6 rows"},
    {"batch_sizes_of_too_many_rows", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = sizes({4, 3}); }, kValueError,
     "lltm::sequence: expected input of shape (7, I), the sum of batch_sizes, got 6 rows"},
    {"batch_sizes_empty", Op::kPacked, [](Arguments& a) { a.batch_sizes = sizes({}); },
     kValueError,
     "lltm::sequence: expected input of shape (0, I), the sum of batch_sizes, got 6 rows"},

    // Dtypes.
    {"input_of_int64", Op::kCell, [](Arguments& a) { a.input = a.input.to(at::kLong); },
     kTypeError,
     "lltm::cell: expected input of dtype float64, float32, bfloat16 or float16, got int64"},
    {"input_of_bool", Op::kSequence, [](Arguments& a) { a.input = a.input.to(at::kBool); },
     kTypeError,
     "lltm::sequence: expected input of dtype float64, float32, bfloat16 or float16, got bool"},
    {"h_of_float64", Op::kCell, [](Arguments& a) { a.h = a.h.to(at::kDouble); }, kTypeError,
     "lltm::cell: expected h of dtype float32, got float64"},
    {"c_of_float16", Op::kCell, [](Arguments& a) { a.c = a.c.to(at::kHalf); }, kTypeError,
     "lltm::cell: expected c of dtype float32, got float16"},
    {"weights_of_bfloat16", Op::kCell, [](Arguments& a) { a.weights = a.weights.to(at::kBFloat16); },
     kTypeError, "lltm::cell: expected weights of dtype float32, got bfloat16"},
    {"bias_of_int32", Op::kCell, [](Arguments& a) { a.bias = a.bias->to(at::kInt); }, kTypeError,
     "lltm::cell: expected bias of dtype float32, got int32"},
    {"h_0_of_float64", Op::kSequence, [](Arguments& a) { a.h = a.h.to(at::kDouble); }, kTypeError,
     "lltm::sequence: expected h_0 of dtype float32, got float64"},
    {"c_0_of_float64", Op::kSequence, [](Arguments& a) { a.c = a.c.to(at::kDouble); }, kTypeError,
     "lltm::sequence: expected c_0 of dtype float32, got float64"},
    {"batch_sizes_of_int32", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = a.batch_sizes->to(at::kInt); }, kTypeError,
     "lltm::sequence: expected batch_sizes of dtype int64, got int32"},
    {"batch_sizes_of_float32", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = a.batch_sizes->to(at::kFloat); }, kTypeError,
     "lltm::sequence: expected batch_sizes of dtype int64, got float32"},

    // Undefined tensors.
    {"input_undefined", Op::kCell, [](Arguments& a) { a.input = at::Tensor(); }, kTypeError,
     "lltm::cell: expected input to be a tensor, got an undefined tensor"},
    {"h_undefined", Op::kCell, [](Arguments& a) { a.h = at::Tensor(); }, kTypeError,
     "lltm::cell: expected h to be a tensor, got an undefined tensor"},
    {"c_undefined", Op::kCell, [](Arguments& a) { a.c = at::Tensor(); }, kTypeError,
     "lltm::cell: expected c to be a tensor, got an undefined tensor"},
    {"weights_undefined", Op::kCell, [](Arguments& a) { a.weights = at::Tensor(); }, kTypeError,
     "lltm::cell: expected weights to be a tensor, got an undefined tensor"},
    {"h_0_undefined", Op::kSequence, [](Arguments& a) { a.h = at::Tensor(); }, kTypeError,
     "lltm::sequence: expected h_0 to be a tensor, got an undefined tensor"},
    {"c_0_undefined", Op::kSequence, [](Arguments& a) { a.c = at::Tensor(); }, kTypeError,
     "lltm::sequence: expected c_0 to be a tensor, got an undefined tensor"},

    // Devices. A tensor on another device takes the whole call to that one.
    {"input_on_meta", Op::kCell, [](Arguments& a) { a.input = a.input.to(at::kMeta); },
     kRuntimeError, "lltm::cell: expected input on device cpu, got meta"},
    {"input_in_double", Op::kCell, [](Arguments& a) { a.input = a.input.to(at::kDouble); },
     kTypeError, "lltm::cell: expected input of dtype float32, got float64"},
    {"h_on_meta", Op::kCell, [](Arguments& a) { a.h = a.h.to(at::kMeta); }, kRuntimeError,
     "lltm::cell: expected h on device cpu, got meta"},
    {"weights_on_meta", Op::kCell, [](Arguments& a) { a.weights = a.weights.to(at::kMeta); },
     kRuntimeError, "lltm::cell: expected weights on device cpu, got meta"},
    {"bias_on_meta", Op::kCell, [](Arguments& a) { a.bias = a.bias->to(at::kMeta); },
     kRuntimeError, "lltm::cell: expected bias on device cpu, got meta"},
    {"c_0_on_meta", Op::kSequence, [](Arguments& a) { a.c = a.c.to(at::kMeta); }, kRuntimeError,
     "lltm::sequence: expected c_0 on device cpu, got meta"},
    {"batch_sizes_on_meta", Op::kPacked,
     [](Arguments& a) { a.batch_sizes = a.batch_sizes->to(at::kMeta); }, kRuntimeError,
     "lltm::sequence: expected batch_sizes on device cpu, got meta"},

    // Layouts.
    {"input_sparse", Op::kCell, [](Arguments& a) { a.input = a.input.to_sparse(); }, kRuntimeError,
     "lltm::cell: expected input of layout Strided, got Sparse"},
    {"h_sparse", Op::kCell, [](Arguments& a) { a.h = a.h.to_sparse(); }, kRuntimeError,
     "lltm::cell: expected h of layout Strided, got Sparse"},
    {"weights_sparse", Op::kSequence, [](Arguments& a) { a.weights = a.weights.to_sparse(); },
     kRuntimeError, "lltm::sequence: expected weights of layout Strided, got Sparse"},
    {"weights_sparse_csr", Op::kSequence,
     [](Arguments& a) { a.weights = a.weights.to_sparse_csr(); }, kRuntimeError,
     "lltm::sequence: expected weights of layout Strided, got SparseCsr"},
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

// The C++ function, and the operator as Python and TorchScript reach it.
void call_function(Op op, const Arguments& a) {
  op == Op::kCell ? cell(a) : sequence(a);
}

void call_boxed(Op op, const Arguments& a) {
  Stack stack = op == Op::kCell ? step_stack(a) : sequence_stack(a);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(op == Op::kCell ? "lltm::step" : "lltm::sequence", "")
      .callBoxed(stack);
}

class Errors : public testing::TestWithParam<WrongCall> {
 protected:
  static Arguments wrong_arguments() {
    Arguments arguments = right_arguments(GetParam().op);
    GetParam().change(arguments);
    return arguments;
  }
};

void PrintTo(const WrongCall& call, std::ostream* stream) {
  *stream << call.name;
}

INSTANTIATE_TEST_SUITE_P(
    WrongCalls,
    Errors,
    testing::ValuesIn(kWrongCalls),
    [](const testing::TestParamInfo<WrongCall>& info) { return std::string(info.param.name); });

TEST_P(Errors, FunctionThrows) {
  const Arguments arguments = wrong_arguments();
  expect_error([&] { call_function(GetParam().op, arguments); }, GetParam().error, GetParam().text);
}

TEST_P(Errors, OperatorThrows) {
  const Arguments arguments = wrong_arguments();
  expect_error([&] { call_boxed(GetParam().op, arguments); }, GetParam().error, GetParam().text);
}

TEST_P(Errors, FunctionThrowsInTraining) {
  Arguments arguments = right_arguments(GetParam().op);
  arguments.weights.requires_grad_();
  arguments.h.requires_grad_();
  GetParam().change(arguments);
  expect_error([&] { call_function(GetParam().op, arguments); }, GetParam().error, GetParam().text);
}

TEST(Errors, TheCallsAreRightButForTheirChange) {
  for (const Op op : {Op::kCell, Op::kSequence, Op::kPacked}) {
    EXPECT_NO_THROW(call_function(op, right_arguments(op)));
    EXPECT_NO_THROW(call_boxed(op, right_arguments(op)));
  }
}

// Of the other cells.
TEST(Errors, OfTheCellAndItsTwoMatricesAreNamed) {
  const auto refuse = [](const char* cell_name,
                         void (*change)(Arguments&),
                         const std::type_info& error,
                         const std::string& text) {
    Arguments step = cell_problem({1, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, cell_name);
    Arguments steps = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, cell_name);
    change(step);
    change(steps);
    const auto with_c = [&](const char* c) {  // @ is c, which a sequence calls c_0
      std::string named = text;
      if (const size_t at = named.find('@'); at != std::string::npos) named.replace(at, 1, c);
      return named;
    };
    expect_error([&] { cell(step); }, error, "lltm::step: expected " + with_c("c"));
    expect_error([&] { sequence(steps); }, error, "lltm::sequence: expected " + with_c("c_0"));
  };
  refuse(
      "lstm",
      [](Arguments& a) { a.cell = "rnn"; },
      kValueError,
      "cell to be one of lltm, lstm, gru or the text of a cell's program, got 'rnn'");
  refuse(
      "gru",
      [](Arguments& a) { a.c = a.h; },
      kValueError,
      "no @, since the cell gru has none, got a tensor");
  refuse(
      "lstm",
      [](Arguments& a) { a.c = at::Tensor(); },
      kTypeError,
      "@ to be a tensor, got an undefined tensor");
  refuse(
      "lstm",
      [](Arguments& a) { a.weight_hh = at::zeros({20, 6}); },
      kValueError,
      "weight_hh of shape (20, 5), got (20, 6)");
  // Input and weight_ih alone say what I is: the weights are named, whatever else is wrong of them.
  refuse(
      "lstm",
      [](Arguments& a) { a.weights = at::zeros({20, 4}); },
      kValueError,
      "weight_ih of shape (20, 3), got (20, 4)");
  refuse(
      "lstm",
      [](Arguments& a) { a.weights = at::zeros({8, 4}); },
      kValueError,
      "weight_ih of shape (20, 3), got (8, 4)");
  refuse(
      "lstm",
      [](Arguments& a) { a.weights = at::zeros({4, 20}); },  // as if transposed
      kValueError,
      "weight_ih of shape (20, 3), got (4, 20)");
  refuse(
      "gru",
      [](Arguments& a) { a.weights = at::zeros({20, 3}); },
      kValueError,
      "weight_ih of shape (3H, I), got (20, 3)");
  refuse(
      "gru",
      [](Arguments& a) { a.bias_hh = at::zeros({20}); },
      kValueError,
      "bias_hh of shape (15,), got (20,)");
}

TEST(Errors, ASequenceWithCheckpointsThrows) {
  const auto refuse = [](Arguments a, int64_t steps, const char* text) {
    for (const bool training : {false, true}) {
      a.weights.requires_grad_(training);
      expect_error([&] { checkpointed(steps)(a); }, kValueError, text);
    }
  };
  Arguments arguments = right_arguments(Op::kSequence);
  refuse(arguments, -1, "lltm::sequence: expected checkpoint_steps to be at least 0, got -1");
  arguments.h = at::zeros({3, 5});
  refuse(arguments, 2, "lltm::sequence: expected h_0 of shape (4, 5), got (3, 5)");
}

// The one that is alone is named, whichever it is: h, c and bias say what H is, as weights do.
TEST(Errors, TheExpectedShapeIsWhatMostArgumentsSay) {
  Arguments arguments = cell_problem({1, 4, 8, 16}, at::kFloat, 1);
  const auto refuse = [](const Arguments& a, const char* text) {
    expect_error([&] { cell(a); }, kValueError, text);
  };
  for (const auto& [rows, columns] : {std::pair{45, 24}, {60, 28}}) {
    Arguments wrong = arguments;
    wrong.weights = at::zeros({rows, columns});
    const std::string text = "lltm::cell: expected weights of shape (48, 24), got (" +
                             std::to_string(rows) + ", " + std::to_string(columns) + ")";
    refuse(wrong, text.c_str());
  }
  Arguments wrong = arguments;
  wrong.input = at::zeros({3, 8});
  refuse(wrong, "lltm::cell: expected input of shape (4, 8), got (3, 8)");
  // Two against two: the states are named.
  arguments.h = arguments.c = at::zeros({4, 17});
  refuse(arguments, "lltm::cell: expected h of shape (4, 16), got (4, 17)");
}

// ---- the operators of training --------------------------------------------

// They are called from Python too, so they check what they get.
struct WrongBackward {
  const char* name;
  const char* op;
  size_t position;  // of the argument that is replaced
  std::vector<int64_t> shape;
  const char* text;
  int64_t checkpoint_steps = 0;
};

// clang-format off
const WrongBackward kWrongBackwards[] = {
    {"input", "lltm::step_backward", 1, {4},
     "lltm::step_backward: expected input of shape (B, I), got (4,)"},
    {"h", "lltm::step_backward", 2, {3, 5},
     "lltm::step_backward: expected h of shape (4, 5), got (3, 5)"},
    {"c", "lltm::step_backward", 3, {4},
     "lltm::step_backward: expected c of shape (4, 5), got (4,)"},
    {"weights", "lltm::step_backward", 4, {15, 7},
     "lltm::step_backward: expected weights of shape (15, 8), got (15, 7)"},
    {"bias", "lltm::step_backward", 6, {12},
     "lltm::step_backward: expected bias of shape (15,), got (12,)"},
    {"activations", "lltm::step_backward", 8, {4, 15},
     "lltm::step_backward: expected activations of shape (4, 20), got (4, 15)"},
    {"grad_h", "lltm::step_backward", 9, {4, 6},
     "lltm::step_backward: expected grad_h of shape (4, 5), got (4, 6)"},
    {"grad_c", "lltm::step_backward", 10, {5},
     "lltm::step_backward: expected grad_c of shape (4, 5), got (5,)"},
    {"sequence_input", "lltm::sequence_backward", 1, {3, 4, 3},
     "lltm::sequence_backward: expected input of shape (2, 4, 3), got (3, 4, 3)"},
    {"sequence_h_0", "lltm::sequence_backward", 2, {4, 6},
     "lltm::sequence_backward: expected h_0 of shape (4, 5), got (4, 6)"},
    {"sequence_c_0", "lltm::sequence_backward", 3, {3, 5},
     "lltm::sequence_backward: expected c_0 of shape (4, 5), got (3, 5)"},
    {"sequence_weights", "lltm::sequence_backward", 4, {15, 9},
     "lltm::sequence_backward: expected weights of shape (15, 8), got (15, 9)"},
    {"sequence_bias", "lltm::sequence_backward", 6, {5},
     "lltm::sequence_backward: expected bias of shape (15,), got (5,)"},
    {"sequence_output", "lltm::sequence_backward", 13, {2, 4, 4},
     "lltm::sequence_backward: expected output of shape (2, 4, 5), got (2, 4, 4)"},
    {"sequence_activations", "lltm::sequence_backward", 14, {4, 20},
     "lltm::sequence_backward: expected saved of shape (8, 20), got (4, 20)"},
    {"sequence_grad_output", "lltm::sequence_backward", 15, {8, 5},
     "lltm::sequence_backward: expected grad_output of shape (2, 4, 5), got (8, 5)"},
    {"sequence_grad_h_n", "lltm::sequence_backward", 16, {1, 4, 5},
     "lltm::sequence_backward: expected grad_h_n of shape (4, 5), got (1, 4, 5)"},
    {"sequence_grad_c_n", "lltm::sequence_backward", 17, {4, 6},
     "lltm::sequence_backward: expected grad_c_n of shape (4, 5), got (4, 6)"},
    {"checkpoints", "lltm::sequence_backward", 14, {2, 4, 5},
     "lltm::sequence_backward: expected saved of shape (1, 4, 5), got (2, 4, 5)",
     /*checkpoint_steps=*/2},
};
// clang-format on

class BackwardErrors : public testing::TestWithParam<WrongBackward> {};

void PrintTo(const WrongBackward& call, std::ostream* stream) {
  *stream << call.name;
}

INSTANTIATE_TEST_SUITE_P(
    WrongCalls,
    BackwardErrors,
    testing::ValuesIn(kWrongBackwards),
    [](const testing::TestParamInfo<WrongBackward>& info) { return std::string(info.param.name); });

TEST_P(BackwardErrors, OperatorThrows) {
  const std::vector<bool> mask(7, true);
  const std::string name = GetParam().op;
  const int64_t steps = GetParam().checkpoint_steps;
  const at::Tensor state = at::zeros({4, 5});
  const at::Tensor output = at::zeros({2, 4, 5});
  const at::Tensor saved = steps > 0 ? at::zeros({1, 4, 5}) : at::zeros({8, 20});
  Stack stack, others;
  if (name == "lltm::step_backward") {
    stack = step_stack(right_arguments(Op::kCell));
    others = {at::zeros({4, 20}), state, state, mask};
  } else {
    stack = sequence_stack(right_arguments(Op::kSequence), steps);
    others = {output, saved, output, state, state, mask};
  }
  stack.insert(stack.end(), others.begin(), others.end());
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(GetParam().op, "");
  Stack right = stack;
  EXPECT_NO_THROW(op.callBoxed(right));
  stack[GetParam().position] = at::zeros(GetParam().shape);
  expect_error([&] { op.callBoxed(stack); }, kValueError, GetParam().text);
}

}  // namespace
}  // namespace lltm_test
