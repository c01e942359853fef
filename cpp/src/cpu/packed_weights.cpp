#include "cpu/packed_weights.h"

#include "cpu/gemm/operands.h"
#include "cpu/threads/parallel.h"

#include <algorithm>
#include <cstring>

namespace lltm::cpu {
namespace {

// Rows from `row` on in weight_ih or weight_hh, and their B columns from `column` on.
template <typename Format>
struct PackedRows {
  PackedB<const typename Format::Element> b;
  int64_t column;
  bool of_h;
  int64_t row, rows;
};

// Runs concurrently. Returns false if any call returns false.
template <typename Format, typename Body>
bool for_each_part(const PackedWeights<Format>& packed, const Body& body) {
  const CellInfo& cell = packed.cell;
  const Partition& blocks = packed.blocks;
  const auto visit = [&](const auto& b, int64_t block, Range units, bool of_h) {
    const SlotRange slots = of_h ? cell.h : cell.x;
    const int* const row_blocks = of_h ? cell.h_blocks : cell.x_blocks;
    bool all = true;
    for (int slot = slots.begin; slot < slots.end; ++slot) {
      const int64_t column = (slot - slots.begin) * packed.slot_columns(block) + units.begin;
      const int64_t height = of_h ? packed.units_of_head() : blocks.total;
      const int64_t head = of_h ? packed.head_of(block) : 0;
      const int64_t unit = blocks.begin(block) + units.begin - head * height;
      const int64_t row = (head * slots.count() + row_blocks[slot]) * height + unit;
      all &= body(PackedRows<Format>{b, column, of_h, row, units.size()});
    }
    return all;
  };
  const int64_t elements =
      blocks.total * (cell.x.count() * packed.k_x + cell.h.count() * packed.k_h);
  return parallel_tasks(
      blocks.count, elements, kPackGrain, [&](int64_t block, int64_t part, int64_t parts) {
        const Range units = Partition(blocks.size(block), Format::kUnitAlign, parts).range(part);
        return units.size() == 0 || (visit(packed.x(block), block, units, false) &&
                                     visit(packed.h(block), block, units, true));
      });
}

template <typename Element>
PackedB<Element> writable(const PackedB<const Element>& b) {
  return {const_cast<Element*>(b.data), b.k, b.n, b.ld};
}

// Returns false if values are out of range.
template <typename Format>
bool pack(const WeightViews& weights, const PackedWeights<Format>& packed) {
  return visit_packed_storage<Format>(weights.storage, [&]<typename T>(T*) {
    return for_each_part(packed, [&](const auto& part) {
      const int64_t k = part.of_h ? packed.units_of_head() : weights.input_size;
      const auto pack_rows = [&](const auto& rows, int64_t first, int64_t count) {
        const int64_t column = part.column + first;
        return Format::pack_b_transposed(writable(part.b), 0, column, rows, k, count);
      };
      const auto rows = (part.of_h ? weights.hh : weights.ih).template as<const T>().from(part.row);
      return pack_widened<typename Format::Unpacked>(rows, part.rows, k, pack_rows);
    });
  });
}

}  // namespace

template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const WeightViews& weights, const Partition& blocks) {
  const int64_t input_size = weights.input_size, heads = weights.heads;
  Workspace<std::byte> memory(
      PackedWeights<Format>::bytes(cell, weights.hidden, input_size, heads));
  PackedWeights<Format> packed(cell, blocks, input_size, heads, memory.data());
  packed.memory = std::move(memory);
  return pack(weights, packed) ? std::optional(std::move(packed)) : std::nullopt;
}

template std::optional<PackedWeights<F32Format>> pack_weights(
    const CellInfo&, const WeightViews&, const Partition&);
template std::optional<PackedWeights<Bf16Format>> pack_weights(
    const CellInfo&, const WeightViews&, const Partition&);
template std::optional<PackedWeights<Bf16x3Format>> pack_weights(
    const CellInfo&, const WeightViews&, const Partition&);

// ---- the header -------------------------------------------------------------------

namespace {

constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(PackedHeader));
static_assert(kHeaderBytes == kPackedAlignment);

constexpr int32_t operand_tag(GemmFormat format) {
  if (format == GemmFormat::kInt8) return kInt8Tag;
  return dtype_tag(format == GemmFormat::kBf16 ? Storage::kBf16 : Storage::kF32);
}

// End offset of weights from `begin` on, or -1 if the block count is invalid.
template <typename Format>
int64_t end_of(const CellInfo& cell, const PackedHeader& header, int64_t begin, int64_t blocks) {
  constexpr int64_t kAlign = Format::kUnitAlign;
  const bool valid =
      blocks > 0 && blocks <= divide_up(header.hidden, kAlign) &&
      Partition(header.hidden, kAlign, blocks).width <= max_forward_block_width(kFormat<Format>);
  const int64_t bytes =
      PackedWeights<Format>::bytes(cell, header.hidden, header.input_size, header.heads());
  return valid ? begin + bytes : -1;
}

int64_t bf16x3_offset(const CellInfo& cell, const PackedHeader& header) {
  const int64_t first =
      PackedWeights<F32Format>::bytes(cell, header.hidden, header.input_size, header.heads());
  return round_up(kHeaderBytes + first, int64_t{kPackedAlignment});
}

// Calls body(Format{}) with the (first) format.
template <typename Body>
decltype(auto) visit_form(const PackedHeader& header, const Body& body) {
  if (header.operand == kInt8Tag) return body(Int8Format{});
  return header.operand == operand_tag(GemmFormat::kBf16) ? body(Bf16Format{}) : body(F32Format{});
}

}  // namespace

