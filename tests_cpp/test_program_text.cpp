// Compilation and rejected texts of cell programs. Without PyTorch.
#include "cell/program_text.h"

#include "cell_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm {
namespace {

using lltm_test::run_program;

void expect_near(const std::vector<double>& values, const std::vector<double>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t k = 0; k < values.size(); ++k) {
    EXPECT_NEAR(values[k], expected[k], 1e-14 * std::max(1.0, std::abs(expected[k])))
        << "output " << k;
  }
}

const std::string kBase =
    "lltm-cell 1\n"
    "name base\n"
    "weight_ih i n_x\n"
    "weight_hh n_h i\n"
    "bounded\n"
    "reads_h\n"
    "state c -1e30\n"
    "parameter p 0.5\n"
    "parameter q -inf\n"
    "forward\n"
    "a = sigmoid z.i\n"
    "b = multiply z.n_x z.n_h\n"
    "c' = multiply a c\n"
    "h' = add b p\n"
    "save a c h' z.n_h\n"
    "backward\n"
    "d.z.i = multiply a d.h'\n"
    "d.z.n_x = multiply c d.c'\n"
    "d.z.n_h = negate d.z.n_x\n"
    "d.p = copy d.h'\n"
    "d.q = copy d.h'\n"
    "d.h = copy 0.0\n"
    "d.c = copy d.c'\n"
    "end\n";

// Each pair replaces a part of the text by another.
using Edits = std::vector<std::pair<std::string, std::string>>;

std::string edited(std::string text, const Edits& edits) {
  for (const auto& [from, to] : edits) {
    const size_t at = text.find(from);
    if (at == std::string::npos) throw std::logic_error("the text has no " + from);
    text.replace(at, from.size(), to);
  }
  return text;
}
std::string replaced(const std::string& from, const std::string& to) {
  return edited(kBase, {{from, to}});
}

// For a cell with z.i, h, c and p. `value` is the next state; `before` precedes it.
bool forgets(const std::string& before, const std::string& value) {
  return parse_cell(
             "lltm-cell 1\nname one\nweight_ih i\nweight_hh i\nstate c 0\nparameter p 0\n"
             "forward\n" +
             before + "c' = " + value +
             "\nh' = tanh c'\nsave c\nbackward\n"
             "d.z.i = copy 0.0\nd.p = copy 0.0\nd.c = copy 0.0\nend\n")
      ->info.forgets;
}

TEST(CellText, AStateForgetsIfAFactorBoundsIt) {
  const std::string gate = "f = sigmoid z.i\n";
  EXPECT_TRUE(forgets(gate, "multiply f c"));
  EXPECT_TRUE(forgets("", "multiply c 0.9"));
  EXPECT_TRUE(forgets("", "multiply -0.5 c"));
  EXPECT_TRUE(forgets("", "copy z.i")) << "there is nothing to forget";
  EXPECT_TRUE(forgets("t = tanh z.i\na = multiply c t\nb = negate a\n", "subtract z.i b"));
  EXPECT_TRUE(forgets(gate + "g = subtract 1.0 f\na = multiply g c\nb = exp z.i\n", "add a b"));
  EXPECT_TRUE(forgets("d = sigmoid p\na = multiply d c\n", "add z.i a"));
  EXPECT_TRUE(
      forgets(gate + "a = multiply f c\nb = multiply c 0.5\nw = greater z.i 0.0\n", "where w a b"));
  EXPECT_TRUE(forgets(gate + "a = multiply f c\nw = greater z.i 0.0\n", "where w a c"))
      << "at times it is kept";
  EXPECT_TRUE(forgets("m = minimum z.i 1.0\nn = maximum m -1.0\n", "multiply n c"));
  for (const char* bounded : {"sin", "cos", "erf"}) {
    EXPECT_TRUE(forgets(std::string("a = ") + bounded + " z.i\n", "multiply a c")) << bounded;
  }
  EXPECT_TRUE(forgets("a = elu z.i\nm = minimum a 1.0\n", "multiply m c"));
  EXPECT_TRUE(forgets("a = abs z.i\nb = negate a\nm = maximum b -1.0\n", "multiply c m"));
  const std::string exponential = "m = maximum z.i p\nt = detach m\na = subtract p t\ng = exp a\n";
  EXPECT_TRUE(forgets(exponential, "multiply g c"));
  EXPECT_TRUE(forgets(gate + "a = subtract c f\n", "maximum z.i a")) << "grows only by z.i";
}

