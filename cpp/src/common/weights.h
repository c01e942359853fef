// The two matrices of cell.h for any weights, and reordering between blocks and pre-activations.
#pragma once

#include "cell/cell.h"
#include "common/heads.h"
#include "common/tensor_views.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

namespace lltm {

// Columns of a concatenated matrix, if there is one.
struct Weights {
  at::Tensor ih;  // (Gx * H, I)
  at::Tensor hh;  // (Gh * H, H), or (heads, Gh * H/heads, H/heads)
};

inline Weights weights_of(
    const CellInfo& cell, const at::Tensor& weight_ih, const at::Tensor& weight_hh) {
  if (weight_hh.defined()) return {weight_ih, weight_hh};
  const int rows = cell.concatenated_blocks();  // 0 if all gates are given
  const c10::SymInt hidden = rows > 0 ? weight_ih.sym_size(0) / rows : weight_ih.sym_size(1);
  const auto part = [&](SlotRange slots, c10::SymInt begin, c10::SymInt end) {
    const at::Tensor columns = weight_ih.slice_symint(1, begin, end);
    return slots.count() == rows ? columns : columns.slice_symint(0, 0, slots.count() * hidden);
  };
  return {part(cell.x, hidden, weight_ih.sym_size(1)), part(cell.h, 0, hidden)};
}
inline at::Tensor concatenate(const CellInfo& cell, const Weights& weights) {
  const int rows = cell.concatenated_blocks();
  const auto part = [&](const at::Tensor& matrix, SlotRange slots) {
    if (slots.count() == rows) return matrix;
    const c10::SymInt missing = (rows - slots.count()) * weights.hh.sym_size(1);
    return at::cat({matrix, matrix.new_zeros_symint({missing, matrix.sym_size(1)})});
  };
  return at::cat({part(weights.hh, cell.h), part(weights.ih, cell.x)}, 1);
}
// In new memory.
inline std::vector<at::Tensor> matrices_of_layer(const CellInfo& cell, const Weights& weights) {
  if (cell.concatenated) return {concatenate(cell, weights)};
  return {
      weights.ih.clone(at::MemoryFormat::Contiguous),
      weights.hh.clone(at::MemoryFormat::Contiguous)};
}
template <typename Args>
Weights weights_of(const Args& args) {
  return weights_of(*args.cell, args.weight_ih, args.weight_hh);
}

// Blocks of rows (or a bias) in the order `from`; the tensor itself if unchanged.
inline at::Tensor in_order(const at::Tensor& tensor, int count, const int* from) {
  bool is_ordered = true;
  for (int k = 0; k < count; ++k) is_ordered = is_ordered && from[k] == k;
  if (is_ordered) return tensor;
  const c10::SymInt hidden = tensor.sym_size(0) / count;
  std::vector<at::Tensor> parts;
  for (int k = 0; k < count; ++k) {
    parts.push_back(tensor.narrow_symint(0, from[k] * hidden, hidden));
  }
  return at::cat(parts);
}
inline at::Tensor x_slots(const at::Tensor& tensor, const CellInfo& cell) {
  return in_order(tensor, cell.x.count(), cell.x_blocks + cell.x.begin);
}
inline at::Tensor h_slots(const at::Tensor& tensor, const CellInfo& cell) {
  if (has_heads(tensor)) {
    const int* const blocks = cell.h_blocks + cell.h.begin;
    return in_order(tensor.transpose(0, 1), cell.h.count(), blocks).transpose(0, 1);
  }
  return in_order(tensor, cell.h.count(), cell.h_blocks + cell.h.begin);
}

// (H, H): a pre-activation's rows of weight_hh in pre-activation order.
inline at::Tensor rows_of_slot(const CellInfo& cell, const at::Tensor& weight_h, int slot) {
  const c10::SymInt hidden = weight_h.sym_size(1);
  return weight_h.narrow_symint(0, (slot - cell.h.begin) * hidden, hidden);
}

inline at::Tensor in_blocks(const at::Tensor& tensor, SlotRange range, const int* blocks) {
  int slots[CellInfo::kMostSlots];
  for (int k = 0; k < range.count(); ++k) slots[blocks[range.begin + k]] = k;
  return in_order(tensor, range.count(), slots);
}
inline at::Tensor x_blocks(const at::Tensor& tensor, const CellInfo& cell) {
  return in_blocks(tensor, cell.x, cell.x_blocks);
}
inline at::Tensor h_blocks(const at::Tensor& tensor, const CellInfo& cell) {
  return in_blocks(tensor, cell.h, cell.h_blocks);
}

// Calls body(first, count) for each run of pre-activations with contiguous blocks of rows.
template <typename Body>
void for_each_run(SlotRange range, const int* blocks, const Body& body) {
  for (int slot = range.begin, next; slot < range.end; slot = next) {
    next = slot + 1;
    while (next < range.end && blocks[next] == blocks[next - 1] + 1) ++next;
    body(slot, next - slot);
  }
}

// The last range includes the rows' padding.
inline at::Tensor slot_columns(
    const at::Tensor& z, const CellInfo& cell, SlotRange slots, int64_t hidden) {
  if (slots.count() == cell.grad_columns()) return z;
  const bool last = slots.end == cell.grad_columns();
  return z.slice(1, slots.begin * hidden, last ? z.size(1) : slots.end * hidden);
}

// (P * H), after the biases of weight_ih.
inline at::Tensor parameters_of(const at::Tensor& bias_ih, const CellInfo& cell) {
  const c10::SymInt hidden = bias_ih.sym_size(0) / (cell.x.count() + cell.parameters);
  return bias_ih.slice_symint(0, cell.x.count() * hidden);
}
inline at::Tensor biases_of(const at::Tensor& bias_ih, const CellInfo& cell) {
  if (cell.parameters == 0) return bias_ih;
  const c10::SymInt hidden = bias_ih.sym_size(0) / (cell.x.count() + cell.parameters);
  return bias_ih.slice_symint(0, 0, cell.x.count() * hidden);
}

// Of bias_ih ((Gx + P) * H) and bias_hh (Gh * H), undefined unless requested, from `sums`, dz
// summed over rows ((S + P) * H). A result may be `sums`; the results share no memory.
inline std::pair<at::Tensor, at::Tensor> bias_gradients(
    const at::Tensor& sums, const CellInfo& cell, bool want_ih, bool want_hh) {
  const auto of_slots = [&](SlotRange slots) {
    if (slots.count() == cell.grad_columns()) return sums;
    const int64_t hidden = sums.size(0) / cell.grad_columns();
    return sums.slice(0, slots.begin * hidden, slots.end * hidden);
  };
  const auto owned = [&](const at::Tensor& part) {
    return part.is_alias_of(sums) && !part.is_same(sums) ? part.clone() : part;
  };
  at::Tensor ih = want_ih ? x_blocks(of_slots(cell.x), cell) : at::Tensor();
  if (want_ih && cell.parameters > 0) {
    ih = at::cat({ih, of_slots({cell.slots, cell.grad_columns()})});
  }
  if (want_ih) ih = owned(ih);
  const at::Tensor hh = want_hh ? owned(h_blocks(of_slots(cell.h), cell)) : at::Tensor();
  return {ih, want_ih && want_hh && hh.is_same(ih) ? hh.clone() : hh};
}

// The arguments' shapes, undefined unless requested, and the two matrices to write.
struct WeightGradients {
  template <typename Args>
  WeightGradients(const Args& args, const at::TensorOptions& options)
      : concatenated(!args.weight_hh.defined()) {
    if (args.output_mask[3]) {
      // Nothing writes the smaller weight's padding in a concatenated matrix (cell.h).
      const bool fills_up = concatenated && args.cell->x.count() != args.cell->h.count();
      const auto sizes = args.weight_ih->sizes();
      weight_ih = with_huge_pages(at::empty(sizes, options));
      if (fills_up) weight_ih.zero_();
    }
    if (args.output_mask[4] && !concatenated) {
      weight_hh = with_huge_pages(at::empty(args.weight_hh->sizes(), options));
    }
  }

  // Undefined or null unless requested.
  Weights parts(const CellInfo& cell) const {
    return concatenated && weight_ih.defined() ? weights_of(cell, weight_ih, weight_hh)
                                               : Weights{weight_ih, weight_hh};
  }
  template <typename T>
  Matrix<T> write_ih(int64_t hidden) const {
    return write<T>(weight_ih).from(0, concatenated ? hidden : 0);
  }
  template <typename T>
  Matrix<T> write_hh() const {
    if (has_heads(weight_hh)) return write<T>(weight_hh.flatten(0, 1));
    return write<T>(concatenated ? weight_ih : weight_hh);
  }

  at::Tensor weight_ih, weight_hh;
  bool concatenated;
};

}  // namespace lltm
