// Serialized cells, and evaluators of their instructions and text.
#pragma once

#include "cell/program_text.h"
#include "cell/record_definition.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace lltm_test {

// A gate of x, a gate of h, two states besides h, a parameter.
inline const std::string kDuoText =
    "lltm-cell 1\n"
    "name duo\n"
    "weight_ih n_x i f\n"
    "weight_hh i n_h f\n"
    "bounded\n"
    "reads_h\n"
    "state c 0\n"
    "state m -1.0\n"
    "parameter p 0.5\n"
    "forward\n"
    "i = sigmoid z.i\n"
    "f = sigmoid z.f\n"
    "pc = multiply p c\n"
    "n = add z.n_x z.n_h\n"
    "npc = add n pc\n"
    "qh = multiply 0.25 h\n"
    "u = add npc qh\n"
    "t = tanh u\n"
    "fc = multiply f c\n"
    "it = multiply i t\n"
    "c' = add fc it\n"
    "half = multiply 0.5 m\n"
    "m' = add half t\n"
    "s = tanh c'\n"
    "g = sigmoid m'\n"
    "h' = multiply s g\n"
    "save i f t s g c\n"
    "backward\n"
    "ds = multiply d.h' g\n"
    "dg = multiply d.h' s\n"
    "not_g = subtract 1.0 g\n"
    "slope_g = multiply g not_g\n"
    "dg_m = multiply dg slope_g\n"
    "dm = add d.m' dg_m\n"
    "ss = multiply s s\n"
    "slope_s = subtract 1.0 ss\n"
    "ds_c = multiply ds slope_s\n"
    "dc = add d.c' ds_c\n"
    "dci = multiply dc i\n"
    "dt = add dm dci\n"
    "tt = multiply t t\n"
    "slope_t = subtract 1.0 tt\n"
    "du = multiply dt slope_t\n"
    "not_i = subtract 1.0 i\n"
    "slope_i = multiply i not_i\n"
    "dct = multiply dc t\n"
    "d.z.i = multiply dct slope_i\n"
    "not_f = subtract 1.0 f\n"
    "slope_f = multiply f not_f\n"
    "dcc = multiply dc c\n"
    "d.z.f = multiply dcc slope_f\n"
    "d.z.n_x = copy du\n"
    "d.z.n_h = copy du\n"
    "d.p = multiply du c\n"
    "dcf = multiply dc f\n"
    "dup = multiply du p\n"
    "d.c = add dcf dup\n"
    "d.m = multiply 0.5 dm\n"
    "d.h = multiply 0.25 du\n"
    "end\n";

// Gates of x only, so no GEMM per step; no state besides h; two parameters.
inline const std::string kAloneText =
    "lltm-cell 1\n"
    "name alone\n"
    "weight_ih a g\n"
    "weight_hh\n"
    "reads_h\n"
    "parameter u 0.5\n"
    "parameter v -0.25\n"
    "forward\n"
    "uh = multiply u h\n"
    "s = add z.a uh\n"
    "g = sigmoid z.g\n"
    "r = maximum s 0.0\n"
    "vg = multiply v g\n"
    "h' = add r vg\n"
    "save s g h\n"
    "backward\n"
    "on = greater s 0.0\n"
    "d.z.a = multiply d.h' on\n"
    "d.u = multiply d.z.a h\n"
    "d.v = multiply d.h' g\n"
    "not_g = subtract 1.0 g\n"
    "slope_g = multiply g not_g\n"
    "dv = multiply d.h' v\n"
    "d.z.g = multiply dv slope_g\n"
    "d.h = multiply d.z.a u\n"
    "end\n";

