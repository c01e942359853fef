// Input of a layer, and checks and the order of a PackedSequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace lltm {

// A tensor, or the fields of a PackedSequence: data (N, I), batch_sizes (T), and the order of the
// batch, (B), or undefined if the sequences were already sorted. reset is undefined or has the
// batch shape of the data.
struct LayerInput {
  const at::Tensor &data, &batch_sizes, &sorted_indices, &unsorted_indices, &reset;
};

// Returns the batch size. In a traced graph, batch_sizes has no values: another tensor has the
// batch size, and the operator checks them.
c10::SymInt check_packed(const char* where, const LayerInput& packed, at::TensorList states);

// States (L*D, B, H) are in the caller's order, packed rows in order of decreasing length.
// Undefined states and orders change nothing.
inline at::Tensor permuted(const at::Tensor& states, const at::Tensor& order) {
  return states.defined() && order.defined() ? states.index_select(1, order) : states;
}

}  // namespace lltm
