#include "cpu/packed_weights.h"

#include "cell/cells.h"
#include "common/format.h"
#include "cpu/gemm/gemm.h"
#include "cpu/parallel.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <unordered_map>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Packs a block of units of the weights w (G * H, K) of some slots.
template <typename Format>
bool pack_block(
    PackedB<const typename Format::Operand> b,
    Matrix<const typename Format::Source> w,
    const PackedWeights<Format>& packed,
    int64_t block,
    SlotRange slots,
    const int* row_blocks,
    int64_t k) {
  const PackedB<typename Format::Operand> to = {
      const_cast<typename Format::Operand*>(b.data), b.k, b.n, b.ld};
  const Blocks& blocks = packed.blocks;
  bool fits = true;
  for (int slot = slots.begin; slot < slots.end; ++slot) {
    const auto rows = w.from(row_blocks[slot] * blocks.total + blocks.begin(block));
    const int64_t n0 = (slot - slots.begin) * packed.slot_columns(block);
    fits &= Format::pack_b_transposed(to, 0, n0, rows, k, blocks.size(block));
  }
  return fits;
}

}  // namespace

template <typename Format>
std::optional<PackedWeights<Format>> pack_weights(
    const CellInfo& cell, const Weights& weights, const Blocks& blocks) {
  using Source = typename Format::Source;
  const int64_t hidden = weights.hh.size(1);
  const int64_t input_size = weights.ih.size(1);
  const Tensor ih = with_contiguous_rows(weights.ih.to(kDtype<Source>));
  const Tensor hh = with_contiguous_rows(weights.hh.to(kDtype<Source>));
  PackedHeader header = {
      PackedHeader::kMagic,
      cell_tag(cell),
      static_cast<int32_t>(weights.hh.scalar_type()),
      kOperandTag<Format>,
      hidden,
      input_size,
      blocks.count,
      /*bf16x3_offset=*/0,
      /*checksum=*/0};
  const Tensor bytes =
      at::empty({PackedWeights<Format>::bytes(cell, header)}, hh.options().dtype(at::kByte));
  std::memcpy(bytes.mutable_data_ptr(), &header, sizeof(header));
  const PackedWeights<Format> packed(cell, bytes);
  const auto w_x = read<Source>(ih);
  const auto w_h = read<Source>(hh);
  const int64_t elements = ih.numel() + hh.numel();
  const int64_t threads = threads_for(elements, kPackGrain, packed.blocks.count);
  const bool fits = parallel_region(threads, [&](Team& team) {
    team.for_each_slot(packed.blocks.count, [&](int64_t block) {
      return pack_block(packed.x(block), w_x, packed, block, cell.x, cell.x_blocks, input_size) &&
             pack_block(packed.h(block), w_h, packed, block, cell.h, cell.h_blocks, hidden);
    });
  });
  return fits ? std::optional(packed) : std::nullopt;
}

template std::optional<PackedWeights<F32Format>> pack_weights(
    const CellInfo&, const Weights&, const Blocks&);
template std::optional<PackedWeights<Bf16Format>> pack_weights(
    const CellInfo&, const Weights&, const Blocks&);
template std::optional<PackedWeights<Bf16x3Format>> pack_weights(
    const CellInfo&, const Weights&, const Blocks&);
template std::optional<PackedWeights<Int8Format>> pack_weights(
    const CellInfo&, const Weights&, const Blocks&);

uint64_t cell_tag(const CellInfo& cell) {
  uint64_t tag = 0;
  std::memcpy(&tag, cell.name, std::min(std::strlen(cell.name), sizeof(tag)));
  return cell.programs == nullptr ? tag : cell.programs->hash;
}