TEST(CellText, AStateThatNothingBoundsDoesNotForget) {
  const std::string gate = "f = sigmoid z.i\n";
  EXPECT_FALSE(forgets("", "copy c"));
  EXPECT_FALSE(forgets("", "negate c"));
  EXPECT_FALSE(forgets("", "add c z.i"));
  EXPECT_FALSE(forgets("", "multiply c z.i"));
  EXPECT_FALSE(forgets("", "multiply p c"));
  EXPECT_FALSE(forgets("", "multiply c 1.1"));
  EXPECT_FALSE(forgets("e = exp z.i\n", "multiply e c"));
  EXPECT_FALSE(forgets("e = exp2 z.i\n", "multiply e c"));
  EXPECT_FALSE(forgets("e = elu z.i\n", "multiply e c"));
  EXPECT_FALSE(forgets("", "tanh c")) << "not linear";
  EXPECT_FALSE(forgets("s = sign z.i\n", "multiply s c")) << "of the same size for ever";
  EXPECT_FALSE(forgets("f = sigmoid c\n", "multiply f c")) << "the factor depends on it";
  EXPECT_FALSE(forgets("", "divide c 2.0")) << "of this form, but not worth the words";
  EXPECT_FALSE(forgets(gate + "a = multiply f c\n", "add a c"));
  EXPECT_FALSE(forgets("m = maximum z.i p\na = subtract m p\ng = exp a\n", "multiply g c"));
  EXPECT_FALSE(forgets("m = minimum z.i p\na = subtract p m\ng = exp a\n", "multiply g c"));
  EXPECT_FALSE(forgets(gate + "a = add c f\n", "maximum a z.i"));
  EXPECT_FALSE(forgets("a = multiply c 0.5\nw = greater c 0.0\n", "where w a z.i"));
  EXPECT_FALSE(forgets("s = sqrt z.i\nq = sqrt p\na = subtract s q\n", "multiply a c"));
}

TEST(CellText, StatesForgetTogetherUnlessTheyReadEachOther) {
  const auto two_forget =
      [](const std::string& before, const std::string& c, const std::string& d) {
        return parse_cell(
                   "lltm-cell 1\nname two\nweight_ih i\nweight_hh i\nstate c 0\nstate d 0\n"
                   "forward\n" +
                   before + "c' = " + c + "\nd' = " + d +
                   "\nh' = tanh c'\nsave c\nbackward\n"
                   "d.z.i = copy 0.0\nd.c = copy 0.0\nd.d = copy 0.0\nend\n")
            ->info.forgets;
      };
  const std::string gate = "f = sigmoid z.i\na = multiply f c\nb = multiply f d\n";
  EXPECT_TRUE(two_forget(gate, "copy a", "copy b"));
  EXPECT_TRUE(two_forget(gate, "copy a", "add b c'"));
  EXPECT_TRUE(two_forget(gate, "copy a", "tanh c"));
  EXPECT_FALSE(two_forget(gate, "copy a", "add d c'")) << "one does not forget";
  EXPECT_FALSE(two_forget(gate, "add d z.i", "copy c")) << "c of two steps ago, and z";
  EXPECT_FALSE(two_forget(gate, "add a d", "add b c")) << "each of the other";
  EXPECT_FALSE(two_forget(gate, "tanh d", "tanh c"));
}

TEST(CellText, WithOnlyHForgetsIfHIsBounded) {
  const auto of_h = [](const std::string& rest, const std::string& line = "") {
    return parse_cell(
               "lltm-cell 1\nname one\nweight_ih i\nweight_hh i\n" + line + "forward\n" + rest +
               "save\nbackward\nd.z.i = copy 0.0\n" + (line.empty() ? "" : "d.h = copy 0.0\n") +
               "end\n")
        ->info.forgets;
  };
  EXPECT_TRUE(of_h("h' = tanh z.i\n"));
  EXPECT_TRUE(of_h("a = sigmoid z.i\nh' = multiply a 3.0\n"));
  EXPECT_FALSE(of_h("h' = maximum z.i 0.0\n"));
  EXPECT_FALSE(of_h("h' = copy z.i\n"));
  EXPECT_TRUE(of_h("f = sigmoid z.i\na = multiply f h\nh' = add a z.i\n", "reads_h\n"));
  EXPECT_FALSE(of_h("a = tanh z.i\nh' = add a h\n", "reads_h\n"));
}

