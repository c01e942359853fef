// Serialized cells, and an evaluator of their instructions. Compile without contraction: fused
// operations round the product first.
#pragma once

#include "cell/math.h"
#include "cell/program_text.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
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
    "fl = floor s\n"
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
    "fm = fmod t 2.0\n"
    "w1 = greater z.a z.b\n"
    "w2 = greater_equal z.a 0.0\n"
    "w3 = equal w1 w2\n"
    "w4 = not_equal z.a c\n"
    "no = not w1\n"
    "both = and w2 w4\n"
    "any = or no w3\n"
    "mx = maximum fm -inf\n"
    "mn = minimum u inf\n"
    "wh = where any mx mn\n"
    "dv = divide l q_half\n"
    "gt = multiply g t\n"
    "gtu = add gt u\n"
    "rr = multiply r r\n"
    "rrl = subtract rr l\n"
    "eg = multiply g t\n"
    "veg = subtract v eg\n"
    "sr = multiply fl r\n"
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

// A product, a mean, a given gate, a gate of h.
inline const std::string kStagedText =
    "lltm-cell 2\nname staged\nweight_ih r n\nweight_hh r n k\ninput m\nreads_h\n"
    "state c 0.0\nparameter p 0.5\nforward\nt1 = sigmoid z.r\nv = multiply t1 h\n"
    "z.n = product v\nt2 = multiply p c\nt3 = mean z.n\nt4 = subtract z.n t3\nt5 = add t4 z.m\n"
    "t6 = tanh t5\nc' = add t2 t6\nt7 = sigmoid z.k\nt8 = multiply c' t7\nt9 = multiply h 0.5\n"
    "h' = add t8 t9\nsave h c t1 v t6 t7\nbackward\nt2 = multiply p c\nc_next = add t2 t6\n"
    "t3 = multiply d.h' 0.5\nt4 = multiply d.h' c_next\nt5 = multiply d.h' t7\nt8 = add d.c' t5\n"
    "t9 = multiply t4 t7\nt10 = multiply t9 t7\nd.z.k = subtract t9 t10\nt11 = multiply t6 t6\n"
    "t12 = subtract 1.0 t11\nd.z.m = multiply t8 t12\nt13 = negate d.z.m\nt14 = mean t13\n"
    "d.z.n = add d.z.m t14\nd.c = multiply t8 p\nd.p = multiply t8 c\nt15 = product d.z.n\n"
    "t16 = multiply t15 t1\nt17 = multiply t15 h\nd.h = add t3 t16\nt18 = multiply t17 t1\n"
    "t19 = multiply t18 t1\nd.z.r = subtract t18 t19\nend\n";

// As many gates, states and parameters as a cell can have.
inline const std::string kLimitsText = [] {
  // With k instead of #, k + 4 and k + 8 instead of + and *, and k - 1 instead of -.
  const auto each = [](int begin, int end, const std::string& line) {
    std::string text;
    for (int k = begin; k < end; ++k) {
      for (const char c : line) {
        const int number = c == '#' ? k : c == '+' ? k + 4 : c == '*' ? k + 8 : k - 1;
        text += std::strchr("#+*-", c) == nullptr ? std::string(1, c) : std::to_string(number);
      }
    }
    return text;
  };
  return "lltm-cell 1\nname limits\nweight_ih" + each(0, 11, " g#") + "\nweight_hh" +
         each(0, 10, " g#") + " g11\nreads_h\n" + each(0, 4, "state c# 0.5\n") +
         each(0, 12, "parameter p# 0.#\n") + each(0, 4, "parameter q# 0.#\n") + "forward\n" +
         each(0, 12, "ph# = multiply p# h\na# = add z.g# ph#\ns# = tanh a#\n") +
         each(0, 4, "sc# = multiply s+ c#\nqs# = multiply q# s#\nc#' = add sc# qs#\n") +
         each(0, 4, "y# = multiply s* c#'\n") +
         "y4 = add y0 y1\ny5 = add y2 y3\ny6 = add y4 y5\nh' = multiply 0.25 y6\n" + "save h" +
         each(0, 12, " s#") + each(0, 4, " c# c#'") + "\nbackward\ndh = multiply 0.25 d.h'\n" +
         each(0, 4, "dy# = multiply dh s*\ndc# = add d.c#' dy#\nds* = multiply dh c#'\n") +
         each(0, 4, "ds+ = multiply dc# c#\nds# = multiply dc# q#\nd.q# = multiply dc# s#\n") +
         each(0, 4, "d.c# = multiply dc# s+\n") +
         each(0, 12, "t# = multiply s# s#\nu# = subtract 1.0 t#\nd.z.g# = multiply ds# u#\n") +
         each(0, 12, "d.p# = multiply d.z.g# h\nv# = multiply d.z.g# p#\n") + "w0 = copy v0\n" +
         each(1, 12, "w# = add w- v#\n") + "d.h = copy w11\nend\n";
}();

