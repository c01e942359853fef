// A section of a cell program, compiled: from the values that its text computes to instructions on
// registers, with products fused into sums and derivatives into products.
//
// No header of torch.
#pragma once

#include "cell/program.h"
#include "cell/value_ranges.h"

#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace lltm {

// The instructions and constants that a Program points into.
struct ProgramCode {
  std::vector<Instruction> instructions;
  std::vector<double> constants;
};

// The values of a section in the order in which they are computed: an operand stands before.
class ProgramCompiler {
 public:
  using Operands = std::array<int, 3>;
  static constexpr int kNone = -1;

  // Before any other value.
  int input() { return add({.kind = kInput}); }

  int constant(double number) {
    const auto [place, is_new] = constants_.try_emplace(std::bit_cast<uint64_t>(number), kNone);
    if (is_new) place->second = add({.kind = kConstant, .number = number});
    return place->second;
  }

  // Takes negations away where that changes no result.
  int result(Op op, Operands of);

  // What each value may be, and its factor of an input. Before compile().
  std::pair<std::vector<ValueRange>, std::vector<Factor>> ranges_and_factors(int input) const;

  // Registers: program.h.
  Program compile(const std::vector<int>& outputs, ProgramCode& code);

 private:
  enum Kind { kInput, kConstant, kResult };
  struct Value {
    Kind kind;
    double number = 0;
    Op op = Op::kCopy;
    Operands of = {kNone, kNone, kNone};
    int uses = 0;       // none: it is left out
    int place = kNone;  // its register
  };

  int add(const Value& value) {
    values_.push_back(value);
    return static_cast<int>(values_.size()) - 1;
  }
  bool is_negated(int value) const { return values_[value].op == Op::kNegate; }
  int negated(int value) const { return values_[value].of[0]; }

  void count_uses(const std::vector<int>& outputs);

  // Products into the sums and differences that alone use them.
  void fuse_products();

  bool is_constant(int value, double number) const {
    return values_[value].kind == kConstant && values_[value].number == number;
  }
  // 1 - t t
  bool is_tanh_slope(const Value& value) const;
  // e > 0 ? 1 : e + 1
  bool is_elu_slope(const Value& value) const;

  // The derivatives of sigmoid, tanh and elu into the products with a gradient that alone use them.
  // Uses are not counted anew meanwhile, so that what is no longer used counts as if it were.
  void fuse_gradients();

  std::vector<Value> values_;
  std::map<uint64_t, int> constants_;  // by their bits
};

}  // namespace lltm