TEST(CellText, IsParsedLineByLine) {
  const auto cell = parse_cell(kBase);
  EXPECT_EQ(cell->name, "base");
  EXPECT_EQ(cell->gates, (std::vector<std::string>{"n_x", "i", "n_h"}));
  EXPECT_EQ(cell->info.x.count(), 2);
  EXPECT_EQ(cell->info.h.count(), 2);
  EXPECT_EQ(cell->info.x, (SlotRange{0, 2}));
  EXPECT_EQ(cell->info.h, (SlotRange{1, 3}));
  const auto blocks = [](const int* of) { return std::vector<int>(of, of + 3); };
  EXPECT_EQ(blocks(cell->info.x_blocks), (std::vector<int>{1, 0, -1}));
  EXPECT_EQ(blocks(cell->info.h_blocks), (std::vector<int>{-1, 1, 0}));
  EXPECT_TRUE(cell->info.bounded);
  EXPECT_TRUE(cell->info.reads_h);
  EXPECT_TRUE(cell->info.forgets);
  EXPECT_EQ(cell->states, (std::vector<std::string>{"c"}));
  EXPECT_EQ(cell->initial_states, (std::vector<double>{-1e30}));
  EXPECT_EQ(cell->parameters, (std::vector<std::string>{"p", "q"}));
  EXPECT_EQ(cell->initial_parameters, (std::vector<double>{0.5, -HUGE_VAL}));
  EXPECT_EQ(cell->saved, (std::vector<std::string>{"a", "c", "h'", "z.n_h"}));
  // Inputs: z of n_x, i, n_h; h, c; p, q. Outputs: h', c'; a, c, h', z.n_h.
  const double a = 1 / (1 + std::exp(-3.0));
  expect_near(
      run_program(cell->programs.forward.program(), {2, 3, 5, 7, 11, 13, 17}),
      {2 * 5 + 13, a * 11, a, 11, 2 * 5 + 13, 5});
  // Inputs: a, c, h', z.n_h; p, q; d.h', d.c'. Outputs: d.z of n_x, i, n_h; d.p, d.q; d.h, d.c.
  expect_near(
      run_program(cell->programs.backward.program(), {2, 3, 5, 7, 11, 13, 17, 19}),
      {3 * 19, 2 * 17, -3 * 19, 17, 17, 0, 19});
}

using Code = std::vector<std::tuple<Op, int, int, int, int>>;

// The code of base with this forward. h', c' are outputs 7, 8; constants follow.
Code code_of(const std::string& assignments, const char* save = "save") {
  const auto cell = parse_cell(
      kBase.substr(0, kBase.find("a = sigmoid")) + assignments + save +
      "\nbackward\nd.z.i = copy 0\nd.z.n_x = copy 0\nd.z.n_h = copy 0\nd.p = copy 0\n"
      "d.q = copy 0\nd.h = copy 0\nd.c = copy 0\nend\n");
  Code code;
  const Program& program = cell->programs.forward.program();
  for (int k = 0; k < program.size; ++k) {
    const auto& [op, y, a, b, c] = program.code[k];
    code.emplace_back(op, y, a, b, c);
  }
  return code;
}

// Registers of base's forward.
constexpr int kNx = 0, kI = 1, kC = 4, kP = 5, kH1 = 7, kC1 = 8, kNext = 9;

TEST(CellCode, HasEveryOperation) {
  const char* const operands[] = {" z.i", " z.i z.n_x", " z.i z.n_x c"};
  for (size_t k = 0; k < lltm_test::kOperations.size(); ++k) {
    const auto op = static_cast<Op>(k);
    const int count = info_of(op).operands;
    EXPECT_EQ(
        code_of("h' = " + lltm_test::kOperations[k] + operands[count - 1] + "\nc' = copy c\n"),
        (Code{{op, kH1, kI, count > 1 ? kNx : 0, count > 2 ? kC : 0}, {Op::kCopy, kC1, kC, 0, 0}}));
  }
}

TEST(CellCode, FusesProductsUsedOnce) {
  EXPECT_EQ(
      code_of("m = multiply z.i z.n_x\nh' = add m c\nn = multiply p c\nc' = add h' n\n"),
      (Code{{Op::kMultiplyAdd, kH1, kI, kNx, kC}, {Op::kMultiplyAdd, kC1, kP, kC, kH1}}));
  EXPECT_EQ(
      code_of("m = multiply z.i z.n_x\nh' = subtract m c\nn = multiply p c\nc' = subtract h' n\n"),
      (Code{{Op::kMultiplySubtract, kH1, kI, kNx, kC}, {Op::kSubtractProduct, kC1, kP, kC, kH1}}));
  // Fuses only the second product.
  EXPECT_EQ(
      code_of("m = multiply z.i c\nn = multiply p z.n_x\nh' = subtract m n\nc' = copy z.i\n"),
      (Code{
          {Op::kMultiply, kNext, kI, kC, 0},
          {Op::kSubtractProduct, kH1, kP, kNx, kNext},
          {Op::kCopy, kC1, kI, 0, 0}}));
}

