// Records a cell definition (definition.h) as cell programs: calls its functions with recorded
// values. No PyTorch header.
#pragma once

#include "cell/definition.h"
#include "cell/stages.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace lltm {
namespace recorded {

struct Value {
  Value() = default;
  Value(double number) : number(number) {}
  Value(StageGraph& graph, int place) : graph(&graph), place(place) {}

  int place_in(StageGraph& of) const { return graph != nullptr ? place : of.constant(number); }

  StageGraph* graph = nullptr;
  int place = StageGraph::kNone;
  double number = 0;
};

template <typename... Values>
Value record(Op op, const Values&... operands) {
  StageGraph* graph = nullptr;
  for (StageGraph* each : {operands.graph...}) graph = each != nullptr ? each : graph;
  StageGraph::Operands places = {StageGraph::kNone, StageGraph::kNone, StageGraph::kNone};
  int k = 0;
  ((places[k++] = operands.place_in(*graph)), ...);
  return {*graph, graph->result(op, places)};
}

#define LLTM_RECORD_1(op, function)       \
  inline Value function(const Value& a) { \
    return record(Op::op, a);             \
  }
#define LLTM_RECORD_2(op, function)                       \
  inline Value function(const Value& a, const Value& b) { \
    return record(Op::op, a, b);                          \
  }
#define LLTM_RECORD_3(op, function)                                       \
  inline Value function(const Value& a, const Value& b, const Value& c) { \
    return record(Op::op, a, b, c);                                       \
  }
#define LLTM_RECORD(op, function, operands, ...) LLTM_RECORD_##operands(op, function)
LLTM_OPERATIONS(LLTM_RECORD)
#undef LLTM_RECORD
#undef LLTM_RECORD_3
#undef LLTM_RECORD_2
#undef LLTM_RECORD_1

inline Value operator-(const Value& a) {
  return record(Op::kNegate, a);
}
inline Value operator+(const Value& a, const Value& b) {
  return record(Op::kAdd, a, b);
}
inline Value operator-(const Value& a, const Value& b) {
  return record(Op::kSubtract, a, b);
}
inline Value operator*(const Value& a, const Value& b) {
  return record(Op::kMultiply, a, b);
}
inline Value operator/(const Value& a, const Value& b) {
  return record(Op::kDivide, a, b);
}
inline Value operator>(const Value& a, const Value& b) {
  return record(Op::kGreater, a, b);
}

}  // namespace recorded

namespace {

// A definition's functions on the registers of its programs.
template <typename Definition>
struct DefinitionRegisters {
  static constexpr CellInfo kCell = Definition::kCell;
  static constexpr ProgramSizes kSizes = ProgramSizes(kCell);

  // Of a column of c. Programs of custom cells have other values.
  static LLTM_CELL_INLINE double initial(int /*column*/) { return 0; }

  template <typename V>
  static LLTM_CELL_INLINE void forward(
      const V (&in)[kSizes.forward_in], V (&out)[kSizes.forward_out]) {
    V z[Definition::kSlots];
    for (int k = 0; k < Definition::kSlots; ++k) z[k] = in[k];
    const auto y = Definition::forward(z, in[Definition::kSlots]);
    out[0] = y.h;
    if constexpr (kCell.has_c()) out[1] = y.c;
    for (int k = 0; k < Definition::kSaved; ++k) out[1 + kCell.states + k] = y.saved[k];
  }

  template <typename V>
  static LLTM_CELL_INLINE void backward(
      const V (&in)[kSizes.backward_in], V (&out)[kSizes.backward_out]) {
    V saved[Definition::kSaved];
    for (int k = 0; k < Definition::kSaved; ++k) saved[k] = in[k];
    const auto d = [&] {
      if constexpr (kCell.has_c()) {
        return Definition::backward(saved, in[Definition::kSaved], in[Definition::kSaved + 1]);
      } else {
        return Definition::backward(saved, in[Definition::kSaved]);
      }
    }();
    for (int k = 0; k < Definition::kSlots; ++k) out[k] = d.dz[k];
    out[Definition::kSlots] = d.dc;
  }
};

}  // namespace

class RecordedDefinition {
 public:
  template <typename Definition>
  explicit RecordedDefinition(Definition /*definition*/) {
    constexpr const CellInfo& kCell = Definition::kCell;
    static_assert(kCell.state_columns() == 1 && kCell.parameters == 0);
    using Registers = DefinitionRegisters<Definition>;
    using enum Place;
    programs_.forward = record(
        Registers::template forward<recorded::Value>,
        {{kGate, kCell.slots}, {kState, 1}},
        {{kH, 1}, {kState, kCell.states}, {kSaved, kCell.saved}},
        forward_);
    programs_.backward = record(
        Registers::template backward<recorded::Value>,
        {{kSaved, kCell.saved}, {kH, 1}, {kState, kCell.states}},
        {{kGate, kCell.slots}, {kState, 1}},
        backward_);
    programs_.name = kCell.name;
    programs_.hash = 0;
    std::memcpy(
        &programs_.hash, kCell.name, std::min(std::strlen(kCell.name), sizeof(programs_.hash)));
    programs_.initial_states = &kInitial;
  }
  RecordedDefinition(const RecordedDefinition&) = delete;
  RecordedDefinition& operator=(const RecordedDefinition&) = delete;

  const CellPrograms& programs() const { return programs_; }

 private:
  static constexpr double kInitial = 0;

  struct Values {
    Place place;
    int count;
  };
  static std::vector<Port> ports_of(std::initializer_list<Values> values) {
    std::vector<Port> ports;
    for (const auto& [place, count] : values) {
      for (int k = 0; k < count; ++k) ports.push_back({place, static_cast<unsigned char>(k)});
    }
    return ports;
  }

  template <int inputs, int outputs>
  static Pass record(
      void (*function)(const recorded::Value (&)[inputs], recorded::Value (&)[outputs]),
      std::initializer_list<Values> from,
      std::initializer_list<Values> to,
      StageGraph::Code& code) {
    StageGraph graph;
    recorded::Value in[inputs], out[outputs];
    int k = 0;
    for (const Port port : ports_of(from)) in[k++] = {graph, graph.input(port)};
    function(in, out);
    k = 0;
    for (const Port port : ports_of(to)) graph.output(out[k++].place_in(graph), port);
    return graph.divide(code);
  }

  StageGraph::Code forward_, backward_;
  CellPrograms programs_ = {};
};

}  // namespace lltm
