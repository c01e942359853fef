// Divides a section of a serialized cell into stages (program.h) and compiles these.
//
// No PyTorch header.
#pragma once

#include "cell/program_compiler.h"
#include "cell/value_ranges.h"

#include <deque>
#include <utility>
#include <vector>

namespace lltm {

// A section as a graph. Operands precede results.
class StageGraph {
 public:
  using Operands = ProgramCompiler::Operands;
  static constexpr int kNone = ProgramCompiler::kNone;

  int input(Port port) { return add({.kind = kInput, .port = port}); }
  int constant(double number) { return add({.kind = kConstant, .number = number}); }
  int result(Op op, Operands of) { return add({.kind = kResult, .op = op, .of = of}); }

  // Averages `value`.
  int mean(int value);
  // The product of `values`, written to `from` if given: operand p, or the gradients of its gates.
  // Its results are read from the ports, one value each.
  std::vector<int> product(
      int operand, const std::vector<int>& values, const Port* from, const std::vector<Port>& to);

  void output(int value, Port port) { outputs_.push_back({value, port}); }

  int stages() const { return stages_; }
  // True if the value is the same for all units: computed from means and numbers.
  bool is_per_row(int value) const { return nodes_[value].per_row; }

  // Each value's range, with 0 for an input, and its factor of this input (value_ranges.h).
  std::pair<std::vector<ValueRange>, std::vector<Factor>> ranges_and_factors(int input) const;

  // Memory of stages.
  struct Code {
    std::deque<ProgramCode> programs;
    std::deque<std::vector<Port>> ports;
    std::vector<Stage> stages;
  };
  Pass divide(Code& code);

 private:
  enum Kind { kInput, kConstant, kResult };
  struct Node {
    Kind kind;
    double number = 0;
    Op op = Op::kCopy;
    Operands of = {kNone, kNone, kNone};
    Port port = {};  // of an input
    bool per_row = false;
    int level = 0;           // first stage that can compute it
    unsigned needed_by = 0;  // a bit per stage
    int home = kNone;        // the only stage that computes it; others read the kept value
    int kept = kNone;
  };
  struct Output {
    int value;
    Port port;
    int stage = kNone;
  };
  struct Cut {
    std::vector<int> values;
    int operand;       // or kNone, for a mean:
    int mean = kNone;  // its result
  };

  int add(Node node);
  int level_of(const std::vector<int>& values) const;
  bool is_free(const Node& value) const;
  bool is_distance_to_maximum(const Node& value) const;
  void number_means();
  void place();
  Stage compile(int stage, Code& code) const;
  void collect(int value, int stage, std::vector<int>& inputs, std::vector<int>& results) const;

  std::vector<Node> nodes_;
  std::vector<Output> outputs_;
  std::vector<Cut> cuts_;
  int stages_ = 1, means_ = 0, kept_ = 0;
};

}  // namespace lltm