TEST(CellCode, FusesDerivativesOfFunctionsIntoProducts) {
  const std::string rest = "c' = copy c\n";
  const Code::value_type copied = {Op::kCopy, kC1, kC, 0, 0};
  const auto expect_one = [&](const std::string& assignments, const Code::value_type& expected) {
    EXPECT_EQ(code_of(assignments + rest), (Code{expected, copied})) << assignments;
  };
  for (const std::string product : {"multiply z.i p", "multiply p z.i"}) {
    for (const std::string again : {"multiply t p", "multiply p t"}) {
      expect_one(
          "t = " + product + "\nu = " + again + "\nh' = subtract t u\n",
          {Op::kSigmoidGradient, kH1, kI, kP, 0});
    }
  }
  const std::string slope = "u = multiply p p\nt = subtract 1.0 u\n";
  for (const std::string product : {"multiply z.i t\n", "multiply t z.i\n"}) {
    expect_one(slope + "h' = " + product, {Op::kTanhGradient, kH1, kI, kP, 0});
    expect_one(
        slope + "m = " + product + "h' = add z.n_x m\n", {Op::kAddTanhGradient, kH1, kI, kP, kNx});
    const std::string of_elu = "g = greater p 0.0\ns = add p 1.0\nt = where g 1.0 s\n";
    expect_one(of_elu + "h' = " + product, {Op::kEluGradient, kH1, kI, kP, 0});
  }
}

TEST(CellCode, DoesNotFuseOtherDerivativesAndValuesUsedElsewhere) {
  const auto size = [](const std::string& assignments, const char* saved = "save") {
    return code_of(assignments + "c' = copy c\n", saved).size();
  };
  EXPECT_EQ(size("t = multiply z.i p\nu = multiply t c\nh' = subtract t u\n"), 3U) << "p is not c";
  EXPECT_EQ(size("t = multiply z.i p\nu = multiply t p\nh' = subtract u t\n"), 3U);
  EXPECT_EQ(size("t = multiply z.i p\nu = multiply t p\nh' = subtract t u\n", "save t"), 3U);
  EXPECT_EQ(size("u = multiply p p\nt = subtract 2.0 u\nh' = multiply z.i t\n"), 3U);
  EXPECT_EQ(size("u = multiply p c\nt = subtract 1.0 u\nh' = multiply z.i t\n"), 3U);
  EXPECT_EQ(size("u = multiply p p\nt = subtract 1.0 u\nh' = multiply t t\n"), 3U);
  const std::string of_elu = "g = greater p 0.0\ns = add p 1.0\n";
  EXPECT_EQ(size(of_elu + "t = where g s 1.0\nh' = multiply z.i t\n"), 5U);
  EXPECT_EQ(size(of_elu + "t = where g 1.0 s\nh' = add z.i t\n"), 5U);
  EXPECT_EQ(size(of_elu + "t = where g 1.0 s\nh' = multiply s t\n"), 5U);
}

TEST(CellCode, DoesNotFuseProductsUsedTwice) {
  EXPECT_EQ(
      code_of("m = multiply z.i z.n_x\nh' = add m c\nc' = add m p\n"),
      (Code{
          {Op::kMultiply, kNext, kI, kNx, 0},
          {Op::kAdd, kH1, kNext, kC, 0},
          {Op::kAdd, kC1, kNext, kP, 0}}));
  EXPECT_EQ(
      code_of("m = multiply z.i z.n_x\nh' = add m m\nc' = copy c\n"),
      (Code{
          {Op::kMultiply, kNext, kI, kNx, 0},
          {Op::kAdd, kH1, kNext, kNext, 0},
          {Op::kCopy, kC1, kC, 0, 0}}));
  EXPECT_EQ(
      code_of("c' = multiply z.i z.n_x\nh' = add c' c\n"),
      (Code{{Op::kMultiply, kC1, kI, kNx, 0}, {Op::kAdd, kH1, kC1, kC, 0}}));
  EXPECT_EQ(
      code_of("m = multiply z.i z.n_x\nh' = add m c\nc' = copy h'\n", "save m"),
      (Code{
          {Op::kMultiply, kC1 + 1, kI, kNx, 0},
          {Op::kAdd, kH1, kC1 + 1, kC, 0},
          {Op::kCopy, kC1, kH1, 0, 0}}));
}

