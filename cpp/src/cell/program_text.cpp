#include "cell/program_text.h"

#include "cell/cells.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <locale>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace lltm {
namespace {

using std::string;
using std::string_view;

[[noreturn]] void wrong_text(int line, const string& expected, const string& got) {
  throw std::invalid_argument(
      "cell program, line " + std::to_string(line) + ": expected " + expected + ", got " + got);
}

string quoted_text(string_view text) {
  constexpr size_t kLongest = 60;
  constexpr string_view kDigits = "0123456789abcdef";
  string quoted = "'";
  for (const char c : text.substr(0, kLongest)) {
    if (c >= ' ' && c <= '~') {
      quoted += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      quoted += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  return quoted + (text.size() > kLongest ? "...'" : "'");
}

// Adjacent spaces give empty words.
std::vector<string_view> words_of(string_view line) {
  std::vector<string_view> words;
  for (size_t space = line.find(' '); space != string_view::npos; space = line.find(' ')) {
    words.push_back(line.substr(0, space));
    line.remove_prefix(space + 1);
  }
  words.push_back(line);
  return words;
}

// "at most 3 states"
string at_most(size_t count, const string& what) {
  return "at most " + std::to_string(count) + " " + what;
}

class TextLines {
 public:
  explicit TextLines(string_view text) : rest_(text) {
    if (text.size() > CellText::kMostBytes) {
      wrong_text(1, at_most(CellText::kMostBytes, "bytes"), std::to_string(text.size()));
    }
    next();
  }

  int number() const { return number_; }
  const std::vector<string_view>& words() const { return words_; }
  bool begins_with(string_view word) const { return !words_.empty() && words_[0] == word; }

  void next() {
    ++number_;
    words_.clear();
    if (rest_.empty()) return;
    const size_t end = rest_.find('\n');
    line_ = rest_.substr(0, end);
    if (end == string_view::npos) fail("a line that ends with \\n", line_);
    rest_.remove_prefix(end + 1);
    words_ = words_of(line_);
    for (const string_view word : words_) {
      if (word.empty()) fail("words with one space between them", line_);
    }
  }

  bool take(string_view line) {
    const bool taken = !words_.empty() && line_ == line;
    if (taken) next();
    return taken;
  }
  void expect(string_view line) {
    if (!take(line)) fail(quoted_text(line));
  }

  [[noreturn]] void fail(const string& expected) const {
    wrong_text(number_, expected, words_.empty() ? "the end of the cell" : quoted_text(line_));
  }
  [[noreturn]] void fail(const string& expected, string_view got) const {
    wrong_text(number_, expected, quoted_text(got));
  }

 private:
  string_view rest_, line_;
  std::vector<string_view> words_;
  int number_ = 0;
};

bool is_name(string_view word) {
  constexpr string_view kCharacters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz";
  return word.find_first_not_of(kCharacters) == string_view::npos && word[0] > '9' &&
         word != "inf" && word != "nan";
}

void check_name(const TextLines& lines, string_view word) {
  if (!is_name(word)) lines.fail("a name of letters, digits and _", word);
  if (word.size() > CellText::kMostNameLength) {
    lines.fail("a name of " + at_most(CellText::kMostNameLength, "characters"), word);
  }
}

// Older C++ libraries have std::from_chars only for integers.
double number_of(const TextLines& lines, string_view word, const string& expected) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (word == "inf") return kInfinity;
  if (word == "-inf") return -kInfinity;
  std::istringstream stream{string(word)};
  stream.imbue(std::locale::classic());
  double value = 0;
  const bool valid = word.find_first_not_of("+-.0123456789e") == string_view::npos &&
                     (stream >> value) && stream.eof();
  if (!valid) lines.fail(expected, word);
  return value;
}

std::optional<Op> op_of(string_view word) {
  static const std::vector<string_view> names = words_of(  // in the order of Op
      "copy negate abs sign sqrt exp expm1 log log1p sigmoid tanh elu softplus not detach "
      "add subtract multiply divide maximum minimum greater greater_equal equal not_equal and or "
      "where");
  const auto found = std::find(names.begin(), names.end(), word);
  if (found == names.end()) return std::nullopt;
  return static_cast<Op>(found - names.begin());
}

int operands_of(Op op) {
  return op < Op::kAdd ? 1 : op < Op::kWhere ? 2 : 3;
}

using Names = std::set<string, std::less<>>;

class Section {
 public:
  // Begins at the section's name. Local values must not have a name in `taken`.
  Section(TextLines& lines, const string& name, const Names& taken)
      : lines_(lines), name_(name), taken_(taken), begin_(lines.number()) {
    lines.expect(name);
  }

  // In the order of registers. The text cannot use an input without a name.
  void input(const string& name = "") { known_[name] = compiler_.input(); }
  void output(const string& name) { outputs_.push_back(name); }

  void assignments(const string& last) {
    const auto is_assignment = [&] {
      return lines_.words().size() > 1 && lines_.words()[1] == "=";
    };
    for (int count = 0; is_assignment(); lines_.next()) {
      if (count++ == CellText::kMostAssignments) {
        lines_.fail(at_most(CellText::kMostAssignments, "assignments in " + name_));
      }
      assign();
    }
    if (!lines_.begins_with(last)) lines_.fail("'NAME = OPERATION OPERANDS' or '" + last + "'");
    for (const string& output : outputs_) {
      if (!knows(output)) lines_.fail("an assignment of " + output + " in " + name_);
    }
  }

  bool knows(string_view name) const { return known_.contains(name); }

  // CellInfo::forgets (program_text.h).
  bool forgets(const std::vector<string>& states) const {
    std::vector<std::vector<bool>> reaches;  // [k][n]: next state n depends on k
    for (const string& state : states) {
      const auto [ranges, factors] = compiler_.ranges_and_factors(known_.at(state));
      const Factor& factor = factors[known_.at(state + "'")];
      if (!factor || factor->low < -1 || factor->high > 1) return false;
      if (factor->is(1) || factor->is(-1)) return false;
      reaches.emplace_back();
      for (const string& other : states) {
        reaches.back().push_back(other != state && depends(factors[known_.at(other + "'")]));
      }
    }
    // Dependences over several steps.
    for (size_t by = 0; by < states.size(); ++by) {
      for (std::vector<bool>& from : reaches) {
        for (size_t to = 0; to < states.size(); ++to) {
          if (from[by] && reaches[by][to]) from[to] = true;
        }
      }
    }
    for (size_t k = 0; k < states.size(); ++k) {
      if (reaches[k][k]) return false;
    }
    return true;
  }
  bool is_bounded(const string& name) const {
    const ValueRange range =
        compiler_.ranges_and_factors(ProgramCompiler::kNone).first[known_.at(name)];
    return std::isfinite(range.low) && std::isfinite(range.high);
  }

  void assign_zero(const string& name) {
    output(name);
    known_[name] = compiler_.constant(0);
  }

  Program compile(ProgramCode& code) {
    std::vector<int> outputs;
    for (const string& name : outputs_) outputs.push_back(known_.at(name));
    const Program program = compiler_.compile(outputs, code);
    if (program.registers > Program::kMostRegisters) {
      const string expected = name_ + " to use " + at_most(Program::kMostRegisters, "registers");
      wrong_text(begin_, expected, std::to_string(program.registers));
    }
    return program;
  }

 private:
  void assign() {
    const std::vector<string_view>& words = lines_.words();
    const string_view name = words[0];
    if (knows(name) || taken_.contains(name)) lines_.fail("an unused name", name);
    if (std::find(outputs_.begin(), outputs_.end(), name) == outputs_.end()) {
      check_name(lines_, name);
    }
    if (words.size() < 3) lines_.fail("'NAME = OPERATION OPERANDS'");
    const std::optional<Op> op = op_of(words[2]);
    if (!op) lines_.fail("an operation", words[2]);
    const size_t count = operands_of(*op);
    if (words.size() != 3 + count) {
      lines_.fail(
          string(words[2]) + " of " + std::to_string(count) +
          (count == 1 ? " operand" : " operands"));
    }
    ProgramCompiler::Operands operands = {
        ProgramCompiler::kNone, ProgramCompiler::kNone, ProgramCompiler::kNone};
    std::transform(words.begin() + 3, words.end(), operands.begin(), [&](string_view word) {
      const auto known = known_.find(word);
      if (known != known_.end()) return known->second;
      return compiler_.constant(number_of(lines_, word, "a known name or a number"));
    });
    known_.emplace(name, compiler_.result(*op, operands));
  }

  TextLines& lines_;
  const string name_;
  const Names& taken_;
  const int begin_;  // first line
  ProgramCompiler compiler_;
  std::map<string, int, std::less<>> known_;
  std::vector<string> outputs_;
};

// FNV-1a, the same on every system: packed weights are saved with the hash.
uint64_t hash(string_view text) {
  uint64_t sum = 0xcbf29ce484222325;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return sum;
}

std::vector<string> gates_of(TextLines& lines, const string& weight) {
  if (!lines.begins_with(weight)) lines.fail("'" + weight + " GATES'");
  std::vector<string> gates;
  for (size_t k = 1; k < lines.words().size(); ++k) {
    const string_view word = lines.words()[k];
    if (gates.size() == CellInfo::kMostSlots)
      lines.fail(at_most(CellInfo::kMostSlots, "gates"), word);
    check_name(lines, word);
    if (std::find(gates.begin(), gates.end(), word) != gates.end()) {
      lines.fail("each gate once in " + weight, word);
    }
    gates.emplace_back(word);
  }
  return gates;
}

void read_gates(TextLines& lines, CellText& cell) {
  const std::vector<string> of_x = gates_of(lines, "weight_ih");
  if (of_x.empty()) lines.fail("a gate in weight_ih");
  lines.next();
  const std::vector<string> of_h = gates_of(lines, "weight_hh");
  const auto block_of = [](const std::vector<string>& gates, const string& gate) {
    const auto found = std::find(gates.begin(), gates.end(), gate);
    return found == gates.end() ? -1 : static_cast<int>(found - gates.begin());
  };
  for (const bool both : {false, true}) {
    for (const string& gate : of_x) {
      if ((block_of(of_h, gate) >= 0) == both) cell.gates.push_back(gate);
    }
    if (!both) cell.info.h.begin = static_cast<int>(cell.gates.size());
  }
  for (const string& gate : of_h) {
    if (block_of(of_x, gate) < 0) cell.gates.push_back(gate);
  }
  if (cell.gates.size() > CellInfo::kMostSlots) {
    lines.fail(at_most(CellInfo::kMostSlots, "different gates in weight_ih and weight_hh"));
  }
  cell.info.x.end = static_cast<int>(of_x.size());
  cell.info.h.end = static_cast<int>(cell.gates.size());
  for (size_t slot = 0; slot < cell.gates.size(); ++slot) {
    cell.info.x_blocks[slot] = block_of(of_x, cell.gates[slot]);
    cell.info.h_blocks[slot] = block_of(of_h, cell.gates[slot]);
  }
  lines.next();
}

// Lines such as `state c 0`. If `may_lack`, nan is a value that is not stored.
std::vector<CellText::Named> read_named(
    TextLines& lines, const string& word, int most, bool may_lack, Names& taken) {
  std::vector<CellText::Named> all;
  for (; lines.begins_with(word); lines.next()) {
    const std::vector<string_view>& words = lines.words();
    if (words.size() != 3) lines.fail("'" + word + " NAME NUMBER'");
    if (std::ssize(all) == most) lines.fail(at_most(most, word + "s"));
    check_name(lines, words[1]);
    if (!taken.emplace(words[1]).second) lines.fail("an unused name", words[1]);
    const double initial = may_lack && words[2] == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                                         : number_of(lines, words[2], "a number");
    all.push_back({string(words[1]), initial});
  }
  return all;
}

void read_saved(TextLines& lines, Section& forward, CellText& cell) {
  for (size_t k = 1; k < lines.words().size(); ++k) {
    const string_view word = lines.words()[k];
    const auto is_word = [&](const CellText::Named& named) { return named.name == word; };
    if (cell.saved.size() == CellInfo::kMostSaved) {
      lines.fail(at_most(CellInfo::kMostSaved, "saved values"), word);
    }
    if (!forward.knows(word) ||
        std::any_of(cell.parameters.begin(), cell.parameters.end(), is_word)) {
      lines.fail("a value of forward that is not a parameter", word);
    }
    if (std::find(cell.saved.begin(), cell.saved.end(), word) != cell.saved.end()) {
      lines.fail("each value once", word);
    }
    cell.saved.emplace_back(word);
    forward.output(cell.saved.back());
  }
  lines.next();
}

}  // namespace

std::unique_ptr<const CellText> parse_cell(string_view text) {
  auto cell = std::make_unique<CellText>();
  CellInfo& info = cell->info;
  TextLines lines(text);
  lines.expect("lltm-cell 1");
  if (!lines.begins_with("name") || lines.words().size() != 2) lines.fail("'name NAME'");
  check_name(lines, lines.words()[1]);
  cell->name = lines.words()[1];
  lines.next();
  read_gates(lines, *cell);
  info.bounded = lines.take("bounded");
  const bool reads_h = lines.take("reads_h");
  info.own_gradient = lines.take("own_gradient");
  Names taken = {"h", "z"};
  cell->states = read_named(lines, "state", CellInfo::kMostStates, /*may_lack=*/false, taken);
  cell->parameters =
      read_named(lines, "parameter", CellInfo::kMostParameters, /*may_lack=*/true, taken);
  info.reads_h = reads_h || cell->states.empty();
  if (!lines.begins_with("forward")) {
    lines.fail(
        "'bounded', 'reads_h', 'own_gradient', 'state', 'parameter' or 'forward', in this order");
  }

  Section forward(lines, "forward", taken);
  for (const string& gate : cell->gates) forward.input("z." + gate);
  if (info.reads_h) forward.input(reads_h ? "h" : "");
  for (const auto& state : cell->states) forward.input(state.name);
  for (const auto& parameter : cell->parameters) forward.input(parameter.name);
  forward.output("h'");
  for (const auto& state : cell->states) forward.output(state.name + "'");
  forward.assignments("save");
  std::vector<string> all_states;
  if (reads_h) all_states.emplace_back("h");
  for (const auto& state : cell->states) all_states.push_back(state.name);
  info.forgets = all_states.empty() ? forward.is_bounded("h'") : forward.forgets(all_states);
  read_saved(lines, forward, *cell);
  cell->programs.forward = forward.compile(cell->forward);

  Section backward(lines, "backward", taken);
  for (const string& saved : cell->saved) backward.input(saved);
  for (const auto& parameter : cell->parameters) backward.input(parameter.name);
  backward.input("d.h'");
  for (const auto& state : cell->states) backward.input("d." + state.name + "'");
  for (const string& gate : cell->gates) backward.output("d.z." + gate);
  for (const auto& parameter : cell->parameters) backward.output("d." + parameter.name);
  if (reads_h) backward.output("d.h");
  for (const auto& state : cell->states) backward.output("d." + state.name);
  backward.assignments("end");
  if (info.reads_h && !reads_h) backward.assign_zero("d.h");  // the last output
  cell->programs.backward = backward.compile(cell->backward);
  lines.expect("end");
  if (!lines.words().empty()) lines.fail("the end of the cell");

  cell->text = text;
  cell->layer_class = cell->name + ".Layer";
  cell->step_class = cell->name + ".Cell";
  for (const auto& [name, initial] : cell->states) {
    info.state_names[info.states++] = name.c_str();
    cell->initial_states.push_back(initial);
  }
  for (const auto& parameter : cell->parameters) {
    info.parameter_names[info.parameters++] = parameter.name.c_str();
  }
  cell->programs.name = cell->name.c_str();
  cell->programs.hash = hash(text);
  cell->programs.initial_states = cell->initial_states.data();
  info.name = cell->text.c_str();
  info.layer_class = cell->layer_class.c_str();
  info.step_class = cell->step_class.c_str();
  info.id = kProgramId;
  info.slots = static_cast<int>(cell->gates.size());
  info.saved = static_cast<int>(cell->saved.size());
  info.programs = &cell->programs;
  return cell;
}

}  // namespace lltm
