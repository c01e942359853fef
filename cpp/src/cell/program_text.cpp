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
    const bool second = take("lltm-cell 2");
    if (!second && !take("lltm-cell 1")) {
      fail("a serialized cell, whose first line is 'lltm-cell 1' or 'lltm-cell 2'");
    }
    version_ = second ? 2 : 1;
  }

  int version() const { return version_; }
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
  int number_ = 0, version_ = 0;
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
  const auto* const found =
      std::ranges::find(kOps, word, [](const OpInfo& op) { return string_view(op.word); });
  if (word.empty() || found == std::end(kOps)) return std::nullopt;
  return static_cast<Op>(found - std::begin(kOps));
}

using Names = std::set<string, std::less<>>;

Port port_of(Place place, size_t index) {
  return {place, static_cast<unsigned char>(index)};
}

// Index of a gate, or -1.
int block_of(const std::vector<string>& gates, string_view gate) {
  const auto found = std::ranges::find(gates, gate);
  return found == gates.end() ? -1 : static_cast<int>(found - gates.begin());
}

// An operand of products, and its gates with their ports.
struct ProductOperand {
  string operand;
  std::vector<string> gates;
  std::vector<Port> ports;
};
using Products = std::vector<ProductOperand>;

// The product that computes a gate, or the end.
Products::const_iterator product_of(const Products& products, string_view gate) {
  return std::ranges::find_if(
      products, [&](const ProductOperand& product) { return block_of(product.gates, gate) >= 0; });
}

// Reads the lines `z.GATE = product OPERAND`.
Products products_of(string_view text) {
  Products products;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::vector<string_view> words = words_of(text.substr(begin, end - begin));
    if (words.size() != 4 || !words[0].starts_with("z.") || words[2] != "product") continue;
    const string_view gate = words[0].substr(2);
    if (gate.empty() || gate.size() > CellText::kMostNameLength || !is_name(gate)) continue;
    auto found = std::ranges::find(products, words[3], &ProductOperand::operand);
    if (found == products.end()) found = products.insert(found, {string(words[3]), {}, {}});
    found->gates.emplace_back(gate);
  }
  return products;
}

string named(string_view pattern, string_view name) {
  return string(pattern).replace(pattern.find('*'), 1, name);
}

class Section {
 public:
  // Begins at the section's name. Local values must not have a name in `taken`.
  Section(TextLines& lines, const string& name, const Names& taken, const Products& products)
      : lines_(lines), name_(name), taken_(taken), begin_(lines.number()), products_(products) {
    lines.expect(name);
  }