TEST(CellCode, RemovesNegations) {
  const Code copied = {{Op::kCopy, kC1, kC, 0, 0}};
  const std::vector<std::pair<std::string, Code::value_type>> table = {
      {"n = negate z.i\nh' = add c n\n", {Op::kSubtract, kH1, kC, kI, 0}},
      {"n = negate z.i\nh' = add n c\n", {Op::kSubtract, kH1, kC, kI, 0}},
      {"n = negate z.i\nh' = subtract c n\n", {Op::kAdd, kH1, kC, kI, 0}},
      {"n = negate z.i\nm = negate c\nh' = subtract n m\n", {Op::kSubtract, kH1, kC, kI, 0}},
      {"n = negate z.i\nm = negate c\nh' = divide n m\n", {Op::kDivide, kH1, kI, kC, 0}},
      {"n = negate z.i\nm = negate n\nh' = sqrt m\n", {Op::kSqrt, kH1, kI, 0, 0}},
      {"n = negate z.i\nm = multiply n p\nh' = add c m\n", {Op::kSubtractProduct, kH1, kI, kP, kC}},
      {"n = negate z.i\nm = multiply p n\nh' = subtract c m\n",
       {Op::kMultiplyAdd, kH1, kP, kI, kC}},
      {"m = multiply z.i p\nn = negate m\nh' = add n c\n", {Op::kSubtractProduct, kH1, kI, kP, kC}},
  };
  for (const auto& [assignments, expected] : table) {
    EXPECT_EQ(code_of(assignments + "c' = copy c\n"), (Code{expected, copied[0]})) << assignments;
  }
  // Fusion that would change a result or save nothing.
  EXPECT_EQ(code_of("n = negate z.i\nm = negate c\nh' = add n m\nc' = copy c\n").size(), 3U);
  EXPECT_EQ(
      code_of("n = negate z.i\nm = multiply n p\nh' = subtract m c\nc' = copy c\n").size(), 3U);
}

TEST(CellCode, RemovesUnusedInstructions) {
  EXPECT_EQ(
      code_of("e = exp z.i\nf = add e 2.5\ng = copy c\nh' = abs g\nc' = copy g\n"),
      (Code{{Op::kAbs, kH1, kC, 0, 0}, {Op::kCopy, kC1, kC, 0, 0}}));
}

TEST(CellCode, SharesConstants) {
  const auto cell = parse_cell(replaced(
      "h' = add b p\n",
      "unused = add b 7.0\nm = negate -1.0\nr = multiply b m\ns = add r 1.0\nt = multiply s 1\n"
      "u = divide t -0.0\nh' = add u 0.0\n"));
  const Program& forward = cell->programs.forward.program();
  ASSERT_EQ(forward.constant_count, 3);
  EXPECT_EQ(forward.constants[0], 1.0);
  EXPECT_EQ(forward.constants[1], 0.0);
  EXPECT_TRUE(std::signbit(forward.constants[1]));
  EXPECT_FALSE(std::signbit(forward.constants[2]));
}

TEST(CellCode, ReusesRegisters) {
  std::string chain = "v0 = exp z.i\n";
  for (int k = 1; k < 400; ++k) {
    chain += "v" + std::to_string(k) + " = exp v" + std::to_string(k - 1) + "\n";
  }
  const auto cell = parse_cell(replaced("h' = add b p\n", chain + "h' = exp v399\n"));
  const Program& forward = cell->programs.forward.program();
  EXPECT_EQ(forward.registers, forward.first_temporary() + 1);
}

// The sum of `count` values: 2 z.i, 3 z.i, ...
std::string wide(int count) {
  std::string text = "v0 = add z.i z.i\n", sums = "s0 = copy v0\n";
  for (int k = 1; k < count; ++k) {
    const std::string number = std::to_string(k), last = std::to_string(k - 1);
    text += "v" + number + " = add v" + last + " z.i\n";
    sums += "s" + number + " = add s" + last + " v" + number + "\n";
  }
  return replaced("h' = add b p\n", text + sums + "h' = copy s" + std::to_string(count - 1) + "\n");
}

TEST(CellCode, NeedsAtMostAllRegisters) {
  const int free = Program::kMostRegisters - 7 - 6;  // inputs, outputs
  const auto cell = parse_cell(wide(free));
  const Program& forward = cell->programs.forward.program();
  EXPECT_EQ(forward.registers, Program::kMostRegisters);
  EXPECT_EQ(run_program(forward, std::vector<double>(7, 1.0))[0], free * (free + 3) / 2);
}

std::string error_of(const std::string& text) {
  try {
    parse_cell(text);
  } catch (const std::invalid_argument& error) {
    const std::string start = "cell program, line ";
    const std::string message = error.what();
    EXPECT_EQ(message.substr(0, start.size()), start);
    return message.substr(std::min(start.size(), message.size()));
  }
  return "no error";
}

struct Wrong {
  std::string from, to;  // in base
  std::string error;     // after "cell program, line "
};

void expect_errors(const std::string& base, const std::vector<Wrong>& table) {
  for (const auto& [from, to, error] : table) {
    EXPECT_EQ(error_of(edited(base, {{from, to}})), error) << to;
  }
}

