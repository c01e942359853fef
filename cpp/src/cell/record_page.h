// Records a cell definition (page.h) as cell programs: calls its functions with recorded values. No
// PyTorch header.
#pragma once

#include "cell/page.h"
#include "cell/program_compiler.h"

#include <iterator>
#include <vector>

namespace lltm {
namespace recorded {

struct Value {
  Value() = default;
  Value(double number) : number(number) {}
  Value(ProgramCompiler& compiler, int place) : compiler(&compiler), place(place) {}

  int place_in(ProgramCompiler& of) const {
    return compiler != nullptr ? place : of.constant(number);
  }

  ProgramCompiler* compiler = nullptr;
  int place = ProgramCompiler::kNone;
  double number = 0;
};

template <typename... Values>
Value record(Op op, const Values&... operands) {
  ProgramCompiler* compiler = nullptr;
  for (ProgramCompiler* each : {operands.compiler...}) compiler = each != nullptr ? each : compiler;
  ProgramCompiler::Operands places = {
      ProgramCompiler::kNone, ProgramCompiler::kNone, ProgramCompiler::kNone};
  int k = 0;
  ((places[k++] = operands.place_in(*compiler)), ...);
  return {*compiler, compiler->result(op, places)};
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
#define LLTM_RECORD(op, function, operands) LLTM_RECORD_##operands(op, function)
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

class RecordedPage {
 public:
  template <typename Page>
  explicit RecordedPage(Page /*page*/) {
    static_assert(Page::kCell.state_columns() == 1 && Page::kCell.parameters == 0);
    using Registers = PageRegisters<Page>;
    constexpr ProgramSizes sizes = Registers::kSizes;
    programs_ = {
        record<sizes.forward_in, sizes.forward_out>(
            Registers::template forward<recorded::Value>, forward_),
        record<sizes.backward_in, sizes.backward_out>(
            Registers::template backward<recorded::Value>, backward_),
        Page::kCell.name,
        /*hash=*/0,
        &kInitial};
  }
  RecordedPage(const RecordedPage&) = delete;
  RecordedPage& operator=(const RecordedPage&) = delete;

  const CellPrograms& programs() const { return programs_; }

 private:
  static constexpr double kInitial = 0;

  template <int inputs, int outputs>
  static Program record(
      void (*function)(const recorded::Value (&)[inputs], recorded::Value (&)[outputs]),
      ProgramCode& code) {
    ProgramCompiler compiler;
    recorded::Value in[inputs], out[outputs];
    for (recorded::Value& value : in) value = {compiler, compiler.input()};
    function(in, out);
    std::vector<int> places;
    for (const recorded::Value& value : out) places.push_back(value.place_in(compiler));
    return compiler.compile(places, code);
  }

  ProgramCode forward_, backward_;
  CellPrograms programs_ = {};
};

}  // namespace lltm