inline const std::vector<std::string> kCellTexts = {kDuoText, kAloneText, kLimitsText, kEveryText};

// The serialized cell in the file $LLTM_TEST_CELL (tests_py/test_cuda_build.py), or these cells.
inline std::vector<std::string> given_cell_or(std::vector<std::string> cells) {
  const char* const path = std::getenv("LLTM_TEST_CELL");
  if (path == nullptr) return cells;
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return {text.str()};
}

// The words of serialized cells, in the order of Op.
inline const std::vector<std::string> kOperations = [] {
  std::vector<std::string> words;
  for (const lltm::OpInfo& op : lltm::kOps) {
    if (!op.word.empty()) words.emplace_back(op.word);
  }
  return words;
}();

inline double apply(lltm::Op op, double a, double b, double c) {
  const auto with_operands = [&](auto count, const auto& function) {
    if constexpr (count == 1) return function(a);
    if constexpr (count == 2) return function(a, b);
    if constexpr (count == 3) return function(a, b, c);
  };
  switch (op) {
#define LLTM_APPLY(op, function, operands, ...)                                    \
  case lltm::Op::op:                                                               \
    return with_operands(std::integral_constant<int, operands>(), [](auto... of) { \
      return lltm::math::function(of...);                                          \
    });
    LLTM_OPERATIONS(LLTM_APPLY)
#undef LLTM_APPLY
  }
  throw std::logic_error("an operation that Op lacks");
}

// Throws std::logic_error if the program violates program.h.
inline std::vector<double> run_program(
    const lltm::Program& program, const std::vector<double>& inputs) {
  const auto check = [](bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
  };
  check(program.registers <= lltm::Program::kMostRegisters, "too many registers");
  check(program.first_temporary() <= program.registers, "registers are missing");
  check(program.inputs == std::ssize(inputs), "another number of inputs");
  std::vector<std::optional<double>> values(inputs.begin(), inputs.end());
  values.resize(program.first_constant());
  values.insert(values.end(), program.constants, program.constants + program.constant_count);
  values.resize(program.registers);
  for (int k = 0; k < program.size; ++k) {
    const lltm::Instruction& instruction = program.code[k];
    const int of[] = {instruction.a, instruction.b, instruction.c};
    double operands[3] = {};
    for (int j = 0; j < 3; ++j) {
      if (j < lltm::info_of(instruction.op).operands) {
        check(of[j] < program.registers && values[of[j]], "an operand without a value");
        operands[j] = *values[of[j]];
      } else {
        check(of[j] == 0, "one operand too many");
      }
    }
    const int y = instruction.y;
    check(y < program.registers, "a result out of bounds");
    const bool output = program.inputs <= y && y < program.first_constant();
    check(output ? !values[y] : y >= program.first_temporary(), "a register is written again");
    values[y] = apply(instruction.op, operands[0], operands[1], operands[2]);
  }
  std::vector<double> outputs;
  for (int y = program.inputs; y < program.first_constant(); ++y) {
    check(values[y].has_value(), "no output");
    outputs.push_back(*values[y]);
  }
  return outputs;
}

}  // namespace lltm_test
