// What the library outside of a cell's page knows of the cell: the checks, GEMMs, packing and
// schedules exist once, and ask this.
//
// H hidden units. weight_ih (Gx * H, I) and weight_hh (Gh * H, H) have a block of H rows for each
// gate that x, or h, has a part in. Of these a unit has S pre-activations, its slots:
//     z[s] = x (block x_blocks[s] of weight_ih)^T + h (block h_blocks[s] of weight_hh)^T + bias
// Most slots have both terms; a gate that needs them apart has a slot for each. The slots are in
// the order [x alone | both | h alone], so each GEMM writes one range of columns, and nothing is
// multiplied that no gate reads. Slot s of unit j is column s * H + j of z (rows, S * H), and
// values that forward saves for backward are laid out the same way.
//
// A parameter of a cell is one number a unit, such as a peephole: P blocks of H behind the biases
// of weight_ih, whose gradients stand behind those of z, so that both are added up as biases are.
//
// h is what the next GEMM reads. K other states are only combined element by element: they are c
// (rows, K * H), side by side. Where the element-wise part reads h too, h stands before them in the
// c of the engines; then the gradient of h_0 is the sum of both. So the c of a GRU is h alone.
//
// No header of torch or of the standard library: kernels of every device include it.
#pragma once

#include "cell/program.h"

namespace lltm {

// Slots [begin, end).
struct SlotRange {
  int begin = 0, end = 0;

  constexpr int count() const { return end - begin; }
  constexpr bool contains(int slot) const { return begin <= slot && slot < end; }
  friend constexpr bool operator==(const SlotRange&, const SlotRange&) = default;
};

struct CellInfo {
  static constexpr int kMostSlots = 8;
  static constexpr int kMostStates = 3, kMostParameters = 8, kMostSaved = 32;

  const char* name;                      // the operators' first argument: the text of a program
  const char *layer_class, *step_class;  // the modules'
  int id;  // its place in Cells (cells.h), and of its kernels in tables
  int slots;
  int saved;  // values of a unit that forward saves for backward
  // The slots that x and h have a part in, and the block of rows of each: as many blocks as slots.
  SlotRange x, h;
  int x_blocks[kMostSlots], h_blocks[kMostSlots];
  int states;    // besides h: 0 to 3
  bool reads_h;  // element by element; so does each cell without other states
  // Whether the modules' parameters are one matrix [weight_hh, weight_ih] and one bias.
  bool joined = false;
  int parameters = 0;
  // Of the states besides h and of the parameters.
  const char* state_names[kMostStates] = {};
  const char* parameter_names[kMostParameters] = {};
  bool bounded = true;                     // whether |h'| <= 1, which int8 relies on
  bool forgets = false;                    // whether the errors of a state are known to die out
  const CellPrograms* programs = nullptr;  // of a cell that a user has written
  bool own_gradient = false;               // backward is not the derivative of forward

  // For people.
  constexpr const char* title() const { return programs == nullptr ? name : programs->name; }
  constexpr bool has_c() const { return states > 0; }
  // How many times H wide: c in the engines; the gradient of z, with that of the parameters; the
  // rows of the joined matrix, the smaller one of the two filled up with zeros.
  constexpr int state_columns() const { return states + (reads_h ? 1 : 0); }
  constexpr int grad_columns() const { return slots + parameters; }
  constexpr int joined_blocks() const { return x.count() > h.count() ? x.count() : h.count(); }
};

}  // namespace lltm