  // In the order of registers. The text cannot use an input without a name.
  void input(const string& name, Port port) { known_[name] = graph_.input(port); }
  void output(const string& name, Port port) { outputs_.emplace_back(name, port); }
  // Names replace the * of the pattern.
  void inputs(
      string_view pattern, const std::vector<string>& names, Place place, size_t first = 0) {
    for (const string& name : names) input(named(pattern, name), port_of(place, first++));
  }
  void outputs(
      string_view pattern, const std::vector<string>& names, Place place, size_t first = 0) {
    for (const string& name : names) output(named(pattern, name), port_of(place, first++));
  }

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
    if (has_cuts() && words[2] == "mean") {
      expect_operands(1);
      set(name, graph_.mean(value(words[3])));
    } else if (has_cuts() && words[2] == "product") {
      is_backward() ? multiply_gradients() : multiply();
    } else {
      const std::optional<Op> op = op_of(words[2]);
      if (!op) lines_.fail("an operation", words[2]);
      const size_t count = info_of(*op).operands;
      expect_operands(count);
      StageGraph::Operands of = {StageGraph::kNone, StageGraph::kNone, StageGraph::kNone};
      for (size_t k = 0; k < count; ++k) of[k] = value(words[3 + k]);
      set(name, graph_.result(*op, of));
    }
  }

  bool has_cuts() const { return lines_.version() == 2; }
  bool is_backward() const { return name_ == "backward"; }
  bool may_assign(string_view name) const {
    const std::vector<string_view>& words = lines_.words();
    const bool is_output =
        std::ranges::find(outputs_, name, &std::pair<string, Port>::first) != outputs_.end();
    return is_output || (has_cuts() && !is_backward() && name.starts_with("z.") &&
                         words.size() == 4 && words[2] == "product");
  }
  void expect_operands(size_t count) const {
    if (lines_.words().size() == 3 + count) return;
    lines_.fail(
        string(lines_.words()[2]) + " of " + std::to_string(count) +
        (count == 1 ? " operand" : " operands"));
  }
  void set(string_view name, int value) { known_[string(name)] = value; }

  int value(string_view word) {
    const auto known = known_.find(word);
    if (known != known_.end()) return known->second;
    return graph_.constant(number_of(lines_, word, "a known name or a number"));
  }

  void check(int count, int most, const string& what) const {
    if (count <= most) return;
    wrong_text(begin_, name_ + " to use " + at_most(most, what), std::to_string(count));
  }

  int known(string_view word) const {
    if (!knows(word)) lines_.fail("a known name", word);
    return known_.find(word)->second;
  }
  const ProductOperand& product(string_view word, string_view prefix) const {
    const auto found = word.starts_with(prefix) ? product_of(products_, word.substr(prefix.size()))
                                                : products_.end();
    if (found == products_.end()) lines_.fail("the gate of a product", word);
    return *found;
  }
  Port port_of_operand(const ProductOperand& product) const {
    return port_of(Place::kOperand, &product - products_.data());
  }

  // z.GATE = product OPERAND
  void multiply() {
    expect_operands(1);
    const string_view name = lines_.words()[0];
    const ProductOperand& of = product(name, "z.");
    const Port operand = port_of_operand(of);
    const int value = known(lines_.words()[3]);
    std::vector<int>& results = results_[operand.index];
    if (results.empty()) results = graph_.product(operand.index, {value}, &operand, of.ports);
    set(name, results[block_of(of.gates, name.substr(2))]);
  }

  // NAME = product d.z.GATES
  void multiply_gradients() {
    const std::vector<string_view>& words = lines_.words();
    const ProductOperand& of = product(words.size() > 3 ? words[3] : words[2], "d.z.");
    std::vector<int> values;
    std::set<string_view> gates;
    for (size_t k = 3; k < words.size(); ++k) {
      if (&product(words[k], "d.z.") == &of) gates.insert(words[k]);
      values.push_back(known(words[k]));
    }
    const Port operand = port_of_operand(of);
    std::vector<int>& results = results_[operand.index];
    if (values.size() != of.gates.size() || gates.size() != values.size() || !results.empty()) {
      lines_.fail("a single product of all gates of " + of.operand);
    }
    results = graph_.product(operand.index, values, nullptr, {operand});
    set(words[0], results[0]);
  }

  TextLines& lines_;
  const string name_;
  const Names& taken_;
  const int begin_;  // first line
  StageGraph graph_;
  const Products& products_;
  std::map<int, std::vector<int>> results_;   // by operand
  std::map<string, int, std::less<>> known_;  // values in graph_
  std::vector<std::pair<string, Port>> outputs_;
};

// FNV-1a, the same on every system: packed weights are saved with the hash.
uint64_t hash(string_view text) {
  uint64_t sum = 0xcbf29ce484222325;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return sum;
}

class CellParser {
 public:
  explicit CellParser(string_view text) : text_(text), lines_(text) {}

  std::unique_ptr<const CellText> parse() {
    if (has_cuts()) products_ = products_of(text_);
    if (!lines_.begins_with("name") || lines_.words().size() != 2) lines_.fail("'name NAME'");
    check_name(lines_, lines_.words()[1]);
    cell_->name = lines_.words()[1];
    lines_.next();
    read_gates();
    read_modules();
    read_states();
    read_forward();
    read_backward();
    lines_.expect("end");
    if (!lines_.words().empty()) lines_.fail("the end of the cell");
    describe();
    return std::move(cell_);
  }