// All operations, including fused ones. backward is not a derivative.
inline const std::string kEveryText =
    "lltm-cell 1\n"
    "name every\n"
    "weight_ih a b\n"
    "weight_hh b a\n"
    "state c 0.125\n"
    "forward\n"
    "n = negate z.a\n"
    "q = abs z.b\n"
    "s = sign c\n"
    "r = sqrt q\n"
    "e = exp n\n"
    "e2 = exp2 z.b\n"
    "m = expm1 z.b\n"
    "q_half = add q 0.5\n"
    "l = log q_half\n"
    "p = log1p q\n"
    "si = sin z.a\n"
    "co = cos z.b\n"
    "ef = erf c\n"
    "g = sigmoid z.a\n"
    "t = tanh z.b\n"
    "u = elu z.a\n"
    "v = softplus z.b\n"
    "d = detach u\n"
    "w1 = greater z.a z.b\n"
    "w2 = greater_equal z.a 0.0\n"
    "w3 = equal w1 w2\n"
    "w4 = not_equal z.a c\n"
    "no = not w1\n"
    "both = and w2 w4\n"
    "any = or no w3\n"
    "mx = maximum t -inf\n"
    "mn = minimum u inf\n"
    "wh = where any mx mn\n"
    "dv = divide l q_half\n"
    "gt = multiply g t\n"
    "gtu = add gt u\n"
    "rr = multiply r r\n"
    "rrl = subtract rr l\n"
    "eg = multiply g t\n"
    "veg = subtract v eg\n"
    "sr = multiply s r\n"
    "d_sr = subtract d sr\n"
    "sum = add wh dv\n"
    "sums = add sum d_sr\n"
    "c' = tanh sums\n"
    "h' = multiply c' g\n"
    "save n q s e e2 m p si co ef t v both any wh dv gtu rrl veg d c\n"
    "backward\n"
    "sico = multiply si co\n"
    "fe = add sico ef\n"
    "ft = multiply fe t\n"
    "ab = multiply ft d.h'\n"
    "e_e2 = multiply e e2\n"
    "de = multiply e_e2 wh\n"
    "sum = add ab de\n"
    "d.z.a = add sum d.c'\n"
    "dq = multiply q dv\n"
    "dm = subtract dq m\n"
    "d.z.b = multiply dm d.c'\n"
    "cc = where any c d.c'\n"
    "d.c = multiply cc both\n"
    "end\n";

inline const std::vector<std::string> kCellTexts = {kDuoText, kAloneText, kEveryText};

// The words of serialized cells, in the order of Op.
inline const std::vector<std::string> kOperations = [] {
  std::vector<std::string> words;
  for (const lltm::OpInfo& op : lltm::kOps) {
    if (!op.word.empty()) words.emplace_back(op.word);
  }
  return words;
}();

// Fused operations round the product first: compile without contraction.
template <typename Real>
Real scalar(lltm::Op op, Real a, Real b, Real c) {
  using lltm::Op;
  const Real nan = std::isnan(a) ? a : b;
  switch (op) {
    case Op::kCopy:
      return a;
    case Op::kNegate:
      return -a;
    case Op::kAbs:
      return std::abs(a);
    case Op::kSign:
      return std::isnan(a) ? a : Real((a > 0) - (a < 0));
    case Op::kSqrt:
      return std::sqrt(a);
    case Op::kExp:
      return std::exp(a);
    case Op::kExp2:
      return std::exp2(a);
    case Op::kExpm1:
      return std::expm1(a);
    case Op::kLog:
      return std::log(a);
    case Op::kLog1p:
      return std::log1p(a);
    case Op::kSin:
      return std::sin(a);
    case Op::kCos:
      return std::cos(a);
    case Op::kErf:
      return std::erf(a);
    case Op::kSigmoid:
      return 1 / (1 + std::exp(-a));
    case Op::kTanh:
      return std::tanh(a);
    case Op::kElu:
      return a > 0 ? a : std::expm1(a);
    case Op::kSoftplus:
      return a > 0 ? a + std::log1p(std::exp(-a)) : std::log1p(std::exp(a));
    case Op::kNot:
      return a == 0;
    case Op::kDetach:
      return a;
    case Op::kAdd:
      return a + b;
    case Op::kSubtract:
      return a - b;
    case Op::kMultiply:
      return a * b;
    case Op::kDivide:
      return a / b;
    case Op::kMaximum:
      return std::isunordered(a, b) ? nan : std::max(a, b);
    case Op::kMinimum:
      return std::isunordered(a, b) ? nan : std::min(a, b);
    case Op::kGreater:
      return a > b;
    case Op::kGreaterEqual:
      return a >= b;
    case Op::kEqual:
      return a == b;
    case Op::kNotEqual:
      return a != b;
    case Op::kAnd:
      return a != 0 && b != 0;
    case Op::kOr:
      return a != 0 || b != 0;
    case Op::kWhere:
      return a != 0 ? b : c;
    case Op::kMultiplyAdd:
      return a * b + c;
    case Op::kMultiplySubtract:
      return a * b - c;
    case Op::kSubtractProduct:
      return c - a * b;
    case Op::kSigmoidGradient:
      return a * b - a * b * b;
    case Op::kTanhGradient:
      return a * (1 - b * b);
    case Op::kEluGradient:
      return a * (b > 0 ? 1 : b + 1);
    case Op::kAddTanhGradient:
      return a * (1 - b * b) + c;
  }
  throw std::logic_error("an operation that Op lacks");
}

