#include "cpu/packed_weights.h"

#include "cell/cells.h"
#include "common/format.h"
#include "common/tensor_views.h"
#include "cpu/choose_engine.h"
#include "cpu/gemm/gemm.h"
#include "cpu/threads/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace lltm::cpu {

using at::Tensor;

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
bool pack(const Weights& weights, const PackedWeights<Format>& packed) {
  const Tensor matrices[] = {
      with_contiguous_rows(as_packed_dtype<Format>(weights.ih)),
      with_contiguous_rows(as_packed_dtype<Format>(weights.hh).flatten(0, -2))};
  return visit_packed_dtype<Format>(weights.hh.scalar_type(), [&]<typename T>(T*) {
    const Matrix<const T> w[] = {read<T>(matrices[0]), read<T>(matrices[1])};
    return for_each_part(packed, [&](const auto& part) {
      const int64_t k = matrices[part.of_h].size(1);
      const auto pack_rows = [&](const auto& rows, int64_t first, int64_t count) {
        const int64_t column = part.column + first;
        return Format::pack_b_transposed(writable(part.b), 0, column, rows, k, count);
      };
      const auto rows = w[part.of_h].from(part.row);
      return pack_widened<typename Format::Unpacked>(rows, part.rows, k, pack_rows);
    });
  });
}

Tensor empty_bytes(const Tensor& like, int64_t count) {
  return empty_large({count}, like.options().dtype(at::kByte));
}

}  // namespace

template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const Weights& weights, const Partition& blocks) {
  const int64_t input_size = weights.ih.size(1), heads = heads_of(weights.hh);
  const int64_t bytes = PackedWeights<Format>::bytes(cell, blocks.total, input_size, heads);
  PackedWeights<Format> packed(cell, blocks, input_size, heads, empty_bytes(weights.hh, bytes));
  return pack(weights, packed) ? std::optional(std::move(packed)) : std::nullopt;
}

template std::optional<PackedWeights<F32Format>> pack_weights(
    const CellInfo&, const Weights&, const Partition&);
template std::optional<PackedWeights<Bf16Format>> pack_weights(
    const CellInfo&, const Weights&, const Partition&);
template std::optional<PackedWeights<Bf16x3Format>> pack_weights(
    const CellInfo&, const Weights&, const Partition&);

// ---- the header -------------------------------------------------------------------

namespace {

// Precedes the packed weights. float32 weights may be stored twice: in float32 for few rows, and in
// bf16x3 for many.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x354B4341504D544C;  // LTMPACK5
  int64_t magic;
  uint64_t cell;    // cell_tag
  int32_t dtype;    // weight dtype; float32 for int8, which supports several
  int32_t operand;  // the format's kOperandTag
  int64_t hidden, input_size;
  int64_t blocks;
  int64_t bf16x3_blocks;  // 0 if not stored
  int64_t further_heads;  // than one

  int64_t heads() const { return further_heads + 1; }
};
constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(PackedHeader));
constexpr int64_t kPackedAlignment = 64;
static_assert(kHeaderBytes == kPackedAlignment);

template <typename Format>
constexpr auto kOperandTag = static_cast<int32_t>(kDtype<typename Format::Element>);
template <>
inline constexpr auto kOperandTag<Int8Format> = static_cast<int32_t>(at::kQInt8);

PackedHeader read_header(const Tensor& packed) {
  PackedHeader header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  return header;
}
void write_header(const PackedHeader& header, const Tensor& packed) {
  std::memcpy(packed.mutable_data_ptr(), &header, sizeof(header));
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
  return round_up(kHeaderBytes + first, kPackedAlignment);
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
  const auto is = [&](at::ScalarType dtype) { return header.dtype == static_cast<int32_t>(dtype); };
  const bool once = header.bf16x3_blocks == 0;
  const auto end = [&]<typename Format>(Format) {
    return end_of<Format>(cell, header, kHeaderBytes, header.blocks);
  };
  switch (header.operand) {
    case kOperandTag<Int8Format>:
      return is(at::kFloat) && once && !cell.has_stages() && bytes == end(Int8Format{});
    case kOperandTag<Bf16Format>:
      return is(at::kBFloat16) && once && bytes == end(Bf16Format{});
    case kOperandTag<F32Format>:
      if (once) {
        return (is(at::kFloat) || is(at::kBFloat16) || is(at::kHalf)) && bytes == end(F32Format{});
      }
      return (is(at::kFloat) || is(at::kHalf)) && end(F32Format{}) > 0 &&
             bytes == end_of<Bf16x3Format>(
                          cell, header, bf16x3_offset(cell, header), header.bf16x3_blocks);
    default:
      return false;
  }
}

}  // namespace

