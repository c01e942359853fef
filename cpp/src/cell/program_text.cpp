#include "cell/program_text.h"

#include "cell/cells.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
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

// "at most 4 states"
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
  const auto found = std::find_if(
      std::begin(kOps), std::end(kOps), [&](const OpInfo& op) { return op.word == word; });
  if (word.empty() || found == std::end(kOps)) return std::nullopt;
  return static_cast<Op>(found - std::begin(kOps));
}

using Names = std::set<string, std::less<>>;

// An operand of products, and its gates with their ports.
struct ProductOperand {
  string operand;
  std::vector<string> gates;
  std::vector<Port> ports;
};

// Reads the lines `z.GATE = product OPERAND`.
std::vector<ProductOperand> products_of(string_view text) {
  std::vector<ProductOperand> products;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::vector<string_view> words = words_of(text.substr(begin, end - begin));
    if (words.size() != 4 || !words[0].starts_with("z.") || words[2] != "product") continue;
    const string_view gate = words[0].substr(2);
    if (gate.empty() || gate.size() > CellText::kMostNameLength || !is_name(gate)) continue;
    auto found = std::find_if(products.begin(), products.end(), [&](const ProductOperand& product) {
      return product.operand == words[3];
    });
    if (found == products.end()) found = products.insert(found, {string(words[3]), {}, {}});
    found->gates.emplace_back(gate);
  }
  return products;
}

class Section {
 public:
  // Begins at the section's name. Local values must not have a name in `taken`.
  Section(
      TextLines& lines,
      const string& name,
      const Names& taken,
      const std::vector<ProductOperand>* products)
      : lines_(lines), name_(name), taken_(taken), begin_(lines.number()), products_(products) {
    lines.expect(name);
  }

