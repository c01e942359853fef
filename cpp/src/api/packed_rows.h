// A PackedSequence as input of a layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

namespace lltm {

// The fields of a PackedSequence: data (N, I), batch_sizes (T), and the order of the batch, (B), or
// undefined if the sequences were already sorted.
struct PackedRows {
  const at::Tensor &data, &batch_sizes, &sorted_indices, &unsorted_indices;
};

// Returns the batch size. Messages begin with "lltm::" and `where`. In a traced graph, batch_sizes
// has no values: another tensor has the batch size, and the operator checks them.
c10::SymInt check_packed_rows(const char* where, const PackedRows& rows, at::TensorList states);

}  // namespace lltm
