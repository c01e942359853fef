// What the library outside of a cell's page knows of the cell: the checks, GEMMs, packing and
// schedules exist once, and ask this.
//
// H hidden units. weight_ih (G * H, I) and weight_hh (G * H, H) have a block of H rows for each of
// G gates. Of these a unit has S pre-activations, its slots:
//     z[s] = x (block x_blocks[s] of weight_ih)^T + h (block h_blocks[s] of weight_hh)^T + bias
// Most slots have both terms; a gate that needs them apart has a slot for each. The slots are in
// the order [x alone | both | h alone], so each GEMM writes one range of columns, and nothing is
// multiplied that no gate reads. Slot s of unit j is column s * H + j of z (rows, S * H), and
// values that forward saves for backward are laid out the same way.
//
// Of the two states, h is what the next GEMM reads; c is only combined element by element. A cell
// that has no c for its user, as the GRU, is one whose c is h: c_0 = h_0, and the gradient of h_0
// is the sum of both.
//
// No header of torch or of the standard library: kernels of every device include it.
#pragma once

namespace lltm {

// Slots [begin, end).
struct SlotRange {
  int begin = 0, end = 0;

  constexpr int count() const { return end - begin; }
  constexpr bool contains(int slot) const { return begin <= slot && slot < end; }
  friend constexpr bool operator==(const SlotRange&, const SlotRange&) = default;
};

struct Cell {
  static constexpr int kMostSlots = 8;

  const char* name;                      // the operators' first argument
  const char *layer_class, *step_class;  // the modules'
  int id;                                // the place of its kernels in tables (cells.h)
  int gates;                             // blocks of rows of the weights and biases
  int slots;
  int saved;  // values of a unit that forward saves for backward
  // The slots that x and h have a part in, and the block of rows of each.
  SlotRange x, h;
  int x_blocks[kMostSlots], h_blocks[kMostSlots];
  bool has_c;
  // Whether the modules' parameters are one matrix [weight_hh, weight_ih] and one bias.
  bool joined;
};

// ---- pages ----------------------------------------------------------------------
//
// A page (lltm.h, lstm.h, gru.h) is a type with kCell, kSlots, kSaved and the element-wise
// arithmetic of a step:
//     StepForward<Page, V> forward(z, c)
//     StepBackward<Page, V> backward(saved, dh, dc_next)    dh, dc_next: gradients of h', c'
// V is float or double in the kernels, and a tensor on the composite path (op/tensor_value.h). So
// the functions are straight-line code: `where` selects between two values that are both already
// computed.

template <typename Page, typename V>
struct StepForward {
  V h, c;  // h', c'
  V saved[Page::kSaved];
};

template <typename Page, typename V>
struct StepBackward {
  V dz[Page::kSlots];
  V dc;  // gradient of c
};

}  // namespace lltm