namespace {

constexpr int64_t kPackedAlignment = 64;

// FNV-1a over words of 64 bits, in four lanes, so that the memory sets the pace.
// No change of one word leaves its lane as it was.
int64_t checksum(const Tensor& bytes) {
  constexpr uint64_t kBasis = 0xcbf29ce484222325;
  constexpr uint64_t kPrime = 0x100000001b3;
  constexpr int64_t kLanes = 4;
  constexpr int64_t kWord = sizeof(uint64_t);
  const uint8_t* const data = bytes.const_data_ptr<uint8_t>();
  const int64_t size = bytes.numel();
  std::array<uint64_t, kLanes> lanes;
  lanes.fill(kBasis);
  const auto add = [&](int64_t lane, int64_t at) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, static_cast<size_t>(std::min(kWord, size - at)));
    lanes[lane] = (lanes[lane] ^ word) * kPrime;
  };
  int64_t at = static_cast<int64_t>(sizeof(PackedHeader));
  for (; at + kLanes * kWord <= size; at += kLanes * kWord) {
    for (int64_t lane = 0; lane < kLanes; ++lane) add(lane, at + lane * kWord);
  }
  for (int64_t lane = 0; at < size; at += kWord) add(lane++, at);
  for (at = 0; at < static_cast<int64_t>(offsetof(PackedHeader, checksum)); at += kWord) add(0, at);
  uint64_t sum = kBasis;
  for (const uint64_t lane : lanes) sum = (sum ^ lane) * kPrime;
  return static_cast<int64_t>(sum);
}

Tensor sealed(const Tensor& packed) {
  PackedHeader header = read_header(packed);
  header.checksum = checksum(packed);
  std::memcpy(packed.mutable_data_ptr(), &header, sizeof(header));
  return packed;
}

// The states of tensors whose checksum was right: it is calculated once for each, not in every
// call. A change of the header makes another state; of the bytes behind it only one that the
// tensor's version counts does.
class IntactBytes {
 public:
  bool contains(const Tensor& packed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = states_.find(packed.storage().unsafeGetStorageImpl());
    return found != states_.end() && !found->second.storage.expired() &&
           found->second.is_of(packed);
  }
  void insert(const Tensor& packed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (states_.size() >= most_) {
      std::erase_if(states_, [](const auto& entry) { return entry.second.storage.expired(); });
      most_ = 2 * states_.size() + 64;
    }
    states_.insert_or_assign(packed.storage().unsafeGetStorageImpl(), State(packed));
  }

 private:
  struct State {
    explicit State(const Tensor& packed)
        : storage(packed.storage().getWeakStorageImpl()),
          data(packed.const_data_ptr()),
          bytes(packed.numel()),
          version(version_of(packed)),
          header(read_header(packed)) {}
    bool is_of(const Tensor& packed) const {
      return data == packed.const_data_ptr() && bytes == packed.numel() &&
             version == version_of(packed) && std::memcmp(data, &header, sizeof(header)) == 0;
    }
    // Tensors made in inference mode have no counter.
    static int64_t version_of(const Tensor& packed) {
      return packed.is_inference() ? 0 : packed._version();
    }

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other takes its address
    const void* data;
    int64_t bytes;
    int64_t version;
    PackedHeader header;
  };
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, State> states_;
  size_t most_ = 64;
};

bool is_intact(const Tensor& packed) {
  static IntactBytes& known = *new IntactBytes;  // outlives every thread
  if (known.contains(packed)) return true;
  if (read_header(packed).checksum != checksum(packed)) return false;
  known.insert(packed);
  return true;
}

// Weights in a format, scheduled for prepack_batch rows; undefined where values are out of range.
template <typename Format>
Tensor prepack_as(const CellInfo& cell, const Weights& weights) {
  const int64_t batch = prepack_batch(kFormat<Format>);
  const LayerShape shape = {
      batch, weights.ih.size(1), weights.hh.size(1), batch, /*bf16=*/false, slots_of(cell)};
  const Blocks blocks = prepack_blocks(current_machine(), kFormat<Format>, shape);
  const auto packed = pack_weights<Format>(cell, weights, blocks);
  return packed.has_value() ? packed->tensor : Tensor();
}

// Whether this is a header of weights in a format that take so many bytes.
template <typename Format>
bool is_whole(const CellInfo& cell, const PackedHeader& header, int64_t bytes) {
  constexpr int64_t kAlign = Format::kUnitAlign;
  return header.operand == kOperandTag<Format> && header.blocks > 0 &&
         header.blocks <= round_up(header.hidden, kAlign) / kAlign &&
         Blocks(header.hidden, kAlign, header.blocks).width <=
             max_forward_block_width(kFormat<Format>) &&
         bytes == PackedWeights<Format>::bytes(cell, header);
}

