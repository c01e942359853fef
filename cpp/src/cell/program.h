// Cell programs: straight-line register code of the element-wise part, per hidden unit. On the CPU,
// custom cells' kernels run it over blocks of units. For every cell, the ATen fallback runs it on
// tensors, and the element-wise kernels on CUDA are compiled from it.
//
// Registers, in order: inputs, outputs (written once), constants, temporaries. Inputs and constants
// are never written.
//
// A pass of a step has a program for each of its stages. The only stage of a pass has all ports, in
// this order:
//
//     forward     inputs: pre-activations, states, parameters
//                 outputs: h', states', saved values
//     backward    inputs: saved values, parameters, gradients of h', of states'
//                 outputs: gradients of pre-activations, of parameters, of states
//
// If the cell reads h, states in forward's inputs and backward's outputs begin with h.
//
// Products and means divide a pass into several stages. Between two stages
//     product    z += v W^T for the gates W of an operand v, or, backward, dv = dz W
//     mean       over the H units of each row
// Each of several stages has only the ports that it needs.
//
// Device code: no PyTorch or standard headers.
#pragma once

namespace lltm {

// The operations, one per row: X(op, function in math.h, operands, word in serialized cells, cost,
// range, aten). range is that of the result, from the operands' ranges a, b and c ({}: any number;
// cell/value_ranges.h). aten computes the result from the operands x, y and w, or a(), b() and c(),
// which are numbers even for conditions (aten/run_program.cpp).
//
// The compiler fuses operations into those without a word. Conditions are 0 or 1. detach(x) has no
// derivative. As in PyTorch, NaN propagates except through conditions and sign. A softplus above
// its threshold equals its operand in every dtype.
#define LLTM_OPERATIONS(X)                                                                    \
  X(kCopy, copy, 1, "copy", kCheap, a, x)                                                     \
  X(kNegate, negate, 1, "negate", kCheap, -a, at::neg(a()))                                   \
  X(kAbs, abs, 1, "abs", kCheap, at_least(0), at::abs(a()))                                   \
  X(kSign, sign, 1, "sign", kCheap, {}, at::sign(a()))                                        \
  X(kFloor, floor, 1, "floor", kCheap, {}, at::floor(a()))                                    \
  X(kSqrt, sqrt, 1, "sqrt", kExpensive, at_least(0), at::sqrt(a()))                           \
  X(kExp, exp, 1, "exp", kExpensive, exponential(a), at::exp(a()))                            \
  X(kExp2, exp2, 1, "exp2", kExpensive, at_least(0), at::exp2(a()))                           \
  X(kExpm1, expm1, 1, "expm1", kExpensive, at_least(-1), at::expm1(a()))                      \
  X(kLog, log, 1, "log", kExpensive, {}, at::log(a()))                                        \
  X(kLog1p, log1p, 1, "log1p", kExpensive, {}, at::log1p(a()))                                \
  X(kSin, sin, 1, "sin", kExpensive, within(-1, 1), at::sin(a()))                             \
  X(kCos, cos, 1, "cos", kExpensive, within(-1, 1), at::cos(a()))                             \
  X(kErf, erf, 1, "erf", kExpensive, within(-1, 1), at::erf(a()))                             \
  X(kSigmoid, sigmoid, 1, "sigmoid", kExpensive, within(0, 1), at::sigmoid(a()))              \
  X(kTanh, tanh, 1, "tanh", kExpensive, within(-1, 1), at::tanh(a()))                         \
  X(kElu, elu, 1, "elu", kExpensive, at_least(-1), at::elu(a()))                              \
  X(kSoftplus, softplus, 1, "softplus", kExpensive, at_least(0), at::softplus(a(), 1, 40))    \
  X(kNot, logical_not, 1, "not", kCheap, within(0, 1), at::logical_not(truth(x)))             \
  X(kDetach, detach, 1, "detach", kCheap, a, at::detach(x))                                   \
  X(kAdd, add, 2, "add", kCheap, a + b, at::add(a(), b()))                                    \
  X(kSubtract, subtract, 2, "subtract", kCheap, a + -b, at::sub(a(), b()))                    \
  X(kMultiply, multiply, 2, "multiply", kCheap, (a * b), at::mul(a(), b()))                   \
  X(kDivide, divide, 2, "divide", kExpensive, {}, at::div(a(), b()))                          \
  X(kFmod, fmod, 2, "fmod", kExpensive, {}, at::fmod(a(), b()))                               \
  X(kMaximum, maximum, 2, "maximum", kCheap, maximum(a, b), at::maximum(a(), b()))            \
  X(kMinimum, minimum, 2, "minimum", kCheap, -maximum(-a, -b), at::minimum(a(), b()))         \
  X(kGreater, greater, 2, "greater", kCheap, within(0, 1), at::gt(a(), b()))                  \
  X(kGreaterEqual, greater_equal, 2, "greater_equal", kCheap, within(0, 1), at::ge(a(), b())) \
  X(kEqual, equal, 2, "equal", kCheap, within(0, 1), at::eq(a(), b()))                        \
  X(kNotEqual, not_equal, 2, "not_equal", kCheap, within(0, 1), at::ne(a(), b()))             \
  X(kAnd, logical_and, 2, "and", kCheap, within(0, 1), at::logical_and(truth(x), truth(y)))   \
  X(kOr, logical_or, 2, "or", kCheap, within(0, 1), at::logical_or(truth(x), truth(y)))       \
  X(kWhere, where, 3, "where", kCheap, either(b, c), at::where(truth(x), b(), c()))           \
  X(kMultiplyAdd, multiply_add, 3, "", kCheap, {}, at::add(at::mul(a(), b()), c()))           \
  X(kMultiplySubtract, multiply_subtract, 3, "", kCheap, {}, at::sub(at::mul(a(), b()), c())) \
  X(kSubtractProduct, subtract_product, 3, "", kCheap, {}, at::sub(c(), at::mul(a(), b())))   \
  X(kSigmoidGradient, sigmoid_gradient, 2, "", kCheap, {}, sigmoid_gradient(a(), b()))        \
  X(kTanhGradient, tanh_gradient, 2, "", kCheap, {}, tanh_gradient(a(), b()))                 \
  X(kEluGradient, elu_gradient, 2, "", kCheap, {}, elu_gradient(a(), b()))                    \
  X(kAddTanhGradient, add_tanh_gradient, 3, "", kCheap, {}, at::add(tanh_gradient(a(), b()), c()))

enum class Op : unsigned char {
#define LLTM_OP(op, ...) op,
  LLTM_OPERATIONS(LLTM_OP)
#undef LLTM_OP
};

struct Instruction {
  Op op;
  unsigned char y, a, b, c;  // result and operand registers; 0 if unused
};

struct Program {
  static constexpr int kMostRegisters = 128;

