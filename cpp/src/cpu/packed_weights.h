// The weights of a layer and direction as the forward pass of the blocked engine reads them:
// packed in every call, or ahead of time (prepack).
#pragma once

#include "common/operator_args.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/formats.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

namespace lltm::cpu {

// Packed weights are a tensor of bytes: this header, then for each block of hidden units B of
// the input's GEMM and B of the recurrent one, whose columns are the units of the block slot
// by slot (cell.h), of the slots that it has a part in. Prepacked weights may hold two forms, one
// after another: for few rows in float32 and for many in bf16x3.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x344B4341504D544C;  // LTMPACK4
  int64_t magic;
  uint64_t cell;    // cell_tag
  int32_t dtype;    // of the weights, an at::ScalarType
  int32_t operand;  // kOperandTag of the format
  int64_t hidden, input_size, blocks;
  int64_t bf16x3_offset;  // where the form in bf16x3 begins, in bytes, or 0
  int64_t checksum;       // of all other bytes, in prepacked weights; else 0
};
// What follows is aligned as the tensor is.
static_assert(sizeof(PackedHeader) == 64);

template <typename Format>
constexpr auto kOperandTag = static_cast<int32_t>(kDtype<typename Format::Operand>);
template <>
inline constexpr int32_t kOperandTag<Bf16x3Format> = 3000;  // no dtype
template <>
inline constexpr auto kOperandTag<Int8Format> = static_cast<int32_t>(at::kQInt8);

// What packed weights know a cell by: the letters of its name or, of a program, a hash of it.
uint64_t cell_tag(const CellInfo& cell);

inline PackedHeader read_header(const at::Tensor& packed) {
  PackedHeader header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  return header;
}

template <typename Format>
struct PackedWeights {
  using Operand = typename Format::Operand;

  PackedWeights(const CellInfo& c, at::Tensor bytes)
      : PackedWeights(c, read_header(bytes), bytes) {}

  PackedWeights(const CellInfo& c, const PackedHeader& header, at::Tensor bytes)
      : cell(c),
        tensor(std::move(bytes)),
        blocks(header.hidden, Format::kUnitAlign, header.blocks),
        k_x(Format::padded_k(header.input_size)),
        k_h(Format::padded_k(header.hidden)),
        data(
            reinterpret_cast<const Operand*>(
                tensor.const_data_ptr<uint8_t>() + sizeof(PackedHeader))) {}

  static int64_t bytes(const CellInfo& cell, const PackedHeader& header) {
    const int64_t k = cell.x.count() * Format::padded_k(header.input_size) +
                      cell.h.count() * Format::padded_k(header.hidden);
    return static_cast<int64_t>(sizeof(PackedHeader)) +
           Format::padded_n(header.hidden) * k * static_cast<int64_t>(sizeof(Operand));
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

// Packed weights as a tensor, or a copy of the joined matrix where their dtype or this CPU has no
// packed form. With dtype qint8 they are quantised (int8.h).
at::Tensor prepack(
    const CellInfo& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

inline bool is_prepacked(const at::Tensor& weights) {
  return weights.scalar_type() == at::kByte;
}
// Whether prepacked weights have a form in this format.
bool has_form(const at::Tensor& packed, GemmFormat format);

// Whether prepacked weights, perhaps of another CPU, are those of a layer with the cell, the sizes
// and the dtype of a call, with the bytes that prepack gave them; throws if not. The
// headers are checked in every call, so that no bytes lead out of bounds; the rest is read at the
// first call with a tensor, and again after a change that its version counts.
void check_prepacked(const SequenceArgs& args);

// Prepacked weights in their form in a format.
template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, const at::Tensor& packed) {
  const bool second = kFormat<Format> == GemmFormat::kBf16x3;
  return PackedWeights<Format>(
      cell, second ? packed.slice(0, read_header(packed).bf16x3_offset) : packed);
}

// The weights again.
Weights unpack(const CellInfo& cell, const at::Tensor& packed);

}  // namespace lltm::cpu
