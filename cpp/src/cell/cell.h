// Describes a cell to all shared code.
//
// H hidden units. weight_ih (Gx * H, I) has a block of H rows per gate that depends on x, weight_hh
// (Gh * H, H) per gate that depends on h. Each hidden unit has S pre-activations ("slots"):
//     z[s] = x (block x_blocks[s] of weight_ih)^T + h (block h_blocks[s] of weight_hh)^T + bias
// A gate that needs both terms separately has two. The order [x only | x and h | h only] makes each
// GEMM write contiguous columns. Slot s of hidden unit j is column s * H + j of z (rows, S * H),
// likewise for saved values.
//
// In a custom cell, weight_hh may multiply a value computed in the step (an operand of products)
// instead of h, and a pre-activation may have H columns of the input as a term (a given gate), the
// last ones. Products and means divide such a step into stages (program.h).
//
// A parameter, such as a peephole weight, is (H,). The P parameters follow the biases in bias_ih,
// and their gradients those of z: the same code sums both over rows. The modules may have
// parameters (1,) and no biases for some gates; then they expand these.
//
// A layer may return states of every step: output (T, B, (1 + outputs) * H) has h and the others.
//
// The K states other than h are element-wise, concatenated in c (rows, K * H). If the element-wise
// part also reads h, the engines' c begins with h, and h_0 has two gradients: through the GEMM and
// through c. In a GRU, the engines' c is h.
//
// Device code: no PyTorch or standard headers.
#pragma once

#include "cell/program.h"

namespace lltm {

constexpr int kMostStates = 6, kMostParameters = 16;

// Only the modules read this part.
struct ModuleInfo {
  const char *layer_class = "", *step_class = "";
  const char* state_names[kMostStates] = {};
  const char* parameter_names[kMostParameters] = {};
  unsigned scalars = 0;       // bit k: parameter k is (1,)
  unsigned without_bias = 0;  // bit s: pre-activation s has no biases
  int output_of_h = 0;        // position of h among a layer's outputs; -1: none
};

struct CellInfo {
  static constexpr int kMostSlots = 16, kMostSaved = 48;
  static constexpr int kMostValues = 64;  // of a kind (Place)

  const char* name;  // the operators' cell argument: a name or serialized cell
  int slots;
  int saved;  // values saved for backward, per hidden unit
  // Pre-activations, and their blocks of H rows, in weight_ih and in weight_hh.
  SlotRange x, h;
  int x_blocks[kMostSlots], h_blocks[kMostSlots];
  SlotRange direct = h;  // the part of h whose weights multiply h: all, without products
  int states;            // in addition to h
  bool reads_h;          // element-wise; always true without other states
  // weight is [weight_hh, weight_ih], with a single bias.
  bool concatenated = false;
  int parameters = 0;
  bool bounded = true;                     // |h'| <= 1, which int8 weights require
  bool forgets = false;                    // rounding errors in the states are known to decay
  const CellPrograms* programs = nullptr;  // set for the host (registry.h), null in kCell
  int native = 0;                          // likewise: which native kernels (cells.h), 0 if none
  bool custom_gradient = false;            // backward is not the derivative of forward
  int given = 0;                           // given gates
  int given_blocks[kMostSlots] = {};       // by pre-activation: 1 + the gate's index, or 0
  int outputs = 0;                         // states in the output, in addition to h
  int output_states[kMostStates] = {};     // their columns of the engines' c
  ModuleInfo modules = {};

  constexpr const OperandList& operands() const { return programs->operands; }
  constexpr const Pass& forward() const { return programs->forward; }
  constexpr const Pass& backward() const { return programs->backward; }
  // Products or means divide the step.
  constexpr bool has_stages() const { return forward().count > 1 || backward().count > 1; }
  // GEMMs of x and h, then a single stage. Some engines run no other step.
  constexpr bool is_element_wise() const { return given == 0 && !has_stages(); }
  constexpr const char* title() const { return programs->name; }
  constexpr bool has_c() const { return states > 0; }
  // Widths in multiples of H. Zeros pad the smaller weight in a concatenated matrix.
  constexpr int state_columns() const { return states + (reads_h ? 1 : 0); }
  constexpr int grad_columns() const { return slots + parameters; }
  constexpr int output_columns() const { return 1 + outputs; }
  constexpr int concatenated_blocks() const {
    return x.count() > h.count() ? x.count() : h.count();
  }
};

// Register counts of a cell's programs.
struct ProgramSizes {
  int forward_in, forward_out, backward_in, backward_out;

  constexpr explicit ProgramSizes(const CellInfo& cell)
      : forward_in(cell.slots + cell.state_columns() + cell.parameters),
        forward_out(1 + cell.states + cell.saved),
        backward_in(cell.saved + cell.parameters + 1 + cell.states),
        backward_out(cell.grad_columns() + cell.state_columns()) {}
};

}  // namespace lltm