template <typename Format>
Weights unpack_as(const CellInfo& cell, const Tensor& bytes) {
  using Source = typename Format::Source;
  const PackedHeader header = read_header(bytes);
  const PackedWeights<Format> packed(cell, header, bytes);
  const Blocks& blocks = packed.blocks;
  const auto options = bytes.options().dtype(kDtype<Source>);
  const Weights weights = {
      at::empty({cell.x.count() * header.hidden, header.input_size}, options),
      at::empty({cell.h.count() * header.hidden, header.hidden}, options)};
  const auto copy =
      [&](const auto& b, int64_t block, SlotRange slots, const int* row_blocks, const Tensor& to) {
        const auto w = write<Source>(to);
        for (int slot = slots.begin; slot < slots.end; ++slot) {
          for (int64_t unit = 0; unit < blocks.size(block); ++unit) {
            const int64_t r = row_blocks[slot] * blocks.total + blocks.begin(block) + unit;
            Source* const row = w.from(r).data;  // null without columns
            const int64_t n = (slot - slots.begin) * packed.slot_columns(block) + unit;
            for (int64_t k = 0; k < to.size(1); ++k) row[k] = Format::at(b, k, n);
          }
        }
      };
  for (int64_t block = 0; block < blocks.count; ++block) {
    copy(packed.x(block), block, cell.x, cell.x_blocks, weights.ih);
    copy(packed.h(block), block, cell.h, cell.h_blocks, weights.hh);
  }
  return weights;
}

Tensor prepack_int8(const CellInfo& cell, const Weights& weights) {
  TORCH_CHECK_TYPE(
      weights.hh.scalar_type() != at::kDouble,
      "lltm::prepack: expected weights of dtype float32, bfloat16 or float16 to quantise, got"
      " float64");
  TORCH_CHECK_VALUE(
      cell.bounded,
      "lltm::prepack: expected a cell that is bounded (|h'| <= 1) to quantise, got ",
      cell.title());
  TORCH_CHECK_VALUE(
      weights.hh.size(1) <= kInt8MostK && weights.ih.size(1) <= kInt8MostK,
      "lltm::prepack: expected weights of hidden and input size at most ",
      kInt8MostK,
      " to quantise, got ",
      weights.hh.size(1),
      " and ",
      weights.ih.size(1));
  const Tensor packed = prepack_as<Int8Format>(cell, weights);
  TORCH_CHECK_VALUE(
      packed.defined(), "lltm::prepack: expected finite weights to quantise, got inf or nan");
  return sealed(packed);
}

}  // namespace

Tensor prepack(
    const CellInfo& cell,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> dtype) {
  const Weights weights = weights_of(cell, weight_ih, weight_hh);
  const bool empty = weight_ih.numel() == 0;
  if (dtype == at::kQInt8 && !empty) return prepack_int8(cell, weights);
  const bool bf16 = weight_ih.scalar_type() == at::kBFloat16;
  if (weight_ih.scalar_type() == at::kDouble || empty || !F32Format::available()) {
    return weight_hh.defined() ? join(cell, weights)
                               : weight_ih.clone(at::MemoryFormat::Contiguous);
  }
  if (bf16 && Bf16Format::available()) return sealed(prepack_as<Bf16Format>(cell, weights));
  const Tensor few = prepack_as<F32Format>(cell, weights);
  const Tensor many =
      Bf16x3Format::available() && !bf16 ? prepack_as<Bf16x3Format>(cell, weights) : Tensor();
  if (!many.defined()) return sealed(few);
  PackedHeader header = read_header(few);
  header.bf16x3_offset = round_up(few.numel(), kPackedAlignment);
  const Tensor both = at::zeros({header.bf16x3_offset + many.numel()}, few.options());
  both.slice(0, 0, few.numel()).copy_(few);
  both.slice(0, header.bf16x3_offset).copy_(many);
  std::memcpy(both.mutable_data_ptr(), &header, sizeof(header));
  return sealed(both);
}

bool has_form(const Tensor& packed, GemmFormat format) {
  const PackedHeader header = read_header(packed);
  switch (format) {
    case GemmFormat::kBf16x3:
      return header.bf16x3_offset != 0;
    case GemmFormat::kBf16:
      return header.operand == kOperandTag<Bf16Format>;
    case GemmFormat::kInt8:
      return header.operand == kOperandTag<Int8Format>;
    default:
      return header.operand == kOperandTag<F32Format>;
  }
}