// Throws std::logic_error if the program violates program.h.
template <typename Real = double>
std::vector<Real> run_program(const lltm::Program& program, const std::vector<Real>& inputs) {
  const auto check = [](bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
  };
  check(program.registers <= lltm::Program::kMostRegisters, "too many registers");
  check(program.first_temporary() <= program.registers, "registers are missing");
  check(program.inputs == std::ssize(inputs), "another number of inputs");
  std::vector<Real> values(program.registers);
  std::vector<bool> written(program.registers);
  const auto write = [&](int at, Real value) {
    values[at] = value;
    written[at] = true;
  };
  for (int k = 0; k < program.inputs; ++k) write(k, inputs[k]);
  for (int k = 0; k < program.constant_count; ++k) {
    write(program.first_constant() + k, program.constants[k]);
  }
  for (int k = 0; k < program.size; ++k) {
    const lltm::Instruction& instruction = program.code[k];
    const int count = lltm::info_of(instruction.op).operands;
    const int of[] = {instruction.a, instruction.b, instruction.c};
    Real operands[3] = {};
    for (int j = 0; j < 3; ++j) {
      if (j < count) {
        check(of[j] < program.registers && written[of[j]], "an operand without a value");
        operands[j] = values[of[j]];
      } else {
        check(of[j] == 0, "one operand too many");
      }
    }
    const int y = instruction.y;
    check(y < program.registers, "a result out of bounds");
    const bool output = program.inputs <= y && y < program.first_constant();
    check(output ? !written[y] : y >= program.first_temporary(), "a register is written again");
    write(y, scalar(instruction.op, operands[0], operands[1], operands[2]));
  }
  const auto begin = written.begin() + program.inputs;
  check(std::find(begin, begin + program.outputs, false) == begin + program.outputs, "no output");
  return {values.begin() + program.inputs, values.begin() + program.first_constant()};
}