 private:
  bool has_cuts() const { return lines_.version() == 2; }
  bool is_product(string_view gate) const { return product_of(products_, gate) != products_.end(); }
  size_t first_state() const { return cell_->info.reads_h ? 1 : 0; }

  // A line of gates, or of outputs, after the word `first`.
  std::vector<string> names_after(const string& first) {
    if (!lines_.begins_with(first)) lines_.fail("'" + first + " GATES'");
    std::vector<string> names;
    for (size_t k = 1; k < lines_.words().size(); ++k) {
      const string_view word = lines_.words()[k];
      if (names.size() == CellInfo::kMostSlots) {
        lines_.fail(at_most(CellInfo::kMostSlots, "gates"), word);
      }
      check_name(lines_, word);
      if (block_of(names, word) >= 0) lines_.fail("each gate once in " + first, word);
      names.emplace_back(word);
    }
    return names;
  }

  void read_gates() {
    const int line = lines_.number();
    std::vector<string>& of_x = cell_->gates_x;
    std::vector<string>& of_h = cell_->gates_h;
    std::vector<string>& given = cell_->gates_input;
    of_x = names_after("weight_ih");
    if (of_x.empty() && !has_cuts()) lines_.fail("a gate in weight_ih");
    lines_.next();
    of_h = names_after("weight_hh");
    for (const ProductOperand& product : products_) {
      for (const string& gate : product.gates) {
        if (block_of(of_h, gate) >= 0) continue;
        lines_.fail("the gate of a product, " + gate + ", in weight_hh");
      }
    }
    lines_.next();
    if (has_cuts() && lines_.begins_with("input")) {
      given = names_after("input");
      for (const string& gate : given) {
        if (block_of(of_x, gate) >= 0) lines_.fail("gates that are not in weight_ih", gate);
      }
      lines_.next();
    }
    if (of_x.empty() && given.empty()) lines_.fail("a gate in weight_ih or input");
    order_gates();
    const size_t count = cell_->gates.size();
    if (count > CellInfo::kMostSlots) {
      wrong_text(line, at_most(CellInfo::kMostSlots, "different gates"), std::to_string(count));
    }
    for (size_t slot = 0; slot < count; ++slot) {
      const string& gate = cell_->gates[slot];
      cell_->info.x_blocks[slot] = block_of(of_x, gate);
      cell_->info.h_blocks[slot] = block_of(of_h, gate);
      cell_->info.given_blocks[slot] = 1 + block_of(given, gate);
    }
    for (ProductOperand& product : products_) {
      for (const string& gate : product.gates) {
        product.ports.push_back(port_of(Place::kGate, block_of(cell_->gates, gate)));
      }
    }
  }

  // x only | x and operands | x and h | h only | operands only | given
  void order_gates() {
    const std::vector<string>& of_x = cell_->gates_x;
    const std::vector<string>& of_h = cell_->gates_h;
    const std::vector<string>& given = cell_->gates_input;
    std::vector<string>& all = cell_->gates;
    CellInfo& info = cell_->info;
    const auto add = [&](const std::vector<string>& gates, const auto& belongs) {
      const auto begin = static_cast<int>(all.size());
      for (const string& gate : gates) {
        if (block_of(all, gate) < 0 && belongs(gate)) all.push_back(gate);
      }
      return SlotRange{begin, static_cast<int>(all.size())};
    };
    cell_->operands.resize(products_.size());
    const auto add_operands = [&](int part, const auto& belongs) {
      for (size_t p = 0; p < products_.size(); ++p) {
        cell_->operands[p].gates[part] = add(products_[p].gates, belongs);
      }
    };
    const auto always = [](const string&) { return true; };
    const auto is_no_product = [&](const string& gate) { return !is_product(gate); };
    info.h.begin = add(of_x, [&](const string& gate) { return block_of(of_h, gate) < 0; }).end;
    add_operands(0, [&](const string& gate) { return block_of(of_x, gate) >= 0; });
    info.direct.begin = static_cast<int>(all.size());
    info.x.end = add(of_x, is_no_product).end;
    info.direct.end = add(of_h, is_no_product).end;
    add_operands(1, always);
    info.h.end = static_cast<int>(all.size());
    add(given, always);
    info.given = static_cast<int>(given.size());
  }