int64_t packed_size(const CellInfo& cell, const PackedHeader& header) {
  const int64_t first = visit_form(header, [&]<typename Format>(Format) {
    return end_of<Format>(cell, header, kHeaderBytes, header.blocks);
  });
  if (header.bf16x3_blocks == 0 || first < 0) return first;
  const int64_t second = bf16x3_offset(cell, header);
  return end_of<Bf16x3Format>(cell, header, second, header.bf16x3_blocks);
}

bool is_whole(const CellInfo& cell, const PackedHeader& header, int64_t bytes) {
  // Limits the sizes so that no product overflows.
  const auto is_size = [](int64_t size) { return size >= 0 && size <= int64_t{1} << 27; };
  if (!is_size(header.hidden) || !is_size(header.input_size)) return false;
  if (header.further_heads < 0 || header.further_heads >= std::max<int64_t>(header.hidden, 1)) {
    return false;
  }
  if (header.further_heads > 0 &&
      (header.hidden % (header.heads() * kHeadAlign) != 0 || header.blocks % header.heads() != 0 ||
       header.bf16x3_blocks % header.heads() != 0)) {
    return false;
  }
  const auto is = [&](Storage dtype) { return header.dtype == dtype_tag(dtype); };
  const auto has = [&](GemmFormat format) { return header.operand == operand_tag(format); };
  const bool once = header.bf16x3_blocks == 0, f32 = is(Storage::kF32), bf16 = is(Storage::kBf16);
  const bool known = (has(GemmFormat::kInt8) && f32 && once && !cell.has_stages()) ||
                     (has(GemmFormat::kBf16) && bf16 && once) ||
                     (has(GemmFormat::kF32) && (f32 || is(Storage::kF16) || (bf16 && once)));
  return known && bytes == packed_size(cell, header);
}

PackedHeader read_header(PackedBytes packed) {
  PackedHeader header;
  std::memcpy(&header, packed.data(), sizeof(header));
  return header;
}

unsigned packed_forms(PackedBytes packed) {
  const PackedHeader header = read_header(packed);
  const unsigned first =
      visit_form(header, []<typename Format>(Format) { return format_bit(kFormat<Format>); });
  return header.bf16x3_blocks == 0 ? first : first | format_bit(GemmFormat::kBf16x3);
}

template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, PackedBytes packed) {
  const PackedHeader header = read_header(packed);
  constexpr bool kSecond = kFormat<Format> == GemmFormat::kBf16x3;
  const Partition blocks(
      header.hidden, Format::kUnitAlign, kSecond ? header.bf16x3_blocks : header.blocks);
  const int64_t offset = kSecond ? bf16x3_offset(cell, header) : kHeaderBytes;
  return {cell, blocks, header.input_size, header.heads(), packed.data() + offset};
}
template PackedWeights<F32Format> read_packed(const CellInfo&, PackedBytes);
template PackedWeights<Bf16Format> read_packed(const CellInfo&, PackedBytes);
template PackedWeights<Bf16x3Format> read_packed(const CellInfo&, PackedBytes);
template PackedWeights<Int8Format> read_packed(const CellInfo&, PackedBytes);

// ---- packing and unpacking --------------------------------------------------------------

PackedHeader make_header(
    const CellInfo& cell,
    const WeightViews& weights,
    GemmFormat format,
    Storage dtype,
    bool twice) {
  const int64_t hidden = weights.hidden, input_size = weights.input_size, heads = weights.heads;
  // The blocks scheduled for prepack_batch rows, many steps and a thread per CPU: layers may be
  // called with another number of threads later.
  Machine machine = current_machine();
  machine.threads = usable_cpus();
  const auto blocks = [&](GemmFormat of) {
    constexpr int64_t kSteps = 100;
    const int64_t batch = prepack_batch(of);
    const LayerShape shape = {
        batch, input_size, hidden, kSteps * batch, /*bf16=*/false, slots_of(cell), heads};
    return prepack_blocks(machine, of, shape).count;
  };
  return {
      PackedHeader::kMagic,
      cell.programs->hash,
      dtype_tag(dtype),
      operand_tag(format),
      hidden,
      input_size,
      blocks(format),
      twice ? blocks(GemmFormat::kBf16x3) : 0,
      heads - 1};
}

bool write_packed(
    const CellInfo& cell, const PackedHeader& header, const WeightViews& weights, std::byte* to) {
  const PackedBytes packed(to, static_cast<std::size_t>(packed_size(cell, header)));
  if (header.bf16x3_blocks != 0) {  // a gap may precede the second format
    std::memset(to + bf16x3_offset(cell, header) - kPackedAlignment, 0, kPackedAlignment);
  }
  std::memcpy(to, &header, sizeof(header));
  const bool fits = visit_form(header, [&]<typename Format>(Format) {
    return pack(weights, read_packed<Format>(cell, packed));
  });
  if (!fits || header.bf16x3_blocks == 0) return fits;
  return pack(weights, read_packed<Bf16x3Format>(cell, packed));
}

void unpack(const CellInfo& cell, PackedBytes packed, const View& ih, const View& hh) {
  const PackedHeader header = read_header(packed);
  visit_form(header, [&]<typename Format>(Format) {
    using Unpacked = typename Format::Unpacked;
    for_each_part(read_packed<Format>(cell, packed), [&](const auto& part) {
      const int64_t columns = part.of_h ? header.hidden / header.heads() : header.input_size;
      for (int64_t unit = 0; unit < part.rows; ++unit) {
        const auto to = (part.of_h ? hh : ih).template as<Unpacked>();
        Unpacked* const row = to.from(part.row + unit).data;  // null without columns
        for (int64_t k = 0; k < columns; ++k) row[k] = Format::at(part.b, k, part.column + unit);
      }
      return true;
    });
  });
}

}  // namespace lltm::cpu
