// Compiles a section of a serialized cell to register instructions. Fuses products into sums, and
// activation derivatives into products.
//
// No PyTorch header.
#pragma once

#include "cell/program.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace lltm {

enum OpCost { kCheap, kExpensive };
struct OpInfo {
  std::string_view function;  // in math.h
  int operands;
  std::string_view word;  // empty: only the compiler creates it
  OpCost cost;
};
constexpr OpInfo kOps[] = {
#define LLTM_OP(op, function, operands, word, cost, ...) {#function, operands, word, cost},
    LLTM_OPERATIONS(LLTM_OP)
#undef LLTM_OP
};
constexpr const OpInfo& info_of(Op op) {
  return kOps[static_cast<size_t>(op)];
}

struct ProgramCode {
  std::vector<Instruction> instructions;
  std::vector<double> constants;
};

// Operands precede results.
class ProgramCompiler {
 public:
  using Operands = std::array<int, 3>;
  static constexpr int kNone = -1;

  // Inputs precede all other values.
  int input() { return add({.kind = kInput}); }

  int constant(double number) {
    const auto [place, is_new] = constants_.try_emplace(std::bit_cast<uint64_t>(number), kNone);
    if (is_new) place->second = add({.kind = kConstant, .number = number});
    return place->second;
  }

  // Removes negations if that changes no result.
  int result(Op op, Operands of);

  Program compile(const std::vector<int>& outputs, ProgramCode& code);

 private:
  enum Kind { kInput, kConstant, kResult };
  struct Value {
    Kind kind;
    double number = 0;
    Op op = Op::kCopy;
    Operands of = {kNone, kNone, kNone};
    int uses = 0;       // 0: omitted
    int place = kNone;  // register
  };

  int add(const Value& value) {
    values_.push_back(value);
    return static_cast<int>(values_.size()) - 1;
  }
  bool is_negated(int value) const { return values_[value].op == Op::kNegate; }
  int negated(int value) const { return values_[value].of[0]; }

  void count_uses(const std::vector<int>& outputs);

  // Fuses each product into the sum or difference that is its only use.
  void fuse_products();

  bool is_constant(int value, double number) const {
    return values_[value].kind == kConstant && values_[value].number == number;
  }
  // 1 - t t
  bool is_tanh_slope(const Value& value) const;
  // e > 0 ? 1 : e + 1
  bool is_elu_slope(const Value& value) const;

  // Fuses derivatives of sigmoid, tanh and elu into products with a gradient that are their only
  // use. Values that became unused count as used.
  void fuse_gradients();

  std::vector<Value> values_;
  std::map<uint64_t, int> constants_;  // by bit pattern
};

}  // namespace lltm