const std::string kHeaderLines =
    "'bounded', 'reads_h', 'own_gradient', 'state', 'parameter' or 'forward', in this order";

TEST(CellErrors, NameTheLineAndTheExpectedAndActualText) {
  const std::string assignment = "'NAME = OPERATION OPERANDS'";
  const std::string name = "a name of letters, digits and _";
  const std::string operand = "a known name or a number";
  const std::string first_line =
      "1: expected a serialized cell, whose first line is 'lltm-cell 1' or 'lltm-cell 2', got ";
  const std::string unused = "an unused name";
  const std::string value = "a value of forward that is not a parameter";
  const std::vector<Wrong> table = {
      // lines and words
      {kBase, "", first_line + "the end of the cell"},
      {kBase, "lltm-cell 1", "1: expected a line that ends with \\n, got 'lltm-cell 1'"},
      {"cell 1", "cell 3", first_line + "'lltm-cell 3'"},
      {"lltm-cell 1\n", "lltm-cell 1\r\n", first_line + "'lltm-cell 1\\x0d'"},
      {" base", "  base", "2: expected words with one space between them, got 'name  base'"},
      {"end\n", "end", "24: expected a line that ends with \\n, got 'end'"},
      {"end\n", "end\nend\n", "25: expected the end of the cell, got 'end'"},
      {"end\n", "end now\n", "24: expected 'end', got 'end now'"},
      {"end\n", "", "24: expected 'NAME = OPERATION OPERANDS' or 'end', got the end of the cell"},
      // the header
      {"name base", "name a b", "2: expected 'name NAME', got 'name a b'"},
      {"name base", "name 1a", "2: expected " + name + ", got '1a'"},
      {"name base", "name inf", "2: expected " + name + ", got 'inf'"},
      {"weight_ih i n_x\n", "", "3: expected 'weight_ih GATES', got 'weight_hh n_h i'"},
      {"weight_ih i n_x", "weight_ih i i", "3: expected each gate once in weight_ih, got 'i'"},
      {"weight_ih i n_x\nweight_hh n_h i\n",
       "weight_ih\nweight_hh\n",
       "3: expected a gate in weight_ih, got 'weight_ih'"},
      {"bounded\nreads_h\n",
       "reads_h\nbounded\n",
       "6: expected " + kHeaderLines + ", got 'bounded'"},
      {"state c -1e30", "state c", "7: expected 'state NAME NUMBER', got 'state c'"},
      {"state c -1e30", "state h 0", "7: expected " + unused + ", got 'h'"},
      {"state c -1e30", "state c nan", "7: expected a number, got 'nan'"},
      {"state c -1e30", "state c 1e999", "7: expected a number, got '1e999'"},
      {"state c -1e30", "state c 0x10", "7: expected a number, got '0x10'"},
      {"state c -1e30", "state c 1-2", "7: expected a number, got '1-2'"},
      {"parameter p 0.5", "parameter c 0.5", "8: expected " + unused + ", got 'c'"},
      {"parameter p 0.5", "parameter z 0.5", "8: expected " + unused + ", got 'z'"},
      {"forward\n", "forward now\n", "10: expected 'forward', got 'forward now'"},
      // assignments
      {"a = sig", "a sig", "11: expected " + assignment + " or 'save', got 'a sigmoid z.i'"},
      {"a = sigmoid z.i", "a =", "11: expected " + assignment + ", got 'a ='"},
      {"a = sigmoid z.i", "a = gelu z.i", "11: expected an operation, got 'gelu'"},
      {"sigmoid z.i", "multiply_add c c c", "11: expected an operation, got 'multiply_add'"},
      {"sigmoid z.i", "sigmoid c c", "11: expected sigmoid of 1 operand, got 'a = sigmoid c c'"},
      {"sigmoid z.i", "where c c", "11: expected where of 3 operands, got 'a = where c c'"},
      {"a = sigmoid z.i", "a = sigmoid z.k", "11: expected " + operand + ", got 'z.k'"},
      {"a = sigmoid z.i", "a = sigmoid nan", "11: expected " + operand + ", got 'nan'"},
      {"a = sigmoid z.i", "a.b = sigmoid z.i", "11: expected " + name + ", got 'a.b'"},
      {"b = multiply z.n_x z.n_h", "a = exp a", "12: expected " + unused + ", got 'a'"},
      {"reads_h\nstate c -1e30\nparameter p 0.5\nparameter q -inf\nforward\na = sigmoid z.i",
       "state c -1e30\nparameter p 0.5\nparameter q -inf\nforward\nh = sigmoid z.i",
       "10: expected " + unused + ", got 'h'"},
      {"c' = multiply a c\n",
       "",
       "14: expected an assignment of c' in forward, got 'save a c h' z.n_h'"},
      {"d.h = copy 0.0\n", "", "23: expected an assignment of d.h in backward, got 'end'"},
      {"d.h = copy 0.0\n", "d.x = copy 0.0\n", "22: expected " + name + ", got 'd.x'"},
      {"multiply a d.h'", "multiply b d.h'", "17: expected " + operand + ", got 'b'"},
      {"d.z.i = multiply a d.h'", "a = copy d.h'", "17: expected " + unused + ", got 'a'"},
      // save
      {"save a c h' z.n_h\n", "", "15: expected " + assignment + " or 'save', got 'backward'"},
      {"save a c", "save a a", "15: expected each value once, got 'a'"},
      {"save a c", "save a p", "15: expected " + value + ", got 'p'"},
      {"backward\n", "save a\nbackward\n", "16: expected 'backward', got 'save a'"},
  };
  expect_errors(kBase, table);
}