  // In the order of registers. The text cannot use an input without a name.
  void input(const string& name, Port port) { known_[name] = graph_.input(port); }
  void output(const string& name, Port port) { outputs_.emplace_back(name, port); }

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
    for (const auto& [output, port] : outputs_) {
      if (!knows(output)) lines_.fail("an assignment of " + output + " in " + name_);
    }
  }

  bool knows(string_view name) const { return known_.contains(name); }
  bool is_per_row(string_view name) const { return graph_.is_per_row(known_.find(name)->second); }

  // CellInfo::forgets (program_text.h).
  bool forgets(const std::vector<string>& states) const {
    std::vector<std::vector<bool>> reaches;  // [k][n]: next state n depends on k
    for (const string& state : states) {
      const auto [ranges, factors] = graph_.ranges_and_factors(known_.at(state));
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
    const ValueRange range = graph_.ranges_and_factors(StageGraph::kNone).first[known_.at(name)];
    return std::isfinite(range.low) && std::isfinite(range.high);
  }

  void assign_zero(const string& name, Port port) {
    output(name, port);
    known_[name] = graph_.constant(0);
  }

  Pass compile(StageGraph::Code& code) {
    for (const auto& [name, port] : outputs_) graph_.output(known_.at(name), port);
    check(graph_.stages() - 1, Pass::kMostStages - 1, "products and means in a row");
    const Pass pass = graph_.divide(code);
    for (int k = 0; k < pass.count; ++k) {
      check(pass.stages[k].program.registers, Program::kMostRegisters, "registers");
    }
    check(pass.means, Pass::kMostMeans, "means");
    check(pass.kept, Pass::kMostKept, "values for later parts of the step");
    return pass;
  }

 private:
  void assign() {
    const std::vector<string_view>& words = lines_.words();
    const string_view name = words[0];
    if (knows(name) || taken_.contains(name)) lines_.fail("an unused name", name);
    if (!may_assign(name)) check_name(lines_, name);
    if (words.size() < 3) lines_.fail("'NAME = OPERATION OPERANDS'");
    const bool takes_one = words[2] == "mean" || (words[2] == "product" && name_ == "forward");
    if (products_ != nullptr && takes_one && words.size() != 4) {
      lines_.fail(string(words[2]) + " of 1 operand");
    }
    if (products_ != nullptr && words[2] == "mean") {
      known_[string(name)] = graph_.mean(value(words[3]));
      return;
    }
    if (products_ != nullptr && words[2] == "product" && words.size() > 3) return multiply();
    const std::optional<Op> op = op_of(words[2]);
    if (!op) lines_.fail("an operation", words[2]);
    const size_t count = info_of(*op).operands;
    if (words.size() != 3 + count) {
      lines_.fail(
          string(words[2]) + " of " + std::to_string(count) +
          (count == 1 ? " operand" : " operands"));
    }
    StageGraph::Operands of = {StageGraph::kNone, StageGraph::kNone, StageGraph::kNone};
    for (size_t k = 0; k < count; ++k) of[k] = value(words[3 + k]);
    known_[string(name)] = graph_.result(*op, of);
  }

  bool is_backward() const { return name_ == "backward"; }
  bool may_assign(string_view name) const {
    return std::any_of(
               outputs_.begin(),
               outputs_.end(),
               [&](const auto& output) { return output.first == name; }) ||
           (products_ != nullptr && !is_backward() && name.starts_with("z.") &&
            lines_.words().size() == 4 && lines_.words()[2] == "product");
  }

  int value(string_view word) {
    const auto known = known_.find(word);
    if (known != known_.end()) return known->second;
    return graph_.constant(number_of(lines_, word, "a known name or a number"));
  }

  void check(int count, int most, const string& what) const {
    if (count <= most) return;
    wrong_text(begin_, name_ + " to use " + at_most(most, what), std::to_string(count));
  }

  // z.GATE = product OPERAND, or NAME = product d.z.GATES
  void multiply() {
    const std::vector<string_view>& words = lines_.words();
    const bool backward = is_backward();
    for (size_t k = 3; k < words.size() && backward; ++k) {
      if (!words[k].starts_with("d.z.")) lines_.fail("the gate of a product", words[k]);
    }
    const string_view at = words[backward ? 3 : 0];
    const string_view start = backward ? "d.z." : "z.";
    const string gate(at.starts_with(start) ? at.substr(start.size()) : "");
    const auto found =
        std::find_if(products_->begin(), products_->end(), [&](const ProductOperand& p) {
          return std::find(p.gates.begin(), p.gates.end(), gate) != p.gates.end();
        });
    if (found == products_->end()) lines_.fail("the gate of a product", at);
    const auto index = static_cast<unsigned char>(found - products_->begin());
    std::vector<int>& results = results_[index];
    std::vector<int> values;
    for (size_t k = 3; k < words.size(); ++k) {
      if (!knows(words[k])) lines_.fail("a known name", words[k]);
      values.push_back(known_.find(words[k])->second);
    }
    const Port operand = {Place::kOperand, index};
    if (backward) {
      std::set<string> gates(found->gates.begin(), found->gates.end());
      for (size_t k = 3; k < words.size(); ++k) {
        gates.erase(string(words[k].substr(4)));
      }
      if (words.size() - 3 != found->gates.size() || !gates.empty() || !results.empty()) {
        lines_.fail("a single product of all gates of " + found->operand);
      }
      results = graph_.product(index, values, nullptr, {operand});
      known_[string(words[0])] = results[0];
      return;
    }
    if (results.empty()) results = graph_.product(index, values, &operand, found->ports);
    for (size_t k = 0; k < found->gates.size(); ++k) {
      if (found->gates[k] == gate) known_["z." + gate] = results[k];
    }
  }

  TextLines& lines_;
  const string name_;
  const Names& taken_;
  const int begin_;  // first line
  StageGraph graph_;
  const std::vector<ProductOperand>* products_;  // null in version 1
  std::map<int, std::vector<int>> results_;      // by operand
  std::map<string, int, std::less<>> known_;     // values in graph_
  std::vector<std::pair<string, Port>> outputs_;
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

int block_of(const std::vector<string>& gates, const string& gate) {
  const auto found = std::find(gates.begin(), gates.end(), gate);
  return found == gates.end() ? -1 : static_cast<int>(found - gates.begin());
}

// The order of pre-activations: x only | x and operands | x and h | h only | operands only | given.
void read_gates(TextLines& lines, CellText& cell, std::vector<ProductOperand>* products) {
  const std::vector<string> of_x = gates_of(lines, "weight_ih");
  if (of_x.empty() && products == nullptr) lines.fail("a gate in weight_ih");
  lines.next();
  const std::vector<string> of_h = gates_of(lines, "weight_hh");
  for (size_t p = 0; products != nullptr && p < products->size(); ++p) {
    for (const string& gate : (*products)[p].gates) {
      if (block_of(of_h, gate) < 0) lines.fail("the gate of a product, " + gate + ", in weight_hh");
    }
  }
  const auto is_new = [&](const string& gate) { return block_of(of_x, gate) < 0; };
  if (of_x.size() + std::count_if(of_h.begin(), of_h.end(), is_new) > CellInfo::kMostSlots) {
    lines.fail(at_most(CellInfo::kMostSlots, "different gates in weight_ih and weight_hh"));
  }
  lines.next();
  std::vector<string> given;
  if (products != nullptr && lines.begins_with("input")) {
    given = gates_of(lines, "input");
    for (const string& gate : given) {
      if (!is_new(gate)) lines.fail("gates that are not in weight_ih", gate);
    }
    lines.next();
  }
  if (of_x.empty() && given.empty()) lines.fail("a gate in weight_ih or input");
  CellInfo& info = cell.info;
  const auto add = [&](const std::vector<string>& gates, const auto& belongs) {
    const auto begin = static_cast<int>(cell.gates.size());
    for (const string& gate : gates) {
      if (block_of(cell.gates, gate) < 0 && belongs(gate)) cell.gates.push_back(gate);
    }
    return SlotRange{begin, static_cast<int>(cell.gates.size())};
  };
  const auto is_of_x = [&](const string& gate) { return block_of(of_x, gate) >= 0; };
  const auto is_of_h = [&](const string& gate) { return block_of(of_h, gate) >= 0; };
  const auto multiplies = [&](const string& gate) {
    return products != nullptr &&
           std::any_of(products->begin(), products->end(), [&](const ProductOperand& product) {
             return block_of(product.gates, gate) >= 0;
           });
  };
  if (products != nullptr) cell.operands.resize(products->size());
  const auto add_operands = [&](int part, const auto& belongs) {
    for (size_t p = 0; products != nullptr && p < products->size(); ++p) {
      cell.operands[p].gates[part] = add((*products)[p].gates, belongs);
    }
  };
  info.h.begin = add(of_x, [&](const string& gate) { return !is_of_h(gate); }).end;
  add_operands(0, is_of_x);
  info.direct.begin = static_cast<int>(cell.gates.size());
  info.x.end = add(of_x, [&](const string& gate) { return !multiplies(gate); }).end;
  info.direct.end = add(of_h, [&](const string& gate) { return !multiplies(gate); }).end;
  add_operands(1, [](const string&) { return true; });
  info.h.end = static_cast<int>(cell.gates.size());
  add(given, [](const string&) { return true; });
  if (cell.gates.size() > CellInfo::kMostSlots) {
    lines.fail(at_most(CellInfo::kMostSlots, "different gates"));
  }
  info.given = static_cast<int>(given.size());
  for (size_t slot = 0; slot < cell.gates.size(); ++slot) {
    const string& gate = cell.gates[slot];
    info.x_blocks[slot] = block_of(of_x, gate);
    info.h_blocks[slot] = block_of(of_h, gate);
    info.given_blocks[slot] = 1 + block_of(given, gate);
  }
  for (size_t p = 0; products != nullptr && p < products->size(); ++p) {
    for (const string& gate : (*products)[p].gates) {
      const auto slot = static_cast<unsigned char>(block_of(cell.gates, gate));
      (*products)[p].ports.push_back({Place::kGate, slot});
    }
  }
}

// Lines such as `state c 0`. If `may_lack`, nan is a value that is not stored. With `scalars`, sets
// the bits of lines that end with `scalar`.
std::vector<CellText::Named> read_named(
    TextLines& lines,
    const string& word,
    int most,
    bool may_lack,
    Names& taken,
    unsigned* scalars = nullptr) {
  std::vector<CellText::Named> all;
  for (; lines.begins_with(word); lines.next()) {
    const std::vector<string_view>& words = lines.words();
    const bool scalar = scalars != nullptr && words.size() == 4 && words[3] == "scalar";
    if (words.size() != 3 && !scalar) lines.fail("'" + word + " NAME NUMBER'");
    if (scalar) *scalars |= 1u << all.size();
    if (std::ssize(all) == most) lines.fail(at_most(most, word + "s"));
    check_name(lines, words[1]);
    if (!taken.emplace(words[1]).second) lines.fail("an unused name", words[1]);
    const double initial = may_lack && words[2] == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                                         : number_of(lines, words[2], "a number");
    all.push_back({string(words[1]), initial});
  }
  return all;
}

void read_no_bias(TextLines& lines, CellText& cell) {
  if (!lines.begins_with("no_bias")) return;
  const std::vector<string> gates = gates_of(lines, "no_bias");
  if (gates.empty()) lines.fail("'no_bias GATES'");
  for (const string& gate : gates) {
    const int slot = block_of(cell.gates, gate);
    if (slot < 0) lines.fail("a gate", gate);
    cell.info.modules.without_bias |= 1u << slot;
  }
  lines.next();
}

// The words of the line `output`; the states follow.
std::vector<string> read_outputs(TextLines& lines) {
  if (!lines.begins_with("output")) return {};
  std::vector<string> outputs = gates_of(lines, "output");
  if (outputs.empty()) lines.fail("'output STATES'");
  lines.next();
  return outputs;
}

void set_outputs(int line, const std::vector<string>& outputs, CellText& cell) {
  CellInfo& info = cell.info;
  if (outputs.empty()) return;
  info.modules.output_of_h = block_of(outputs, "h");
  for (const string& output : outputs) {
    if (output == "h") continue;
    const auto found = std::find_if(
        cell.states.begin(), cell.states.end(), [&](const auto& s) { return s.name == output; });
    if (found == cell.states.end()) {
      wrong_text(line, "outputs that are h or states", quoted_text(output));
    }
    const auto state = static_cast<int>(found - cell.states.begin());
    info.output_states[info.outputs++] = state + (info.reads_h ? 1 : 0);
  }
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
    const auto index = static_cast<unsigned char>(cell.saved.size());
    cell.saved.emplace_back(word);
    if (forward.is_per_row(word)) cell.programs.per_row |= 1u << index;
    forward.output(cell.saved.back(), {Place::kSaved, index});
  }
  lines.next();
}

}  // namespace

