// Cell programs: straight-line register code of the element-wise part, per hidden unit. Custom
// cells' kernels run it over blocks of units; the ATen fallback runs it on tensors, for every cell.
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

// X(op, function in math.h, operands, word in serialized cells, cost). The compiler fuses
// operations into those without a word. Conditions are 0 or 1. detach(x) has no derivative. NaN
// propagates as in PyTorch, except through conditions.
#define LLTM_OPERATIONS(X)                                    \
  X(kCopy, copy, 1, "copy", kCheap)                           \
  X(kNegate, negate, 1, "negate", kCheap)                     \
  X(kAbs, abs, 1, "abs", kCheap)                              \
  X(kSign, sign, 1, "sign", kCheap)                           \
  X(kSqrt, sqrt, 1, "sqrt", kExpensive)                       \
  X(kExp, exp, 1, "exp", kExpensive)                          \
  X(kExpm1, expm1, 1, "expm1", kExpensive)                    \
  X(kLog, log, 1, "log", kExpensive)                          \
  X(kLog1p, log1p, 1, "log1p", kExpensive)                    \
  X(kSigmoid, sigmoid, 1, "sigmoid", kExpensive)              \
  X(kTanh, tanh, 1, "tanh", kExpensive)                       \
  X(kElu, elu, 1, "elu", kExpensive)                          \
  X(kSoftplus, softplus, 1, "softplus", kExpensive)           \
  X(kNot, logical_not, 1, "not", kCheap)                      \
  X(kDetach, detach, 1, "detach", kCheap)                     \
  X(kAdd, add, 2, "add", kCheap)                              \
  X(kSubtract, subtract, 2, "subtract", kCheap)               \
  X(kMultiply, multiply, 2, "multiply", kCheap)               \
  X(kDivide, divide, 2, "divide", kExpensive)                 \
  X(kMaximum, maximum, 2, "maximum", kCheap)                  \
  X(kMinimum, minimum, 2, "minimum", kCheap)                  \
  X(kGreater, greater, 2, "greater", kCheap)                  \
  X(kGreaterEqual, greater_equal, 2, "greater_equal", kCheap) \
  X(kEqual, equal, 2, "equal", kCheap)                        \
  X(kNotEqual, not_equal, 2, "not_equal", kCheap)             \
  X(kAnd, logical_and, 2, "and", kCheap)                      \
  X(kOr, logical_or, 2, "or", kCheap)                         \
  X(kWhere, where, 3, "where", kCheap)                        \
  X(kMultiplyAdd, multiply_add, 3, "", kCheap)                \
  X(kMultiplySubtract, multiply_subtract, 3, "", kCheap)      \
  X(kSubtractProduct, subtract_product, 3, "", kCheap)        \
  X(kSigmoidGradient, sigmoid_gradient, 2, "", kCheap)        \
  X(kTanhGradient, tanh_gradient, 2, "", kCheap)              \
  X(kEluGradient, elu_gradient, 2, "", kCheap)                \
  X(kAddTanhGradient, add_tanh_gradient, 3, "", kCheap)

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
  Operand operands[8];
  int operand_count;
  const char* name;
  unsigned long long hash;       // of the serialized cell
  const double* initial_states;  // K values
};

}  // namespace lltm