  // Lines that only the modules read.
  void read_modules() {
    if (has_cuts() && lines_.begins_with("no_bias")) {
      cell_->no_bias = names_after("no_bias");
      if (cell_->no_bias.empty()) lines_.fail("'no_bias GATES'");
      for (const string& gate : cell_->no_bias) {
        const int slot = block_of(cell_->gates, gate);
        if (slot < 0) lines_.fail("a gate", gate);
        cell_->info.modules.without_bias |= 1u << slot;
      }
      lines_.next();
    }
    line_of_outputs_ = lines_.number();
    if (has_cuts() && lines_.begins_with("output")) {
      cell_->outputs = names_after("output");
      if (cell_->outputs.empty()) lines_.fail("'output STATES'");
      lines_.next();
    }
  }

  // The other lines before forward.
  void read_states() {
    CellInfo& info = cell_->info;
    info.bounded = lines_.take("bounded");
    names_h_ = lines_.take("reads_h");
    info.custom_gradient = lines_.take("own_gradient");
    read_named("state", kMostStates, cell_->states, cell_->initial_states);
    read_named("parameter", kMostParameters, cell_->parameters, cell_->initial_parameters);
    info.reads_h = names_h_ || cell_->states.empty();
    const std::vector<string>& outputs = cell_->outputs;
    if (!outputs.empty()) info.modules.output_of_h = block_of(outputs, "h");
    for (const string& output : outputs) {
      if (output == "h") continue;
      const int state = block_of(cell_->states, output);
      if (state < 0) {
        wrong_text(line_of_outputs_, "outputs that are h or states", quoted_text(output));
      }
      info.output_states[info.outputs++] = static_cast<int>(first_state()) + state;
    }
    if (!lines_.begins_with("forward")) {
      lines_.fail(
          "'bounded', 'reads_h', 'own_gradient', 'state', 'parameter' or 'forward', in this order");
    }
  }

  // Lines such as `state c 0`. The value nan of a parameter is not stored.
  void read_named(
      const string& word, int most, std::vector<string>& names, std::vector<double>& values) {
    const bool is_parameter = word == "parameter";
    for (; lines_.begins_with(word); lines_.next()) {
      const std::vector<string_view>& words = lines_.words();
      const bool scalar = is_parameter && has_cuts() && words.size() == 4 && words[3] == "scalar";
      if (words.size() != 3 && !scalar) lines_.fail("'" + word + " NAME NUMBER'");
      if (std::ssize(names) == most) lines_.fail(at_most(most, word + "s"));
      if (scalar) cell_->info.modules.scalars |= 1u << names.size();
      check_name(lines_, words[1]);
      if (!taken_.emplace(words[1]).second) lines_.fail("an unused name", words[1]);
      names.emplace_back(words[1]);
      values.push_back(
          is_parameter && words[2] == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                            : number_of(lines_, words[2], "a number"));
    }
  }

  void read_forward() {
    Section forward(lines_, "forward", taken_, products_);
    for (size_t k = 0; k < cell_->gates.size(); ++k) {
      const string& gate = cell_->gates[k];
      if (!is_product(gate)) forward.input("z." + gate, port_of(Place::kGate, k));
    }
    if (cell_->info.reads_h) forward.input(names_h_ ? "h" : "", port_of(Place::kState, 0));
    forward.inputs("*", cell_->states, Place::kState, first_state());
    forward.inputs("*", cell_->parameters, Place::kParameter);
    forward.output("h'", port_of(Place::kH, 0));
    forward.outputs("*'", cell_->states, Place::kState, first_state());
    forward.assignments("save");
    std::vector<string> read = cell_->states;
    if (names_h_) read.insert(read.begin(), "h");
    cell_->info.forgets = read.empty() ? forward.is_bounded("h'") : forward.forgets(read);
    read_saved(forward);
    set_operands(forward);
    cell_->programs.forward = forward.compile(cell_->forward);
  }