std::unique_ptr<const CellText> parse_cell(string_view text) {
  auto cell = std::make_unique<CellText>();
  CellInfo& info = cell->info;
  TextLines lines(text);
  std::vector<ProductOperand> products;
  const bool second = lines.take("lltm-cell 2");
  if (second) {
    products = products_of(text);
  } else if (!lines.take("lltm-cell 1")) {
    lines.fail("a serialized cell, whose first line is 'lltm-cell 1' or 'lltm-cell 2'");
  }
  std::vector<ProductOperand>* const of_products = second ? &products : nullptr;
  if (!lines.begins_with("name") || lines.words().size() != 2) lines.fail("'name NAME'");
  check_name(lines, lines.words()[1]);
  cell->name = lines.words()[1];
  lines.next();
  read_gates(lines, *cell, of_products);
  if (second) read_no_bias(lines, *cell);
  const int line_of_outputs = lines.number();
  const std::vector<string> outputs = second ? read_outputs(lines) : std::vector<string>();
  info.bounded = lines.take("bounded");
  const bool reads_h = lines.take("reads_h");
  info.custom_gradient = lines.take("own_gradient");
  Names taken = {"h", "z"};
  cell->states = read_named(lines, "state", kMostStates, /*may_lack=*/false, taken);
  cell->parameters = read_named(
      lines,
      "parameter",
      kMostParameters,
      /*may_lack=*/true,
      taken,
      second ? &info.modules.scalars : nullptr);
  info.reads_h = reads_h || cell->states.empty();
  set_outputs(line_of_outputs, outputs, *cell);
  if (!lines.begins_with("forward")) {
    lines.fail(
        "'bounded', 'reads_h', 'own_gradient', 'state', 'parameter' or 'forward', in this order");
  }

  const auto port = [](Place place, size_t index) {
    return Port{place, static_cast<unsigned char>(index)};
  };
  const size_t first = info.reads_h ? 1 : 0;
  Section forward(lines, "forward", taken, of_products);
  for (size_t k = 0; k < cell->gates.size(); ++k) {
    const bool is_product =
        std::any_of(products.begin(), products.end(), [&](const ProductOperand& p) {
          return block_of(p.gates, cell->gates[k]) >= 0;
        });
    if (!is_product) forward.input("z." + cell->gates[k], port(Place::kGate, k));
  }
  if (info.reads_h) forward.input(reads_h ? "h" : "", port(Place::kState, 0));
  for (size_t k = 0; k < cell->states.size(); ++k) {
    forward.input(cell->states[k].name, port(Place::kState, first + k));
  }
  for (size_t k = 0; k < cell->parameters.size(); ++k) {
    forward.input(cell->parameters[k].name, port(Place::kParameter, k));
  }
  forward.output("h'", port(Place::kH, 0));
  for (size_t k = 0; k < cell->states.size(); ++k) {
    forward.output(cell->states[k].name + "'", port(Place::kState, first + k));
  }
  forward.assignments("save");
  std::vector<string> all_states;
  if (reads_h) all_states.emplace_back("h");
  for (const auto& state : cell->states) all_states.push_back(state.name);
  info.forgets = all_states.empty() ? forward.is_bounded("h'") : forward.forgets(all_states);
  read_saved(lines, forward, *cell);
  for (size_t p = 0; p < products.size(); ++p) {
    const auto found = std::find(cell->saved.begin(), cell->saved.end(), products[p].operand);
    if (found == cell->saved.end()) {
      lines.fail("the operand of a product among the saved values", products[p].operand);
    }
    for (const string& gate : products[p].gates) {
      if (!forward.knows("z." + gate)) lines.fail("a product of z." + gate, products[p].operand);
    }
    cell->operands[p].saved = static_cast<int>(found - cell->saved.begin());
    cell->programs.per_row &= ~(1u << cell->operands[p].saved);  // a GEMM reads all units
  }

  Section backward(lines, "backward", taken, of_products);
  for (size_t k = 0; k < cell->saved.size(); ++k) {
    backward.input(cell->saved[k], port(Place::kSaved, k));
  }
  for (size_t k = 0; k < cell->parameters.size(); ++k) {
    backward.input(cell->parameters[k].name, port(Place::kParameter, k));
  }
  backward.input("d.h'", port(Place::kH, 0));
  for (size_t k = 0; k < cell->states.size(); ++k) {
    backward.input("d." + cell->states[k].name + "'", port(Place::kState, first + k));
  }
  for (size_t k = 0; k < cell->gates.size(); ++k) {
    backward.output("d.z." + cell->gates[k], port(Place::kGate, k));
  }
  for (size_t k = 0; k < cell->parameters.size(); ++k) {
    backward.output("d." + cell->parameters[k].name, port(Place::kParameter, k));
  }
  if (reads_h) backward.output("d.h", port(Place::kState, 0));
  for (size_t k = 0; k < cell->states.size(); ++k) {
    backward.output("d." + cell->states[k].name, port(Place::kState, first + k));
  }
  backward.assignments("end");
  if (info.reads_h && !reads_h) backward.assign_zero("d.h", port(Place::kState, 0));  // the last
  cell->programs.forward = forward.compile(cell->forward);
  cell->programs.backward = backward.compile(cell->backward);
  if (cell->programs.forward.count == 1 || cell->programs.backward.count == 1) {
    cell->programs.per_row = 0;  // kernels of a single stage cannot find unit 0
  }
  cell->programs.operands = {cell->operands.data(), static_cast<int>(products.size())};
  lines.expect("end");
  if (!lines.words().empty()) lines.fail("the end of the cell");

  cell->text = text;
  cell->layer_class = cell->name + ".Layer";
  cell->step_class = cell->name + ".Cell";
  for (const auto& [name, initial] : cell->states) {
    info.modules.state_names[info.states++] = name.c_str();
    cell->initial_states.push_back(initial);
  }
  for (const auto& parameter : cell->parameters) {
    info.modules.parameter_names[info.parameters++] = parameter.name.c_str();
  }
  cell->programs.name = cell->name.c_str();
  cell->programs.hash = hash(text);
  cell->programs.initial_states = cell->initial_states.data();
  info.name = cell->text.c_str();
  info.modules.layer_class = cell->layer_class.c_str();
  info.modules.step_class = cell->step_class.c_str();
  info.id = kProgramId;
  info.slots = static_cast<int>(cell->gates.size());
  info.saved = static_cast<int>(cell->saved.size());
  info.programs = &cell->programs;
  return cell;
}

}  // namespace lltm