TEST(CellErrors, OfProductsMeansAndGivenGates) {
  const std::string base =
      "lltm-cell 2\nname n\nweight_ih r n\nweight_hh r n\ninput m\nreads_h\nforward\n"
      "v = multiply z.r h\nz.n = product v\nt = mean z.n\nh' = add t z.m\nsave h v z.r\nbackward\n"
      "d.z.m = copy d.h'\nd.z.n = mean d.h'\ne = product d.z.n\nd.z.r = multiply e h\n"
      "d.h = multiply e z.r\nend\n";
  EXPECT_EQ(error_of(base), "no error");
  const std::string all = "expected a single product of all gates of v";
  const std::vector<Wrong> table = {
      {"lltm-cell 2", "lltm-cell 1", "5: expected " + kHeaderLines + ", got 'input m'"},
      {"input m", "input r", "5: expected gates that are not in weight_ih, got 'r'"},
      {"multiply z.r h", "multiply z.n h", "8: expected a known name or a number, got 'z.n'"},
      {"hh r n", "hh r", "4: expected the gate of a product, n, in weight_hh, got 'weight_hh r'"},
      {"product v", "product w", "9: expected a known name, got 'w'"},
      {"product v", "product v v", "9: expected an unused name, got 'z.n'"},
      {"product v", "product v\nz.n = product v", "10: expected an unused name, got 'z.n'"},
      {"z.n = product v", "z.r = product v", "8: expected a known name or a number, got 'z.r'"},
      {"mean z.n", "mean z.n z.r", "10: expected mean of 1 operand, got 't = mean z.n z.r'"},
      {"h v", "h", "13: expected the operand of a product among the saved values, got 'v'"},
      {"product d.z.n", "product d.z.r", "16: expected the gate of a product, got 'd.z.r'"},
      {"d.z.n\nd.z.r", "d.z.n d.z.m\nd.z.r", "16: expected the gate of a product, got 'd.z.m'"},
      {"d.z.n\nd.z.r", "d.z.n d.z.n\nd.z.r", "16: " + all + ", got 'e = product d.z.n d.z.n'"},
      {"e = ", "f = product d.z.n\ne = ", "17: " + all + ", got 'e = product d.z.n'"},
      {"product d.z.n", "product d.h'", "16: expected the gate of a product, got 'd.h\''"},
      {"mean d.h'\ne = product d.z.n", "product d.z.n", "15: expected a known name, got 'd.z.n'"},
  };
  expect_errors(base, table);
}

TEST(CellErrors, OfOutputsBiasesAndScalars) {
  const std::string base =
      "lltm-cell 2\nname n\nweight_ih a b\nweight_hh a\nno_bias b\noutput c h\nstate c 0\n"
      "parameter p 1 scalar\nforward\nc' = multiply p z.a\nh' = add c' z.b\nsave z.a\nbackward\n"
      "t = add d.h' d.c'\nd.z.a = multiply t p\nd.z.b = copy d.h'\nd.p = multiply t z.a\n"
      "d.c = copy 0\nend\n";
  EXPECT_EQ(error_of(base), "no error");
  const std::vector<Wrong> table = {
      {"lltm-cell 2", "lltm-cell 1", "5: expected " + kHeaderLines + ", got 'no_bias b'"},
      {"no_bias b", "no_bias c", "5: expected a gate, got 'c'"},
      {"no_bias b", "no_bias", "5: expected 'no_bias GATES', got 'no_bias'"},
      {"output c h", "output", "6: expected 'output STATES', got 'output'"},
      {"output c h", "output p", "6: expected outputs that are h or states, got 'p'"},
      {"p 1 scalar", "p 1 scale", "8: expected 'parameter NAME NUMBER', got 'parameter p 1 scale'"},
      {"c 0\n", "c 0 scalar\n", "7: expected 'state NAME NUMBER', got 'state c 0 scalar'"},
  };
  expect_errors(base, table);
}