  const Instruction* code;
  int size;
  const double* constants;
  int constant_count;
  int inputs, outputs;
  int registers;  // total

  constexpr int first_constant() const { return inputs + outputs; }
  constexpr int first_temporary() const { return first_constant() + constant_count; }
};

struct SlotRange {
  int begin = 0, end = 0;

  constexpr int count() const { return end - begin; }
  constexpr bool contains(int slot) const { return begin <= slot && slot < end; }
  friend constexpr bool operator==(const SlotRange&, const SlotRange&) = default;
};

enum class Place : unsigned char {
  kGate,       // forward: a pre-activation; backward: its gradient
  kParameter,  // forward: its value; backward: its value (input) or gradient (output)
  kState,      // column of the engines' c; backward: its gradient
  kH,          // forward: h'; backward: the gradient of h'
  kSaved,
  kOperand,  // forward: v; backward: dv
  kMean,     // as an output: the values to average
  kKept,     // written by an earlier stage
};
constexpr int kPlaces = 8;
struct Port {
  Place place;
  unsigned char index;
};
struct Stage {
  Program program;
  const Port* ports;  // of inputs, then of outputs
  unsigned operands;  // bit p: the product of operand p follows this stage
  SlotRange means;    // that follow this stage
};
struct Pass {
  static constexpr int kMostStages = 16, kMostMeans = 64, kMostKept = 64;

  const Stage* stages;
  int count;
  int kept, means;

  // Of the only stage.
  constexpr const Program& program() const { return stages->program; }
};
struct Operand {
  SlotRange gates[2];  // its gates: also of x, only of h
  int saved;           // index of the saved value
};
struct OperandList {
  const Operand* first = nullptr;
  int count = 0;

  constexpr const Operand* begin() const { return first; }
  constexpr const Operand* end() const { return first + count; }
  constexpr const Operand& operator[](int k) const { return first[k]; }
};

struct CellPrograms {
  Pass forward, backward;
  OperandList operands;
  const char* name;
  unsigned long long hash;       // of the serialized cell, or the characters of a built-in name
  const double* initial_states;  // K values
  // Bits of the saved values that are the same for all units: steps write and read that of unit 0.
  unsigned long long per_row;
};

}  // namespace lltm
