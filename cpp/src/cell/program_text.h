// Parses and compiles serialized cells, the operators' form of custom cells: an assignment per
// line.
//
//     lltm-cell 1
//     name peephole
//     weight_ih i o g           gates that depend on x, in order of row blocks
//     weight_hh i o g           likewise for h; may be empty
//     bounded                   optional: guarantees |h'| <= 1
//     reads_h                   optional: forward reads h
//     own_gradient              optional: backward is not the derivative of forward
//     state c 0                 up to kMostStates lines (cell.h): name, initial value
//     parameter p 0             up to kMostParameters lines: name, initial value (nan: not stored);
//                               learned, one value per hidden unit
//     forward
//     i = sigmoid z.i           may use z.GATE, states, parameters, h; assigns h' and each STATE'
//     ...
//     save i z.o c              values for backward; no parameters
//     backward
//     d.z.i = ...               may use saved values, parameters, d.h' and d.STATE'; assigns
//     ...                       d.z.GATE, d.PARAMETER, d.STATE and, with reads_h, d.h
//     end
//
// Version 2 (`lltm-cell 2`) adds
//
//     input m                   after weight_hh, optional: given gates, which are columns of the
//                               input; not in weight_ih
//     no_bias m                 then, optional: gates without biases in modules
//     output c h                then, optional: values of each step that a layer returns
//     parameter p 0 scalar      learned, one value, shape (1)
//     z.n = product v           in forward: instead of h, the weights of gate n multiply v, a saved
//                               value. z.n can be used after this line
//     d = product d.z.n d.z.o   in backward: the gradient of v, from all gates that multiply it
//     m = mean v                mean over the hidden units, the same value for each
//
// Single spaces separate words; each line ends with \n. Operations are those of Op up to kWhere,
// operands are names or numbers as Python prints floats.
//
// No PyTorch header.
#pragma once

#include "cell/cell.h"
#include "cell/program_compiler.h"
#include "cell/stages.h"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lltm {

struct CellText {
  static constexpr size_t kMostBytes = 65'536;
  static constexpr size_t kMostNameLength = 64;
  static constexpr int kMostAssignments = 512;  // in each section

  CellText() = default;
  CellText(const CellText&) = delete;  // info and programs point into the original
  CellText& operator=(const CellText&) = delete;

  std::string text, name, layer_class, step_class;
  std::vector<std::string> gates;  // one per pre-activation
  // The header's lists of names, in its order.
  std::vector<std::string> gates_x, gates_h, gates_input, no_bias, outputs;
  std::vector<std::string> states, parameters;
  std::vector<double> initial_states, initial_parameters;
  std::vector<Operand> operands;
  std::vector<std::string> saved;  // as in forward's outputs and backward's inputs
  // Block -1: the pre-activation does not depend on x or h. Without other states, reads_h is true,
  // and c holds h, the programs' only state.
  //
  // forgets: each next state is factor * state + rest, where rest does not depend on the state,
  // even through other states, and factor is within [-1, 1] for all inputs, like a gate, but not a
  // constant 1 or -1. Or it is max(state + rest, other) with rest <= 0. If h is the only state and
  // only GEMMs read it, a finite range of h' suffices.
  CellInfo info = {};
  CellPrograms programs = {};
  StageGraph::Code forward, backward;
};

// Throws std::invalid_argument:
//     cell program, line 7: expected ..., got '...'
//
// If products are rounded before they are added or subtracted, results are bitwise identical to
// evaluating the text, except NaN signs. An instruction may write a register that it reads.
std::unique_ptr<const CellText> parse_cell(std::string_view text);

}  // namespace lltm
