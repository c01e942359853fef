// A layer direction's weights, packed for the blocked engine's forward pass, per call or in
// advance. No PyTorch header: prepack.h has the operator.
#pragma once

#include "cell/cell.h"
#include "common/memory.h"
#include "cpu/choose_engine.h"
#include "cpu/gemm/formats.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace lltm::cpu {

// Heads of other sizes are packed as a single matrix.
constexpr int64_t kHeadAlign = 32;

// Weights in place. Rows are contiguous.
struct WeightViews {
  Storage storage;
  View ih, hh;  // (Gx * H, I), and the rows of all heads, (Gh * H, H/heads)
  int64_t hidden, input_size, heads;
};

// Per block of hidden units, B of the input and recurrent GEMMs. Columns are the block's units,
// pre-activation by pre-activation, where the operand contributes.
template <typename Format>
struct PackedWeights {
  using Element = typename Format::Element;

  // In `bytes`, which must outlive it.
  PackedWeights(
      const CellInfo& c,
      const Partition& b,
      int64_t input_size,
      int64_t head_count,
      const std::byte* bytes)
      : cell(c),
        blocks(b),
        heads(head_count),
        k_x(Format::padded_k(input_size)),
        k_h(Format::padded_k(units_of_head())),
        data(reinterpret_cast<const Element*>(bytes)) {
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
  Workspace<std::byte> memory;  // unless in other memory
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
    const CellInfo& cell, const WeightViews& weights, const Partition& blocks);

// ---- ahead of time --------------------------------------------------------------

using PackedBytes = std::span<const std::byte>;

// Precedes the packed weights. float32 weights may be stored twice: in float32 for few rows, and in
// bf16x3 for many.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x354B4341504D544C;  // LTMPACK5
  int64_t magic;
  uint64_t cell;    // cell_tag
  int32_t dtype;    // weight dtype; float32 for int8, which supports several
  int32_t operand;  // the format's
  int64_t hidden, input_size;
  int64_t blocks;
  int64_t bf16x3_blocks;  // 0 if not stored
  int64_t further_heads;  // than one

  int64_t heads() const { return further_heads + 1; }
};
constexpr std::size_t kPackedAlignment = 64;

// The header's numbers of dtypes are at::ScalarType's.
constexpr int32_t kInt8Tag = 12;
constexpr int32_t dtype_tag(Storage dtype) {
  return dtype == Storage::kF32 ? 6 : dtype == Storage::kF16 ? 5 : dtype == Storage::kBf16 ? 15 : 7;
}

PackedHeader read_header(PackedBytes packed);
// False if header or size do not match the cell. Constant time: corrupt bytes after the header
// affect only computed values.
bool is_whole(const CellInfo& cell, const PackedHeader& header, int64_t bytes);
unsigned packed_forms(PackedBytes packed);  // format_bit of each
inline bool has_form(PackedBytes packed, GemmFormat format) {
  return (packed_forms(packed) & format_bit(format)) != 0;
}

// Requires has_form.
template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, PackedBytes packed);

// For weights of `dtype` in `format`, or in kF32 and kBf16x3 if `twice`, and their size.
PackedHeader make_header(
    const CellInfo& cell, const WeightViews& weights, GemmFormat format, Storage dtype, bool twice);
int64_t packed_size(const CellInfo& cell, const PackedHeader& header);
// Writes header and weights to packed_size() bytes. Returns false if values are out of range.
bool write_packed(
    const CellInfo& cell, const PackedHeader& header, const WeightViews& weights, std::byte* to);

// To (Gx * H, I) and (Gh * H, H/heads), bfloat16 if kBf16, otherwise float32.
void unpack(const CellInfo& cell, PackedBytes packed, const View& ih, const View& hh);

}  // namespace lltm::cpu
