#include "cell/program_compiler.h"

#include <algorithm>

namespace lltm {

int ProgramCompiler::result(Op op, Operands of) {
  const auto [a, b, c] = of;
  switch (op) {
    case Op::kCopy:
      return a;
    case Op::kNegate:
      if (values_[a].kind == kConstant) return constant(-values_[a].number);
      if (is_negated(a)) return negated(a);
      break;
    case Op::kAdd:
      if (is_negated(b)) return result(Op::kSubtract, {a, negated(b), kNone});
      if (is_negated(a)) return result(Op::kSubtract, {b, negated(a), kNone});
      break;
    case Op::kSubtract:
      if (is_negated(b)) return result(Op::kAdd, {a, negated(b), kNone});
      break;
    case Op::kMultiply:
    case Op::kDivide:
      if (is_negated(a) && is_negated(b)) return result(op, {negated(a), negated(b), kNone});
      break;
    default:
      break;
  }
  return add({.kind = kResult, .op = op, .of = of});
}

Program ProgramCompiler::compile(const std::vector<int>& outputs, ProgramCode& code) {
  count_uses(outputs);
  fuse_products();
  count_uses(outputs);
  fuse_gradients();
  count_uses(outputs);

  int registers = 0;
  for (Value& value : values_) {
    if (value.kind == kInput) value.place = registers++;
  }
  Program program = {};
  program.inputs = registers;
  program.outputs = static_cast<int>(outputs.size());
  std::vector<std::pair<int, int>> copies;  // output, value
  for (const int output : outputs) {
    Value& value = values_[output];
    if (value.kind == kResult && value.place == kNone) {
      value.place = registers++;
    } else {
      copies.emplace_back(registers++, output);
    }
  }
  for (Value& value : values_) {
    if (value.kind != kConstant || value.uses == 0) continue;
    value.place = registers++;
    code.constants.push_back(value.number);
  }

  const int first_temporary = registers;
  std::vector<bool> taken;  // for each temporary
  for (Value& value : values_) {
    if (value.kind != kResult || value.uses == 0) continue;
    Instruction instruction = {.op = value.op, .y = 0, .a = 0, .b = 0, .c = 0};
    unsigned char* const operands[] = {&instruction.a, &instruction.b, &instruction.c};
    for (size_t k = 0; k < value.of.size() && value.of[k] != kNone; ++k) {
      Value& operand = values_[value.of[k]];
      *operands[k] = static_cast<unsigned char>(operand.place);
      if (--operand.uses == 0 && operand.place >= first_temporary) {
        taken[operand.place - first_temporary] = false;
      }
    }
    if (value.place == kNone) {
      const auto free = std::find(taken.begin(), taken.end(), false);
      value.place = first_temporary + static_cast<int>(free - taken.begin());
      if (free == taken.end()) taken.push_back(true);
      taken[value.place - first_temporary] = true;
    }
    instruction.y = static_cast<unsigned char>(value.place);
    code.instructions.push_back(instruction);
  }
  for (const auto& [output, value] : copies) {
    const auto y = static_cast<unsigned char>(output);
    const auto a = static_cast<unsigned char>(values_[value].place);
    code.instructions.push_back({.op = Op::kCopy, .y = y, .a = a, .b = 0, .c = 0});
  }

  program.code = code.instructions.data();
  program.size = static_cast<int>(code.instructions.size());
  program.constants = code.constants.data();
  program.constant_count = static_cast<int>(code.constants.size());
  program.registers = first_temporary + static_cast<int>(taken.size());
  return program;
}

void ProgramCompiler::count_uses(const std::vector<int>& outputs) {
  for (Value& value : values_) value.uses = 0;
  for (const int output : outputs) ++values_[output].uses;
  for (auto value = values_.rbegin(); value != values_.rend(); ++value) {
    for (const int operand : value->of) {
      if (value->uses > 0 && operand != kNone) ++values_[operand].uses;
    }
  }
}

void ProgramCompiler::fuse_products() {
  for (Value& value : values_) {
    if (value.uses == 0 || (value.op != Op::kAdd && value.op != Op::kSubtract)) continue;
    const bool difference = value.op == Op::kSubtract;
    const Operands of = value.of;
    for (const size_t side : {1, 0}) {
      const Value& product = values_[of[side]];
      if (product.op != Op::kMultiply || product.uses != 1) continue;
      value.of = {product.of[0], product.of[1], of[1 - side]};
      if (difference && side == 0) {
        value.op = Op::kMultiplySubtract;
        break;
      }
      bool minus = difference;
      for (size_t k : {0, 1}) {
        if (!is_negated(value.of[k])) continue;
        value.of[k] = negated(value.of[k]);
        minus = !minus;
      }
      value.op = minus ? Op::kSubtractProduct : Op::kMultiplyAdd;
      break;
    }
  }
}

bool ProgramCompiler::is_tanh_slope(const Value& value) const {
  const auto [a, b, c] = value.of;
  return value.op == Op::kSubtractProduct && a == b && is_constant(c, 1);
}

bool ProgramCompiler::is_elu_slope(const Value& value) const {
  if (value.op != Op::kWhere || !is_constant(value.of[1], 1)) return false;
  const Value& greater = values_[value.of[0]];
  const Value& sum = values_[value.of[2]];
  return greater.op == Op::kGreater && is_constant(greater.of[1], 0) && greater.uses == 1 &&
         sum.op == Op::kAdd && is_constant(sum.of[1], 1) && sum.uses == 1 &&
         greater.of[0] == sum.of[0];
}

void ProgramCompiler::fuse_gradients() {
  for (Value& value : values_) {
    if (value.uses == 0) continue;
    const auto [a, b, c] = value.of;
    if (value.op == Op::kSubtractProduct && (a == c || b == c)) {  // t - t s where t = x s
      const int s = a == c ? b : a;
      const Value& t = values_[c];
      if (t.op != Op::kMultiply || t.uses != 2 || (t.of[0] != s && t.of[1] != s)) continue;
      value.op = Op::kSigmoidGradient;
      value.of = {t.of[0] == s ? t.of[1] : t.of[0], s, kNone};
    } else if (value.op == Op::kMultiply || value.op == Op::kMultiplyAdd) {
      const bool adds = value.op == Op::kMultiplyAdd;
      for (const auto& [x, factor] : {std::pair(a, b), std::pair(b, a)}) {
        const Value& slope = values_[factor];
        if (slope.uses != 1) continue;
        if (is_tanh_slope(slope)) {
          value.op = adds ? Op::kAddTanhGradient : Op::kTanhGradient;
          value.of = {x, slope.of[0], c};
          break;
        }
        if (!adds && is_elu_slope(slope)) {
          value.op = Op::kEluGradient;
          value.of = {x, values_[slope.of[0]].of[0], kNone};
          break;
        }
      }
    }
  }
}

}  // namespace lltm
