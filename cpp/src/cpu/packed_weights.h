// A layer direction's weights, packed for the blocked engine's forward pass, per call or in
// advance.
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

// Per block of hidden units, B of the input and recurrent GEMMs. Columns are the block's units,
// pre-activation by pre-activation, where the operand contributes.
template <typename Format>
struct PackedWeights {
  using Element = typename Format::Element;

  // `offset`: in a byte tensor.
  PackedWeights(
      const CellInfo& c,
      const Partition& b,
      int64_t input_size,
      int64_t head_count,
      at::Tensor bytes,
      int64_t offset = 0)
      : cell(c),
        tensor(std::move(bytes)),
        blocks(b),
        heads(head_count),
        k_x(Format::padded_k(input_size)),
        k_h(Format::padded_k(units_of_head())),
        data(reinterpret_cast<const Element*>(tensor.const_data_ptr<uint8_t>() + offset)) {
    static_assert(kHeadAlign % Format::kUnitAlign == 0);
  }

  static int64_t bytes(const CellInfo& cell, int64_t hidden, int64_t input_size, int64_t heads) {
    const int64_t k = cell.x.count() * Format::padded_k(input_size) +
                      cell.h.count() * Format::padded_k(hidden / heads);
    return Format::padded_n(hidden) * k * static_cast<int64_t>(sizeof(Element));
  }

  // (I, N) and (H, N), or (H/heads, N) for the block's head; N counts the columns that x or h
  // contributes to.
  PackedB<const Element> x(int64_t block) const {
    const int64_t n = cell.x.count() * slot_columns(block);
    return {data_of(block), k_x, n, n};
  }
  PackedB<const Element> h(int64_t block) const {
    const int64_t n = cell.h.count() * slot_columns(block);
    return {data_of(block) + cell.x.count() * slot_columns(block) * k_x, k_h, n, n};
  }
  int64_t units_of_head() const { return blocks.total / heads; }
  int64_t head_of(int64_t block) const {
    return heads == 1 ? 0 : blocks.begin(block) / units_of_head();
  }
  // The first column of h, as an operand, that the block reads.
  int64_t first_of_h(int64_t block) const {
    return head_of(block) * Format::head_stride(units_of_head());
  }
  int64_t columns(int64_t block) const { return cell.slots * slot_columns(block); }
  int64_t slot_columns(int64_t block) const { return Format::padded_n(blocks.size(block)); }

  const CellInfo& cell;
  at::Tensor tensor;
  Partition blocks;
  int64_t heads;
  int64_t k_x, k_h;
  const Element* data;

 private:
  const Element* data_of(int64_t block) const {
    return data + blocks.begin(block) * (cell.x.count() * k_x + cell.h.count() * k_h);
  }
};

// Returns nullopt if values are out of range.
template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const Weights& weights, const Partition& blocks);

// ---- ahead of time --------------------------------------------------------------

// A header and the packed weights as bytes, or, without a packed format for the dtype and CPU, a
// copy of the concatenated matrix. With dtype qint8, quantizes (int8.h).
at::Tensor prepack(
    const CellInfo& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

// Throws if header or size does not match the cell. Constant time: corrupt bytes after the header
// affect only computed values.
void check_prepacked(const char* op, const CellInfo& cell, const at::Tensor& packed);
// Also checks sizes and dtype.
void check_prepacked(const SequenceArgs& args);

// Bytes from a file may lack the kernels' alignment.
at::Tensor aligned(const at::Tensor& packed);

bool has_form(const at::Tensor& packed, GemmFormat format);
unsigned packed_forms(const at::Tensor& packed);  // bits of GemmFormat
int64_t packed_heads(const at::Tensor& packed);

// Returns a view; requires has_form.
template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, const at::Tensor& packed);

// int8 is dequantized to float32; quantizing again gives bitwise identical bytes and scales.
Weights unpack(const CellInfo& cell, const at::Tensor& packed);

}  // namespace lltm::cpu
