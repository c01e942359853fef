// The text of a cell program, read and compiled. The text is what describes a user's cell to the
// operators: gates, states, parameters, and what forward and backward compute of one unit between
// the GEMMs, one assignment a line.
//
//     lltm-cell 1
//     name peephole
//     weight_ih i o g           the gates that x has a part in, in the order of blocks of rows
//     weight_hh i o g           likewise h; may be none
//     bounded                   may be left out: |h'| <= 1 is promised
//     reads_h                   may be left out: forward knows h
//     own_gradient              may be left out: backward is not the derivative of forward
//     state c 0                 0 to 3 lines: name, initial value
//     parameter p 0             0 to 8 lines: name, initial value; one number a unit, learned
//                               nan: what it starts from, the text cannot say
//     forward
//     i = sigmoid z.i           knows z.GATE, states, parameters, h; has to assign h' and STATE'
//     ...
//     save i z.o c              what backward knows besides; no parameters
//     backward
//     d.z.i = ...               knows saved values, parameters, d.h' and d.STATE'; has to assign
//     ...                       d.z.GATE, d.PARAMETER, d.STATE and, with reads_h, d.h
//     end
//
// One space stands between words, and nothing else in a line; each ends with \n. The operations
// are those of Op up to kWhere; operands are names or numbers as Python prints floats.
//
// No header of torch.
#pragma once

#include "cell/cell.h"
#include "cell/program_compiler.h"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lltm {

struct CellText {
  static constexpr size_t kMostBytes = 65'536;
  static constexpr size_t kMostNameLength = 64;
  static constexpr int kMostAssignments = 512;  // in each section

  struct Named {
    std::string name;
    double initial;
  };

  CellText() = default;
  CellText(const CellText&) = delete;  // info and programs point into the original
  CellText& operator=(const CellText&) = delete;

  std::string text, name, layer_class, step_class;
  std::vector<std::string> gates;  // by slot: a gate of both weights is one
  std::vector<Named> states, parameters;
  std::vector<double> initial_states;
  std::vector<std::string> saved;  // in the order of forward's outputs and backward's inputs
  // The block of a slot that x or h has no part in is -1. It reads h without states, too: c then
  // stands for h, and forward's and backward's states are h.
  //
  // It forgets if each next state is the state times a factor, plus what does not depend on it, not
  // by way of the other states either; and the factor is within [-1, 1] whatever the inputs are, as
  // a gate is, and not 1 or -1 for ever. Where h is the only state, and read by GEMMs alone: if it
  // is between two numbers.
  CellInfo info = {};
  CellPrograms programs = {};
  ProgramCode forward, backward;  // what programs points into
};

// Throws std::invalid_argument where the text is not as above or exceeds a limit:
//     cell program, line 7: expected ..., got '...'
//
// The programs compute what the text says, to the bit where products that are added or subtracted
// are rounded first, but for the signs of NaN. An instruction may write the register of one of its
// own operands.
std::unique_ptr<const CellText> parse_cell(std::string_view text);

}  // namespace lltm