// Splits fused operations. Unnamed values are numbered; an unnamed output uses its value's name.
inline std::string assignments_of(
    const lltm::Program& program,
    const std::string& stem,
    const std::vector<std::string>& inputs,
    std::vector<std::string>& outputs) {
  using lltm::Op;
  std::ostringstream text;
  text.precision(17);
  std::vector<std::string> known = inputs;
  known.resize(program.registers);
  for (int k = 0; k < program.constant_count; ++k) {
    std::ostringstream number;
    number.precision(17);
    number << program.constants[k];
    known[program.first_constant() + k] = number.str();
  }
  int count = 0;
  const auto assign = [&](Op op, const std::vector<std::string>& operands, std::string name = "") {
    if (name.empty()) name = stem + std::to_string(count++);
    text << name << " = " << kOperations[static_cast<int>(op)];
    for (const std::string& operand : operands) text << ' ' << operand;
    text << '\n';
    return name;
  };
  for (int k = 0; k < program.size; ++k) {
    const lltm::Instruction& i = program.code[k];
    const std::string a = known[i.a], b = known[i.b], c = known[i.c];
    const int output = i.y - program.inputs;
    const bool is_output = 0 <= output && output < program.outputs;
    if (is_output && i.op == Op::kCopy && outputs[output].empty()) {
      outputs[output] = a;
      continue;
    }
    const std::string name = is_output ? outputs[output] : "";
    const auto result = [&]() -> std::string {
      switch (i.op) {
        case Op::kMultiplyAdd:
          return assign(Op::kAdd, {c, assign(Op::kMultiply, {a, b})}, name);
        case Op::kMultiplySubtract:
          return assign(Op::kSubtract, {assign(Op::kMultiply, {a, b}), c}, name);
        case Op::kSubtractProduct:
          return assign(Op::kSubtract, {c, assign(Op::kMultiply, {a, b})}, name);
        case Op::kSigmoidGradient: {
          const std::string product = assign(Op::kMultiply, {a, b});
          return assign(Op::kSubtract, {product, assign(Op::kMultiply, {product, b})}, name);
        }
        case Op::kTanhGradient:
        case Op::kAddTanhGradient: {
          const std::string slope = assign(Op::kSubtract, {"1.0", assign(Op::kMultiply, {b, b})});
          if (i.op == Op::kTanhGradient) return assign(Op::kMultiply, {a, slope}, name);
          return assign(Op::kAdd, {c, assign(Op::kMultiply, {a, slope})}, name);
        }
        case Op::kEluGradient: {
          const std::string positive = assign(Op::kGreater, {b, "0.0"});
          const std::string sum = assign(Op::kAdd, {b, "1.0"});
          return assign(Op::kMultiply, {a, assign(Op::kWhere, {positive, "1.0", sum})}, name);
        }
        default:
          const std::vector<std::string> operands = {a, b, c};
          return assign(
              i.op, {operands.begin(), operands.begin() + lltm::info_of(i.op).operands}, name);
      }
    }();
    known[i.y] = result;
    if (is_output) outputs[output] = result;
  }
  return text.str();
}

template <typename Definition>
std::string text_of_definition(Definition definition) {
  constexpr lltm::CellInfo cell = Definition::kCell;
  const lltm::RecordedDefinition recorded(definition);
  const auto weight = [&](const std::string& name, lltm::SlotRange slots, const int* blocks) {
    std::string line = name;
    for (int block = 0; block < slots.count(); ++block) {
      const int slot = static_cast<int>(std::find(blocks, blocks + cell.slots, block) - blocks);
      line += " g" + std::to_string(slot);
    }
    return line + "\n";
  };
  std::vector<std::string> z, dz, saved(cell.saved);
  for (int slot = 0; slot < cell.slots; ++slot) {
    z.push_back("z.g" + std::to_string(slot));
    dz.push_back("d." + z.back());
  }
  const std::string state = cell.has_c() ? "c" : "h";
  std::vector<std::string> next = {"h'"}, d_next = {"d.h'"};
  if (cell.has_c()) {
    next.emplace_back("c'");
    d_next.emplace_back("d.c'");
  }
  z.push_back(state);
  next.insert(next.end(), saved.begin(), saved.end());
  const std::string forward = assignments_of(recorded.programs().forward.program(), "v", z, next);
  saved.assign(next.end() - cell.saved, next.end());
  std::vector<std::string> known = saved;
  known.insert(known.end(), d_next.begin(), d_next.end());
  dz.push_back("d." + state);
  const std::string backward =
      assignments_of(recorded.programs().backward.program(), "d", known, dz);
  std::string text = std::string("lltm-cell 1\nname ") + cell.name + "\n";
  text += weight("weight_ih", cell.x, cell.x_blocks) + weight("weight_hh", cell.h, cell.h_blocks);
  text += std::string(cell.bounded ? "bounded\n" : "") + (cell.reads_h ? "reads_h\n" : "");
  text += (cell.has_c() ? "state c 0\n" : "") + ("forward\n" + forward) + "save";
  for (const std::string& value : saved) text += " " + value;
  return text + "\nbackward\n" + backward + "end\n";
}

