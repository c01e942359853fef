// The weights for one layer and direction, packed for the blocked engine's forward pass: in every
// call, or ahead of time (prepack).
#pragma once

#include "common/operator_args.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/formats.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace lltm::cpu {

// For each block of hidden units, the B operands for the input GEMM and the recurrent GEMM. Their
// columns are the block's units, pre-activation by pre-activation (cell.h). Each operand has only
// the pre-activations that it contributes to.
template <typename Format>
struct PackedWeights {
  using Operand = typename Format::Operand;

  // The data begins at `offset` in a byte tensor.
  PackedWeights(
      const CellInfo& c, const Blocks& b, int64_t input_size, at::Tensor bytes, int64_t offset = 0)
      : cell(c),
        tensor(std::move(bytes)),
        blocks(b),
        k_x(Format::padded_k(input_size)),
        k_h(Format::padded_k(blocks.total)),
        data(reinterpret_cast<const Operand*>(tensor.const_data_ptr<uint8_t>() + offset)) {}

  static int64_t bytes(const CellInfo& cell, int64_t hidden, int64_t input_size) {
    const int64_t k =
        cell.x.count() * Format::padded_k(input_size) + cell.h.count() * Format::padded_k(hidden);
    return Format::padded_n(hidden) * k * static_cast<int64_t>(sizeof(Operand));
  }

  // A block's B (I, N) and B (H, N), where N counts the columns that x or h contributes to.
  PackedB<const Operand> x(int64_t block) const {
    const int64_t n = cell.x.count() * slot_columns(block);
    return {data_of(block), k_x, n, n};
  }
  PackedB<const Operand> h(int64_t block) const {
    const int64_t n = cell.h.count() * slot_columns(block);
    return {data_of(block) + cell.x.count() * slot_columns(block) * k_x, k_h, n, n};
  }
  // Columns for all pre-activations in a block, each slot_columns wide.
  int64_t columns(int64_t block) const { return cell.slots * slot_columns(block); }
  int64_t slot_columns(int64_t block) const { return Format::padded_n(blocks.size(block)); }

  const CellInfo& cell;
  at::Tensor tensor;
  Blocks blocks;
  int64_t k_x, k_h;
  const Operand* data;

 private:
  const Operand* data_of(int64_t block) const {
    return data + blocks.begin(block) * (cell.x.count() * k_x + cell.h.count() * k_h);
  }
};

// Packs weights in blocks that begin at multiples of kUnitAlign. Returns nullopt if values are out
// of the format's range.
template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const Weights& weights, const Blocks& blocks);

// ---- ahead of time --------------------------------------------------------------

// Returns a byte tensor with a header and the packed weights. If the dtype or this CPU has no
// packed format, returns a copy of the concatenated matrix. With dtype qint8, quantizes the weights
// (int8.h).
at::Tensor prepack(
    const CellInfo& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

// Throws if `packed` was not prepacked for this cell, here or on another CPU: if the header or the
// number of bytes does not match. Takes constant time. Corrupt bytes after the header affect only
// the computed values.
void check_prepacked(const char* op, const CellInfo& cell, const at::Tensor& packed);
// Also throws if sizes or dtype do not match the call.
void check_prepacked(const SequenceArgs& args);

// Returns prepacked weights with the alignment that the kernels need; bytes from a file may have
// any.
at::Tensor aligned(const at::Tensor& packed);

// True if the prepacked weights are available in this format.
bool has_form(const at::Tensor& packed, GemmFormat format);

// Returns a view of prepacked weights in a format for which has_form is true.
template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, const at::Tensor& packed);

// Returns the unpacked weights. For int8, returns the dequantized float32 weights; quantizing them
// again gives bitwise identical bytes and scales.
Weights unpack(const CellInfo& cell, const at::Tensor& packed);

}  // namespace lltm::cpu