namespace {

constexpr const char* kExpected = "lltm::sequence_prepacked: expected weights from prepack";
constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(PackedHeader));

// Throws where the header says that the weights are for another call than this.
void check_header(const PackedHeader& header, const SequenceArgs& args) {
  const CellInfo& cell = *args.cell;
  if (header.cell != cell_tag(cell)) {
    const auto* const other =
        std::find_if(std::begin(kCells), std::end(kCells), [&](const CellInfo* known) {
          return cell_tag(*known) == header.cell;
        });
    TORCH_CHECK_VALUE(
        false,
        kExpected,
        " for the cell ",
        cell.title(),
        ", got some for ",
        other == std::end(kCells) ? "another" : (*other)->name);
  }
  const at::ScalarType dtype = args.input.scalar_type();
  TORCH_CHECK_TYPE(
      header.dtype == static_cast<int32_t>(dtype),
      kExpected,
      " of dtype ",
      dtype_text(dtype),
      ", that of the input, got some of ",
      dtype_text(static_cast<at::ScalarType>(header.dtype)));
  const int64_t input_size = args.input.size(-1);
  const int64_t hidden = args.h_0.size(1);
  TORCH_CHECK_VALUE(
      header.hidden == hidden && header.input_size == input_size,
      kExpected,
      " of shape (",
      cell.joined_blocks() * hidden,
      ", ",
      hidden + input_size,
      "), got some for hidden size ",
      header.hidden,
      " and input size ",
      header.input_size);
}

// Whether the bytes are as many as their checked header says, in one form or two.
bool is_whole(const CellInfo& cell, const PackedHeader& header, const Tensor& packed) {
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  const int64_t end = packed.numel();
  if (dtype == at::kDouble) return false;
  if (header.bf16x3_offset == 0) {
    return is_whole<F32Format>(cell, header, end) || is_whole<Int8Format>(cell, header, end) ||
           (dtype == at::kBFloat16 && is_whole<Bf16Format>(cell, header, end));
  }
  const int64_t first = PackedWeights<F32Format>::bytes(cell, header);
  if (header.bf16x3_offset != round_up(first, kPackedAlignment) ||
      header.bf16x3_offset + kHeaderBytes > end) {
    return false;
  }
  const PackedHeader second = read_header(packed.slice(0, header.bf16x3_offset));
  return is_whole<F32Format>(cell, header, first) && second.hidden == header.hidden &&
         second.input_size == header.input_size && second.cell == header.cell &&
         is_whole<Bf16x3Format>(cell, second, end - header.bf16x3_offset);
}

}  // namespace

void check_prepacked(const SequenceArgs& args) {
  const Tensor& packed = args.weight_ih;
  if (!is_prepacked(packed)) return;
  PackedHeader header = {};
  if (packed.dim() == 1 && packed.is_contiguous() && packed.numel() >= kHeaderBytes) {
    header = read_header(packed);
  }
  TORCH_CHECK_VALUE(
      header.magic == PackedHeader::kMagic,
      kExpected,
      ", got other bytes of shape ",
      shape_text(packed.sizes()));
  check_header(header, args);
  // From here on its sizes are those of real tensors, and can be calculated with.
  TORCH_CHECK_VALUE(
      is_whole(*args.cell, header, packed),
      kExpected,
      ", got bytes that are not whole, of shape ",
      shape_text(packed.sizes()));
  TORCH_CHECK_VALUE(is_intact(packed), kExpected, ", got bytes that have changed since");
}

Weights unpack(const CellInfo& cell, const Tensor& packed) {
  const auto [ih, hh] = has_form(packed, GemmFormat::kBf16)   ? unpack_as<Bf16Format>(cell, packed)
                        : has_form(packed, GemmFormat::kInt8) ? unpack_as<Int8Format>(cell, packed)
                                                              : unpack_as<F32Format>(cell, packed);
  const auto dtype = static_cast<at::ScalarType>(read_header(packed).dtype);
  return {ih.to(dtype), hh.to(dtype)};
}

}  // namespace lltm::cpu