  void read_saved(Section& forward) {
    std::vector<string>& saved = cell_->saved;
    for (size_t k = 1; k < lines_.words().size(); ++k) {
      const string_view word = lines_.words()[k];
      if (saved.size() == CellInfo::kMostSaved) {
        lines_.fail(at_most(CellInfo::kMostSaved, "saved values"), word);
      }
      if (!forward.knows(word) || block_of(cell_->parameters, word) >= 0) {
        lines_.fail("a value of forward that is not a parameter", word);
      }
      if (block_of(saved, word) >= 0) lines_.fail("each value once", word);
      if (forward.is_per_row(word)) cell_->programs.per_row |= 1ull << saved.size();
      saved.emplace_back(word);
    }
    forward.outputs("*", saved, Place::kSaved);
    lines_.next();
  }

  void set_operands(const Section& forward) {
    for (size_t p = 0; p < products_.size(); ++p) {
      const auto& [operand, gates, ports] = products_[p];
      const int saved = block_of(cell_->saved, operand);
      if (saved < 0) lines_.fail("the operand of a product among the saved values", operand);
      for (const string& gate : gates) {
        if (!forward.knows("z." + gate)) lines_.fail("a product of z." + gate, operand);
      }
      cell_->operands[p].saved = saved;
      cell_->programs.per_row &= ~(1ull << saved);  // a GEMM reads all units
    }
  }

  void read_backward() {
    Section backward(lines_, "backward", taken_, products_);
    backward.inputs("*", cell_->saved, Place::kSaved);
    backward.inputs("*", cell_->parameters, Place::kParameter);
    backward.input("d.h'", port_of(Place::kH, 0));
    backward.inputs("d.*'", cell_->states, Place::kState, first_state());
    backward.outputs("d.z.*", cell_->gates, Place::kGate);
    backward.outputs("d.*", cell_->parameters, Place::kParameter);
    if (names_h_) backward.output("d.h", port_of(Place::kState, 0));
    backward.outputs("d.*", cell_->states, Place::kState, first_state());
    backward.assignments("end");
    if (cell_->info.reads_h && !names_h_) {
      backward.assign_zero("d.h", port_of(Place::kState, 0));  // the last
    }
    cell_->programs.backward = backward.compile(cell_->backward);
  }

  void describe() {
    CellInfo& info = cell_->info;
    CellPrograms& programs = cell_->programs;
    cell_->text = text_;
    cell_->layer_class = cell_->name + ".Layer";
    cell_->step_class = cell_->name + ".Cell";
    for (const string& state : cell_->states) {
      info.modules.state_names[info.states++] = state.c_str();
    }
    for (const string& parameter : cell_->parameters) {
      info.modules.parameter_names[info.parameters++] = parameter.c_str();
    }
    programs.operands = {cell_->operands.data(), static_cast<int>(cell_->operands.size())};
    programs.name = cell_->name.c_str();
    programs.hash = hash(text_);
    programs.initial_states = cell_->initial_states.data();
    if (programs.forward.count == 1 || programs.backward.count == 1) {
      programs.per_row = 0;  // kernels of a single stage cannot find unit 0
    }
    info.name = cell_->text.c_str();
    info.modules.layer_class = cell_->layer_class.c_str();
    info.modules.step_class = cell_->step_class.c_str();
    info.slots = static_cast<int>(cell_->gates.size());
    info.saved = static_cast<int>(cell_->saved.size());
    info.programs = &programs;
  }

  const string_view text_;
  TextLines lines_;
  Products products_;  // empty in version 1
  Names taken_ = {"h", "z"};
  int line_of_outputs_ = 0;
  bool names_h_ = false;  // the functions use h
  std::unique_ptr<CellText> cell_ = std::make_unique<CellText>();
};

}  // namespace

std::unique_ptr<const CellText> parse_cell(string_view text) {
  return CellParser(text).parse();
}

}  // namespace lltm