void check_prepacked(const char* op, const CellInfo& cell, const Tensor& packed) {
  PackedHeader header = {};
  if (packed.dim() == 1 && packed.is_contiguous() && packed.numel() >= kHeaderBytes) {
    header = read_header(packed);
  }
  TORCH_CHECK_VALUE(
      header.magic == PackedHeader::kMagic,
      op,
      ": expected weights from prepack, got bytes without a prepack header, of shape ",
      shape_text(packed.sizes()));
  if (header.cell != cell.programs->hash) {
    const auto* const other =
        std::find_if(std::begin(kCells), std::end(kCells), [&](const CellInfo* known) {
          return find_cell(known->name)->programs->hash == header.cell;
        });
    TORCH_CHECK_VALUE(
        false,
        op,
        ": expected weights prepacked for the cell ",
        cell.title(),
        ", got weights prepacked for ",
        other == std::end(kCells) ? "another cell" : (*other)->name);
  }
  TORCH_CHECK_VALUE(
      is_whole(cell, header, packed.numel()),
      op,
      ": expected weights from prepack, got bytes that do not match their header, of shape ",
      shape_text(packed.sizes()));
}

void check_prepacked(const SequenceArgs& args) {
  constexpr const char* kExpected = "lltm::sequence: expected weights from prepack";
  const CellInfo& cell = *args.cell;
  check_prepacked("lltm::sequence", cell, args.weight_ih);
  const PackedHeader header = read_header(args.weight_ih);
  const at::ScalarType dtype = args.input->scalar_type();
  const bool is_int8 = header.operand == kOperandTag<Int8Format>;
  TORCH_CHECK_TYPE(
      is_int8 ? dtype != at::kDouble : header.dtype == static_cast<int32_t>(dtype),
      kExpected,
      " of dtype ",
      dtype_text(dtype),
      ", the dtype of the input, got ",
      is_int8 ? "int8" : dtype_text(static_cast<at::ScalarType>(header.dtype)));
  const int64_t hidden = args.h_0->size(1);
  const int64_t input_size = args.input->size(-1) - cell.given * hidden;
  TORCH_CHECK_VALUE(
      header.hidden == hidden && header.input_size == input_size,
      kExpected,
      " of shape (",
      cell.concatenated_blocks() * hidden,
      ", ",
      hidden + input_size,
      "), got weights for hidden size ",
      header.hidden,
      " and input size ",
      header.input_size);
}

bool has_form(const Tensor& packed, GemmFormat format) {
  const PackedHeader header = read_header(packed);
  switch (format) {
    case GemmFormat::kBf16x3:
      return header.bf16x3_blocks != 0;
    case GemmFormat::kBf16:
      return header.operand == kOperandTag<Bf16Format>;
    case GemmFormat::kInt8:
      return header.operand == kOperandTag<Int8Format>;
    default:
      return header.operand == kOperandTag<F32Format>;
  }
}

unsigned packed_forms(const Tensor& packed) {
  unsigned forms = 0;
  using enum GemmFormat;
  for (const GemmFormat format : {kF32, kBf16, kBf16x3, kInt8}) {
    if (has_form(packed, format)) forms |= format_bit(format);
  }
  return forms;
}

int64_t packed_heads(const Tensor& packed) {
  return read_header(packed).heads();
}