using Values = std::map<std::string, double>;

inline void run_text(const std::string& text, const std::string& section, Values& values) {
  std::istringstream lines(text.substr(text.find("\n" + section + "\n") + section.size() + 2));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, equals, operation;
    words >> name >> equals >> operation;
    if (equals != "=") return;
    double operands[3] = {};
    std::string word;
    for (int k = 0; k < 3 && words >> word; ++k) {
      const auto found = values.find(word);
      operands[k] = found != values.end() ? found->second : std::strtod(word.c_str(), nullptr);
    }
    const auto op = std::find(kOperations.begin(), kOperations.end(), operation);
    values[name] = scalar(
        static_cast<lltm::Op>(op - kOperations.begin()), operands[0], operands[1], operands[2]);
  }
}

// The first bitwise difference of forward and backward between a cell's programs and its text, or
// "".
inline std::string difference_from_text(
    const lltm::CellText& cell, const std::string& text, const std::function<double()>& next) {
  std::string report;
  Values known;
  const auto run = [&](const char* section,
                       const lltm::Program& program,
                       const std::vector<std::string>& inputs,
                       const std::vector<std::string>& outputs) {
    Values values;
    std::vector<double> arguments;
    for (const std::string& name : inputs) {
      const auto found = known.find(name);
      arguments.push_back(found != known.end() ? found->second : next());
      values[name] = arguments.back();
    }
    const std::vector<double> results = run_program(program, arguments);
    run_text(text, section, values);
    if (results.size() != outputs.size()) report += "another number of outputs; ";
    for (size_t k = 0; k < std::min(results.size(), outputs.size()); ++k) {
      const auto found = values.find(outputs[k]);
      const double expected =
          found == values.end() ? 0 : found->second;  // d.h is missing without reads_h
      const bool same = std::isnan(expected) ? std::isnan(results[k])
                                             : results[k] == expected && std::signbit(results[k]) ==
                                                                             std::signbit(expected);
      std::ostringstream line;
      line.precision(17);
      line << section << ": " << outputs[k] << ": expected " << expected << ", got " << results[k];
      if (!same) report += line.str() + "; ";
    }
    known = values;
  };

  std::vector<std::string> z, dz, states, d_states, d_next, next_states, parameters, d_parameters;
  for (const std::string& gate : cell.gates) {
    z.push_back("z." + gate);
    dz.push_back("d.z." + gate);
  }
  if (cell.info.reads_h) {
    states.push_back("h");
    d_states.push_back("d.h");
  }
  next_states.push_back("h'");
  for (const auto& state : cell.states) {
    states.push_back(state.name);
    d_states.push_back("d." + state.name);
    next_states.push_back(state.name + "'");
  }
  for (const std::string& name : next_states) d_next.push_back("d." + name);
  for (const auto& parameter : cell.parameters) {
    parameters.push_back(parameter.name);
    d_parameters.push_back("d." + parameter.name);
  }
  const auto join = [](std::vector<std::string> all,
                       const std::vector<std::string>& b,
                       const std::vector<std::string>& c) {
    all.insert(all.end(), b.begin(), b.end());
    all.insert(all.end(), c.begin(), c.end());
    return all;
  };
  run("forward",
      cell.programs.forward.program(),
      join(z, states, parameters),
      join(next_states, cell.saved, {}));
  run("backward",
      cell.programs.backward.program(),
      join(cell.saved, parameters, d_next),
      join(dz, d_parameters, d_states));
  return report;
}

}  // namespace lltm_test
