#include "cell/stages.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>

namespace lltm {
namespace {

constexpr unsigned bit(int stage) {
  return 1u << stage;
}

}  // namespace

int StageGraph::add(Node node) {
  node.per_row = node.kind != kInput;
  for (const int operand : node.of) {
    if (operand == kNone) continue;
    node.level = std::max(node.level, nodes_[operand].level);
    node.per_row &= nodes_[operand].per_row;
  }
  nodes_.push_back(std::move(node));
  return static_cast<int>(nodes_.size()) - 1;
}

int StageGraph::level_of(const std::vector<int>& values) const {
  int level = 0;
  for (const int value : values) level = std::max(level, nodes_[value].level);
  return level;
}

int StageGraph::mean(int value) {
  const int level = nodes_[value].level;
  stages_ = std::max(stages_, level + 2);
  const int mean = input({Place::kMean, 0});
  nodes_[mean].level = level + 1;
  nodes_[mean].per_row = true;
  cuts_.push_back({{value}, kNone, mean});
  return mean;
}

std::vector<int> StageGraph::product(
    int operand, const std::vector<int>& values, const Port* from, const std::vector<Port>& to) {
  const int level = level_of(values);
  stages_ = std::max(stages_, level + 2);
  cuts_.push_back({values, operand});
  if (from != nullptr) output(values[0], *from);
  std::vector<int> results;
  for (const Port port : to) {
    results.push_back(input(port));
    nodes_[results.back()].level = level + 1;
  }
  return results;
}

// a - max(a, b), the exponent of a gate with a stabilizer.
bool StageGraph::is_distance_to_maximum(const Node& value) const {
  if (value.op != Op::kSubtract) return false;
  int of = value.of[1];
  while (nodes_[of].op == Op::kDetach) of = nodes_[of].of[0];
  const auto [a, b, none] = nodes_[of].of;
  return nodes_[of].op == Op::kMaximum && (a == value.of[0] || b == value.of[0]);
}

std::pair<std::vector<ValueRange>, std::vector<Factor>> StageGraph::ranges_and_factors(
    int input) const {
  std::vector<ValueRange> ranges;
  std::vector<Factor> factors;
  for (const Node& value : nodes_) {
    std::array<ValueRange, 3> ranges_of = {};
    std::array<Factor, 3> factors_of = {ValueRange{0, 0}, ValueRange{0, 0}, ValueRange{0, 0}};
    for (size_t k = 0; k < value.of.size() && value.of[k] != kNone; ++k) {
      ranges_of[k] = ranges[value.of[k]];
      factors_of[k] = factors[value.of[k]];
    }
    const auto& [a, b, c] = ranges_of;
    const double of_itself = std::ssize(ranges) == input ? 1 : 0;
    ranges.push_back(
        value.kind == kConstant ? range_with({value.number})
        : value.kind == kResult ? range_of(value.op, a, b, c)
        : of_itself != 0        ? within(0, 0)
                                : ValueRange());
    if (is_distance_to_maximum(value)) ranges.back().high = std::min(ranges.back().high, 0.0);
    factors.push_back(
        value.kind == kResult ? factor_of(value.op, factors_of, ranges_of)
                              : ValueRange{of_itself, of_itself});
  }
  return {std::move(ranges), std::move(factors)};
}

// The means of a stage are consecutive.
void StageGraph::number_means() {
  for (int stage = 0; stage < stages_; ++stage) {
    for (const Cut& cut : cuts_) {
      if (cut.operand != kNone || nodes_[cut.values[0]].level != stage) continue;
      const Port port = {Place::kMean, static_cast<unsigned char>(means_++)};
      nodes_[cut.mean].port = port;
      output(cut.values[0], port);
    }
  }
}

// Recomputing it costs no more than reading it.
bool StageGraph::is_free(const Node& value) const {
  if (info_of(value.op).cost == kExpensive) return false;
  return std::all_of(value.of.begin(), value.of.end(), [&](int operand) {
    return operand == kNone || nodes_[operand].kind != kResult;
  });
}

// Values needed for a cut are computed before it. States are written last, because stages read
// them. Other values are computed where they are needed: once and kept for later stages, or several
// times.
void StageGraph::place() {
  const int last = stages_ - 1;
  for (const Cut& cut : cuts_) {
    const int level = level_of(cut.values);
    for (const int value : cut.values) nodes_[value].needed_by |= bit(level);
  }
  const auto is_state = [](Port port) {
    return port.place == Place::kState || port.place == Place::kH;
  };
  for (Output& output : outputs_) {
    if (is_state(output.port)) nodes_[output.value].needed_by |= bit(output.stage = last);
  }
  std::vector<bool> is_output(nodes_.size());
  for (const Output& output : outputs_) is_output[output.value] = true;
  for (size_t k = nodes_.size(); k-- > 0;) {
    Node& value = nodes_[k];
    if (is_output[k] && value.needed_by == 0) value.needed_by = bit(value.level);
    if (value.kind != kResult || value.needed_by == 0) continue;
    unsigned computed = value.needed_by;
    if (!std::has_single_bit(computed) && !is_free(value)) {
      value.home = std::countr_zero(computed);
      value.kept = kept_++;
      computed = bit(value.home);
    }
    for (const int operand : value.of) {
      if (operand != kNone) nodes_[operand].needed_by |= computed;
    }
  }
  for (Output& output : outputs_) {
    if (output.stage != kNone) continue;
    const Node& value = nodes_[output.value];
    // The terms of a mean and the operand of a product are written in the stage before.
    const bool cut = output.port.place == Place::kMean || output.port.place == Place::kOperand;
    output.stage = cut ? value.level : std::countr_zero(value.needed_by);
  }
}

void StageGraph::collect(
    int k, int stage, std::vector<int>& inputs, std::vector<int>& results) const {
  const Node& value = nodes_[k];
  const auto add = [&](std::vector<int>& to) {
    if (std::find(to.begin(), to.end(), k) == to.end()) to.push_back(k);
  };
  if (value.kind == kInput || (value.home != kNone && value.home < stage)) return add(inputs);
  if (value.kind == kConstant) return;
  if (std::find(results.begin(), results.end(), k) != results.end()) return;
  for (const int operand : value.of) {
    if (operand != kNone) collect(operand, stage, inputs, results);
  }
  add(results);
}

Stage StageGraph::compile(int stage, Code& code) const {
  std::vector<Output> outputs;
  for (const Output& output : outputs_) {
    if (output.stage == stage) outputs.push_back(output);
  }
  for (size_t k = 0; k < nodes_.size(); ++k) {
    const Node& value = nodes_[k];
    if (value.home == stage) {
      const auto kept = static_cast<unsigned char>(value.kept);
      outputs.push_back({static_cast<int>(k), {Place::kKept, kept}, stage});
    }
  }
  std::vector<int> inputs, results;
  if (stages_ == 1) {
    for (size_t k = 0; k < nodes_.size(); ++k) {
      if (nodes_[k].kind == kInput) inputs.push_back(static_cast<int>(k));
    }
  }
  for (const Output& output : outputs) collect(output.value, stage, inputs, results);
  std::sort(results.begin(), results.end());  // as in the text

  std::vector<Port>& ports = code.ports.emplace_back();
  ProgramCompiler compiler;
  std::map<int, int> known;
  for (const int k : inputs) {
    const Node& value = nodes_[k];
    const auto kept = static_cast<unsigned char>(value.kept);
    known[k] = compiler.input();
    ports.push_back(value.kind == kInput ? value.port : Port{Place::kKept, kept});
  }
  const auto compiled = [&](int k) {
    if (k == kNone) return kNone;
    const Node& value = nodes_[k];
    return value.kind == kConstant ? compiler.constant(value.number) : known.at(k);
  };
  for (const int k : results) {
    const Operands of = nodes_[k].of;
    known[k] = compiler.result(nodes_[k].op, {compiled(of[0]), compiled(of[1]), compiled(of[2])});
  }
  std::vector<int> written;
  for (const Output& output : outputs) {
    written.push_back(compiled(output.value));
    ports.push_back(output.port);
  }
  Stage made = {};
  made.program = compiler.compile(written, code.programs.emplace_back());
  made.ports = ports.data();
  for (const Cut& cut : cuts_) {
    if (level_of(cut.values) != stage) continue;
    if (cut.operand != kNone) {
      made.operands |= bit(cut.operand);
    } else {
      const int mean = nodes_[cut.mean].port.index;
      if (made.means.count() == 0) made.means.begin = mean;
      made.means.end = mean + 1;
    }
  }
  return made;
}

Pass StageGraph::divide(Code& code) {
  number_means();
  place();
  for (int stage = 0; stage < stages_; ++stage) code.stages.push_back(compile(stage, code));
  return {code.stages.data(), stages_, kept_, means_};
}

}  // namespace lltm