Tensor aligned(const Tensor& packed) {
  const auto address = reinterpret_cast<std::uintptr_t>(packed.const_data_ptr());
  return address % kPackedAlignment == 0 ? packed : packed.clone();
}

template <typename Format>
PackedWeights<Format> read_packed(const CellInfo& cell, const Tensor& packed) {
  const PackedHeader header = read_header(packed);
  constexpr bool kSecond = kFormat<Format> == GemmFormat::kBf16x3;
  const Partition blocks(
      header.hidden, Format::kUnitAlign, kSecond ? header.bf16x3_blocks : header.blocks);
  const int64_t offset = kSecond ? bf16x3_offset(cell, header) : kHeaderBytes;
  return {cell, blocks, header.input_size, header.heads(), packed, offset};
}
template PackedWeights<F32Format> read_packed(const CellInfo&, const Tensor&);
template PackedWeights<Bf16Format> read_packed(const CellInfo&, const Tensor&);
template PackedWeights<Bf16x3Format> read_packed(const CellInfo&, const Tensor&);
template PackedWeights<Int8Format> read_packed(const CellInfo&, const Tensor&);

// ---- prepack --------------------------------------------------------------------------

namespace {

// Returns the blocks scheduled for prepack_batch rows, many steps and a thread per CPU: layers may
// be called with another number of threads later.
template <typename Format>
Partition blocks_for(const CellInfo& cell, const Weights& weights) {
  const int64_t batch = prepack_batch(kFormat<Format>);
  constexpr int64_t kSteps = 100;
  const LayerShape shape = {
      batch,
      weights.ih.size(1),
      weights.hh.size(-1) * heads_of(weights.hh),
      kSteps * batch,
      /*bf16=*/false,
      slots_of(cell),
      heads_of(weights.hh)};
  Machine machine = current_machine();
  machine.threads = usable_cpus();
  return prepack_blocks(machine, kFormat<Format>, shape);
}

// Returns an undefined tensor if values are out of range.
template <typename Format>
Tensor prepack_as(const CellInfo& cell, const Weights& weights, at::ScalarType dtype) {
  const Partition blocks = blocks_for<Format>(cell, weights);
  const int64_t heads = heads_of(weights.hh);
  const int64_t hidden = weights.hh.size(-1) * heads, input_size = weights.ih.size(1);
  const int64_t bytes = PackedWeights<Format>::bytes(cell, hidden, input_size, heads);
  const Tensor packed = empty_bytes(weights.hh, kHeaderBytes + bytes);
  write_header(
      {PackedHeader::kMagic,
       cell.programs->hash,
       static_cast<int32_t>(dtype),
       kOperandTag<Format>,
       hidden,
       input_size,
       blocks.count,
       /*bf16x3_blocks=*/0,
       heads - 1},
      packed);
  return pack(weights, read_packed<Format>(cell, packed)) ? packed : Tensor();
}

// Packs in float32 and, if values are in range, also in bf16x3.
Tensor prepack_twice(const CellInfo& cell, const Weights& weights, at::ScalarType dtype) {
  const Tensor few = prepack_as<F32Format>(cell, weights, dtype);
  const auto many =
      pack_weights<Bf16x3Format>(cell, weights, blocks_for<Bf16x3Format>(cell, weights));
  if (!many.has_value()) return few;
  PackedHeader header = read_header(few);
  header.bf16x3_blocks = many->blocks.count;
  const int64_t offset = bf16x3_offset(cell, header);
  Tensor both = at::zeros({offset + many->tensor.numel()}, few.options());
  both.slice(0, 0, few.numel()).copy_(few);
  both.slice(0, offset).copy_(many->tensor);
  write_header(header, both);
  return both;
}

Tensor quantize(const CellInfo& cell, const Weights& weights) {
  TORCH_CHECK_TYPE(
      weights.hh.scalar_type() != at::kDouble,
      "lltm::prepack: expected weights of dtype float32, bfloat16 or float16 to quantize, got"
      " float64");
  TORCH_CHECK_VALUE(
      !cell.has_stages(),
      "lltm::prepack: expected a cell without products and means to quantize, got ",
      cell.title());
  TORCH_CHECK_VALUE(
      cell.bounded,
      "lltm::prepack: expected a cell that is bounded (|h'| <= 1) to quantize, got ",
      cell.title());
  TORCH_CHECK_VALUE(
      weights.hh.size(-1) <= kInt8MostK && weights.ih.size(1) <= kInt8MostK,
      "lltm::prepack: expected weights of hidden and input size at most ",
      kInt8MostK,
      " to quantize, got ",
      weights.hh.size(-1),
      " and ",
      weights.ih.size(1));
  Tensor packed = prepack_as<Int8Format>(cell, weights, at::kFloat);
  TORCH_CHECK_VALUE(
      packed.defined(), "lltm::prepack: expected finite weights to quantize, got inf or nan");
  return packed;
}

}  // namespace

