// The weights of a layer and direction as the forward pass of the blocked engine reads them:
// packed in every call, or ahead of time (prepack).
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

// For each block of hidden units B of the input's GEMM and B of the recurrent one, whose columns
// are the units of the block slot by slot (cell.h), of the slots that it has a part in.
template <typename Format>
struct PackedWeights {
  using Operand = typename Format::Operand;

  // In a tensor of bytes, from this offset on.
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

  // B (I, N) and B (H, N) of a block, N being the columns of the slots of each.
  PackedB<const Operand> x(int64_t block) const {
    const int64_t n = cell.x.count() * slot_columns(block);
    return {data_of(block), k_x, n, n};
  }
  PackedB<const Operand> h(int64_t block) const {
    const int64_t n = cell.h.count() * slot_columns(block);
    return {data_of(block) + cell.x.count() * slot_columns(block) * k_x, k_h, n, n};
  }
  // All slots one after another, each of slot_columns.
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

// Weights in blocks that begin at multiples of kUnitAlign; nothing where values are out of range of
// the format.
template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const Weights& weights, const Blocks& blocks);

// ---- ahead of time --------------------------------------------------------------

// A tensor of bytes: a header, then the weights in a format; or a copy of the joined matrix where
// their dtype or this CPU has no packed form. With dtype qint8 they are quantised (int8.h).
at::Tensor prepack(
    const CellInfo& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

// Throws if bytes are not those of weights that were prepacked for this cell, perhaps on another
// CPU: if the header says something else, or another number of bytes. Takes constant time. Other
// bytes behind the header are computed with, and lead nowhere else.
void check_prepacked(const char* op, const CellInfo& cell, const at::Tensor& packed);
// And if they are not of the sizes and the dtype of a call.
void check_prepacked(const SequenceArgs& args);

// Where kernels can read them: bytes that come from a file may lie anywhere.
at::Tensor aligned(const at::Tensor& packed);

// Whether prepacked weights have a form in this format.
bool has_form(const at::Tensor& packed, GemmFormat format);

// Prepacked weights in their form in a format.
template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, const at::Tensor& packed);

// The weights again. Of those in int8 the float32 that they stand for: quantised, it gives the same
// bits.
Weights unpack(const CellInfo& cell, const at::Tensor& packed);

}  // namespace lltm::cpu
