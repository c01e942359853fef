// CellInfo describes a cell to all shared code: checks, GEMMs, packing and schedules.
//
// A cell has H hidden units. weight_ih (Gx * H, I) has a block of H rows for each gate that depends
// on x. weight_hh (Gh * H, H) has a block for each gate that depends on h. Each hidden unit has S
// pre-activations, which identifiers call slots:
//     z[s] = x (block x_blocks[s] of weight_ih)^T + h (block h_blocks[s] of weight_hh)^T + bias
// Most pre-activations have both terms. A gate that needs them separately has two pre-activations.
// The order [x only | x and h | h only] makes each GEMM write a contiguous range of columns.
// Pre-activation s of hidden unit j is column s * H + j of z (rows, S * H). Saved values have the
// same layout.
//
// A parameter, such as a peephole weight, has shape (H,). The P parameters follow the biases in
// bias_ih, and their gradients follow the gradients of z, so that the same code sums both over
// rows.
//
// The next recurrent GEMM reads h. The K other states are used only element-wise and are
// concatenated in c (rows, K * H). If the element-wise part also reads h, the engines' c begins
// with h, and the gradient of h_0 has two parts: through the GEMM and through c. In a
// GRU, the engines' c is h.
//
// Device code: includes no PyTorch or standard headers.
#pragma once

#include "cell/program.h"

namespace lltm {

struct SlotRange {
  int begin = 0, end = 0;

  constexpr int count() const { return end - begin; }
  constexpr bool contains(int slot) const { return begin <= slot && slot < end; }
  friend constexpr bool operator==(const SlotRange&, const SlotRange&) = default;
};

struct CellInfo {
  static constexpr int kMostSlots = 8;
  static constexpr int kMostStates = 3, kMostParameters = 8, kMostSaved = 32;

  const char* name;  // the operators' cell argument: a name or serialized cell
  const char *layer_class, *step_class;
  int id;  // index in Cells (cells.h) and in kernel tables
  int slots;
  int saved;  // values per hidden unit that forward saves for backward
  // One pre-activation per block of H rows in weight_ih and in weight_hh. x_blocks and h_blocks
  // hold the blocks.
  SlotRange x, h;
  int x_blocks[kMostSlots], h_blocks[kMostSlots];
  int states;    // in addition to h: 0 to 3
  bool reads_h;  // element-wise; always true without other states
  // The modules store a concatenated matrix [weight_hh, weight_ih] and a single bias.
  bool joined = false;
  int parameters = 0;
  const char* state_names[kMostStates] = {};
  const char* parameter_names[kMostParameters] = {};
  bool bounded = true;                     // |h'| <= 1, which int8 weights require
  bool forgets = false;                    // rounding errors in the states are known to decay
  const CellPrograms* programs = nullptr;  // of a custom cell, else null
  bool own_gradient = false;               // backward is not the derivative of forward

  constexpr const char* title() const { return programs == nullptr ? name : programs->name; }
  constexpr bool has_c() const { return states > 0; }
  // Widths in multiples of H: the engines' c; the gradients of z and of the parameters; the rows of
  // the concatenated matrix, in which zeros pad the smaller weight.
  constexpr int state_columns() const { return states + (reads_h ? 1 : 0); }
  constexpr int grad_columns() const { return slots + parameters; }
  constexpr int joined_blocks() const { return x.count() > h.count() ? x.count() : h.count(); }
};

}  // namespace lltm