Tensor prepack(
    const CellInfo& cell,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> quantized) {
  const at::ScalarType dtype = weight_ih.scalar_type();
  const Weights given = weights_of(cell, weight_ih, weight_hh);
  const bool empty = (cell.x.count() > 0 ? given.ih : given.hh).numel() == 0;
  const bool in_aten = dtype == at::kDouble || empty || !F32Format::available();
  const bool quantizes = quantized == at::kQInt8 && !empty;
  const bool packs = packs_heads(given.hh) && (quantizes || !in_aten);
  const Weights weights = {given.ih, packs ? given.hh : without_heads(given.hh)};
  if (quantizes) return quantize(cell, weights);
  if (in_aten) {
    return weight_hh.defined() ? concatenate(cell, weights)
                               : weight_ih.clone(at::MemoryFormat::Contiguous);
  }
  const bool bf16 = dtype == at::kBFloat16;
  if (bf16 && kernels().fast_bf16) return prepack_as<Bf16Format>(cell, weights, dtype);
  const bool twice = Bf16x3Format::available() && !bf16 && !cell.has_stages();
  return twice ? prepack_twice(cell, weights, dtype) : prepack_as<F32Format>(cell, weights, dtype);
}

// ---- unpack ---------------------------------------------------------------------------

namespace {

template <typename Format>
Weights unpack_as(const CellInfo& cell, const Tensor& bytes) {
  using Unpacked = typename Format::Unpacked;
  const PackedHeader header = read_header(bytes);
  const auto options = bytes.options().dtype(kDtype<Unpacked>);
  const int64_t columns[] = {header.input_size, header.hidden / header.heads()};
  Weights weights = {
      at::empty({cell.x.count() * header.hidden, columns[0]}, options),
      at::empty({cell.h.count() * header.hidden, columns[1]}, options)};
  const Matrix<Unpacked> w[] = {write<Unpacked>(weights.ih), write<Unpacked>(weights.hh)};
  for_each_part(read_packed<Format>(cell, bytes), [&](const auto& part) {
    for (int64_t unit = 0; unit < part.rows; ++unit) {
      Unpacked* const row = w[part.of_h].from(part.row + unit).data;  // null without columns
      for (int64_t k = 0; k < columns[part.of_h]; ++k) {
        row[k] = Format::at(part.b, k, part.column + unit);
      }
    }
    return true;
  });
  if (header.heads() > 1) {
    const int64_t rows = weights.hh.size(0) / header.heads();
    weights.hh = weights.hh.unflatten(0, {header.heads(), rows});
  }
  return weights;
}

}  // namespace

Weights unpack(const CellInfo& cell, const Tensor& packed) {
  if (has_form(packed, GemmFormat::kBf16)) return unpack_as<Bf16Format>(cell, packed);
  if (has_form(packed, GemmFormat::kInt8)) return unpack_as<Int8Format>(cell, packed);
  const Weights weights = unpack_as<F32Format>(cell, packed);
  const auto dtype = static_cast<at::ScalarType>(read_header(packed).dtype);
  return {weights.ih.to(dtype), weights.hh.to(dtype)};
}

}  // namespace lltm::cpu
