// A cell that a user has written, as two programs: what forward and backward compute of one unit
// between the GEMMs, in straight-line code on registers. Kernels run a program over blocks of
// units, one instruction after another; the composite path runs it on tensors.
//
// The registers of a program, in this order: inputs, outputs, constants, temporaries. Inputs and
// constants are never written, an output is written once and may be read from then on.
//
//     forward     inputs: z of each slot, states, parameters
//                 outputs: h', states', saved values
//     backward    inputs: saved values, parameters, gradients of h', of states'
//                 outputs: gradients of z of each slot, of parameters, of states
//
// The states of forward's inputs and backward's outputs begin with h where the cell reads it
// element by element; those of the other two never do, as h' stands there already.
//
// No header of torch or of the standard library: kernels of every device include it.
#pragma once

namespace lltm {

// Conditions are 0 or 1. NaN goes through everything but conditions, as in PyTorch.
enum class Op : unsigned char {
  // of a
  kCopy,
  kNegate,
  kAbs,
  kSign,
  kSqrt,
  kExp,
  kExpm1,
  kLog,
  kLog1p,
  kSigmoid,
  kTanh,
  kElu,
  kSoftplus,  // log(1 + exp(a))
  kNot,
  // of a and b
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kMaximum,
  kMinimum,
  kGreater,
  kGreaterEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  // of a, b and c
  kWhere,             // a ? b : c
  kMultiplyAdd,       // a * b + c
  kMultiplySubtract,  // a * b - c
  kSubtractProduct,   // c - a * b
};

struct Instruction {
  Op op;
  unsigned char y, a, b, c;  // registers: the result's and the operands'; 0 where there is none
};

struct Program {
  static constexpr int kMostRegisters = 128;

  const Instruction* code;
  int size;
  const double* constants;
  int constant_count;
  int inputs, outputs;
  int registers;  // in all

  constexpr int first_constant() const { return inputs + outputs; }
  constexpr int first_temporary() const { return first_constant() + constant_count; }
};

struct CellPrograms {
  Program forward, backward;
};

}  // namespace lltm