TEST(CellErrors, QuoteSixtyCharacters) {
  const std::string quoted(60, '!');
  const std::string error = "2: expected a name of letters, digits and _, got '" + quoted;
  EXPECT_EQ(error_of(replaced("base", quoted + "!")), error + "...'");
  EXPECT_EQ(error_of(replaced("base", quoted)), error + "'");
}

TEST(CellErrors, WithoutReadsHThereIsNoH) {
  EXPECT_EQ(
      error_of("lltm-cell 1\nname n\nweight_ih a\nweight_hh a\nforward\nh' = add z.a h\nsave\n"),
      "6: expected a known name or a number, got 'h'");
  EXPECT_EQ(
      error_of("lltm-cell 1\nname n\nweight_ih a\nweight_hh a\nforward\nh' = copy z.a\nsave h\n"),
      "7: expected a value of forward that is not a parameter, got 'h'");
}

// A text at a limit, and a text just above it.
struct Limit {
  std::string taken, refused, error;
};

TEST(CellErrors, NameLimits) {
  // With each of s0, s1, ... instead of each #.
  const auto each = [](int count, const std::string& line) {
    std::string text;
    for (int k = 0; k < count; ++k) text += edited(line, {{"#", "s" + std::to_string(k)}});
    return text;
  };
  const auto states = [&](int count) {
    return edited(
        kBase,
        {{"state c -1e30\n", each(count, "state # 0\n")},
         {"c' = multiply a c\n", each(count, "#' = copy 0\n")},
         {"save a c", "save a"},
         {"d.z.n_x = multiply c d.c'", "d.z.n_x = copy 0"},
         {"d.c = copy d.c'\n", each(count, "d.# = copy 0\n")}});
  };
  const auto parameters = [&](int count) {
    return edited(
        kBase,
        {{"parameter q -inf\n", each(count, "parameter # 0\n")},
         {"d.q = copy d.h'\n", each(count, "d.# = copy 0\n")}});
  };
  const auto gates = [&](int count, const std::string& weight) {
    return edited(
        kBase,
        {{weight, weight + each(count, " #")},
         {"end\n", each(count, "d.z.# = copy 0\n") + "end\n"}});
  };
  const auto assignments = [&](int count) {
    return replaced("b = multiply", each(count, "# = exp z.i\n") + "b = multiply");
  };
  const auto saved = [&](int count) {
    return edited(assignments(count), {{"save a c h' z.n_h", "save a c" + each(count, " #")}});
  };
  const auto name = [](int length) { return replaced("base", std::string(length, 'n')); };
  // Uses many digits, the only part without another limit.
  const auto bytes = [](size_t count) {
    return replaced("0.5", "0.5" + std::string(count - kBase.size(), '0'));
  };
  const auto means = [](int count) {
    std::string text = "lltm-cell 2\nname m\nweight_ih x\nweight_hh x\nforward\n", last = "z.x";
    for (int k = 0; k < count; ++k) {
      const std::string next = "m" + std::to_string(k);
      text += next + " = mean " + last + "\n";
      last = next;
    }
    return text + "h' = copy " + last + "\nsave\nbackward\nd.z.x = copy 0\nend\n";
  };
  const std::vector<Limit> table = {
      {bytes(65536), bytes(65537), "1: expected at most 65536 bytes, got 65537"},
      {name(64),
       name(65),
       "2: expected a name of at most 64 characters, got '" + std::string(60, 'n') + "...'"},
      {states(6), states(7), "13: expected at most 6 states, got 'state s6 0'"},
      {parameters(15), parameters(16), "24: expected at most 16 parameters, got 'parameter s15 0'"},
      {gates(13, "weight_hh n_h i"),
       gates(14, "weight_hh n_h i"),
       "3: expected at most 16 different gates, got 17"},
      {gates(13, "weight_ih i n_x"),
       gates(15, "weight_ih i n_x"),
       "3: expected at most 16 gates, got 's14'"},
      {assignments(508),
       assignments(509),
       "523: expected at most 512 assignments in forward, got 'h' = add b p'"},
      {saved(46), saved(47), "62: expected at most 48 saved values, got 's46'"},
      {wide(115), wide(116), "10: expected forward to use at most 128 registers, got 129"},
      {means(15),
       means(16),
       "5: expected forward to use at most 15 products and means in a row, got 16"},
  };
  for (const Limit& limit : table) {
    EXPECT_NO_THROW(parse_cell(limit.taken)) << limit.error;
    EXPECT_EQ(error_of(limit.refused), limit.error);
  }
}

}  // namespace
}  // namespace lltm
