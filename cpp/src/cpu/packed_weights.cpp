#include "cpu/packed_weights.h"

#include "cpu/dispatch.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "text.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace lltm::cpu {

using at::Tensor;

namespace {

constexpr int64_t kPackedAlignment = 64;

template <typename G>
Tensor unpack_weights(const PackedHeader& header, const Tensor& bytes) {
  constexpr int64_t kTogether = kRowsTogether<G>;
  const PackedWeights<G> packed(header, bytes);
  const Blocks& blocks = packed.blocks;
  const Tensor weights = at::empty(
      {3 * header.hidden, header.hidden + header.input_size},
      bytes.options().dtype(kOperandDtype<G>));
  const auto w = write<G>(weights);
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t columns = 3 * blocks.size(block);
    const auto take = [&](const G* from, int64_t depth, int64_t first_column) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t n = 0; n < columns; ++n) {
          const int64_t gate = n / blocks.size(block);
          const int64_t unit = blocks.begin(block) + n % blocks.size(block);
          w.row(gate * blocks.hidden + unit)[first_column + k] =
              from[(k / kTogether * columns + n) * kTogether + k % kTogether];
        }
      }
    };
    take(packed.x(block), header.input_size, header.hidden);
    take(packed.h(block), header.hidden, 0);
  }
  return weights;
}

}  // namespace

template <typename G>
PackedWeights<G> pack_weights(const Tensor& weights, int64_t parts) {
  const int64_t hidden = weights.size(0) / 3;
  const int64_t input_size = weights.size(1) - hidden;
  const int64_t depth = padded_depth<G>(input_size) + padded_depth<G>(hidden);
  const int64_t unit_bytes = 3 * depth * static_cast<int64_t>(sizeof(G));
  constexpr int64_t kMultiple = kBlockUnits<G>;
  const Blocks blocks(
      hidden, parts, block_units<G>(kForwardUnits<G>, unit_bytes, kMultiple), kMultiple);
  constexpr bool kSplit = std::is_same_v<G, BFloat16x3>;
  using Element = std::conditional_t<kSplit, float, G>;
  Tensor rows = weights.to(kOperandDtype<Element>);
  if (kSplit && rows.stride(1) != 1) rows = rows.contiguous();
  const auto w = read<Element>(rows);
  const PackedHeader header = {
      PackedHeader::kMagic,
      static_cast<int64_t>(weights.scalar_type()),
      kOperandTag<G>,
      hidden,
      input_size,
      blocks.width,
      /*split_at=*/0,
      /*checksum=*/0};
  const Tensor bytes =
      at::empty({PackedWeights<G>::bytes(header)}, rows.options().dtype(at::kByte));
  std::memcpy(bytes.mutable_data_ptr(), &header, sizeof(header));
  const PackedWeights<G> packed(bytes);
  const int64_t grain = std::max<int64_t>(1, kPackGrain / (3 * blocks.width * rows.size(1)));
  at::parallel_for(0, blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t width = blocks.size(block);
      const auto pack_part = [&](const G* to, int64_t first_column, int64_t columns) {
        for (int64_t gate = 0; gate < 3; ++gate) {
          const auto x = w.from(gate * hidden + blocks.begin(block), first_column);
          const int64_t first = gate * packed.gate_columns(block);
          if constexpr (kSplit) {
            pack_split_transposed(const_cast<G*>(to), first, x, columns, width);
          } else {
            pack_transposed(
                const_cast<G*>(to) + first * kRowsTogether<G>, 3 * width, x, columns, width);
          }
        }
      };
      pack_part(packed.x(block), hidden, input_size);
      pack_part(packed.h(block), 0, hidden);
    }
  });
  return packed;
}

template PackedWeights<float> pack_weights<float>(const Tensor&, int64_t);
template PackedWeights<BFloat16> pack_weights<BFloat16>(const Tensor&, int64_t);
template PackedWeights<BFloat16x3> pack_weights<BFloat16x3>(const Tensor&, int64_t);

namespace {

// For as many rows as a thread needs of a step.
template <typename G>
Tensor prepack_for(const Tensor& weights) {
  const int64_t hidden = weights.size(0) / 3;
  constexpr int64_t kRows = kGoodRows<G>;
  const int64_t bytes = weights.numel() * static_cast<int64_t>(sizeof(G));
  const Grid grid =
      choose_grid<G>(available_threads(), kRows, hidden, bytes, kRows * 3 * hidden * hidden);
  return pack_weights<G>(weights, grid.columns).tensor;
}

}  // namespace

namespace {

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

// The states of tensors whose checksum was right: it is calculated once for each,
// not in every call.
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
          version(version_of(packed)) {}
    bool is_of(const Tensor& packed) const {
      return data == packed.const_data_ptr() && bytes == packed.numel() &&
             version == version_of(packed);
    }
    // Tensors made in inference mode have no counter.
    static int64_t version_of(const Tensor& packed) {
      return packed.is_inference() ? 0 : packed._version();
    }

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // lest another take its address
    const void* data;
    int64_t bytes;
    int64_t version;
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

}  // namespace

Tensor prepack(const Tensor& weights) {
  if (weights.scalar_type() == at::kDouble || weights.numel() == 0 || !has_micro_kernel<float>()) {
    return weights.clone(at::MemoryFormat::Contiguous);
  }
  if (weights.scalar_type() == at::kBFloat16 && has_micro_kernel<BFloat16>()) {
    return sealed(prepack_for<BFloat16>(weights));
  }
  const Tensor few = prepack_for<float>(weights);
  if (!has_micro_kernel<BFloat16x3>() || weights.scalar_type() == at::kBFloat16) {
    return sealed(few);
  }
  try {
    const Tensor many = prepack_for<BFloat16x3>(weights);
    PackedHeader header = read_header(few);
    header.split_at = round_up(few.numel(), kPackedAlignment);
    const Tensor both = at::zeros({header.split_at + many.numel()}, few.options());
    both.slice(0, 0, few.numel()).copy_(few);
    both.slice(0, header.split_at).copy_(many);
    std::memcpy(both.mutable_data_ptr(), &header, sizeof(header));
    return sealed(both);
  } catch (const Unsplittable&) {
    return sealed(few);
  }
}

namespace {

// Whether this is a header of weights for G that take so many bytes.
template <typename G>
bool is_whole(const PackedHeader& header, int64_t bytes) {
  return header.operand == kOperandTag<G> && header.width > 0 && header.width <= kForwardUnits<G> &&
         header.width % kBlockUnits<G> == 0 && bytes == PackedWeights<G>::bytes(header);
}

}  // namespace

void check_prepacked(const Tensor& packed, const Tensor& input, const Tensor& h_0) {
  if (!is_prepacked(packed)) return;
  const at::ScalarType dtype = input.scalar_type();
  const int64_t input_size = input.size(-1);
  const int64_t hidden = h_0.size(1);
  constexpr const char* kExpected = "lltm::sequence_prepacked: expected weights from prepack";
  constexpr auto kHeader = static_cast<int64_t>(sizeof(PackedHeader));
  PackedHeader header = {};
  if (packed.dim() == 1 && packed.is_contiguous() && packed.numel() >= kHeader) {
    header = read_header(packed);
  }
  TORCH_CHECK_VALUE(
      header.magic == PackedHeader::kMagic,
      kExpected,
      ", got other bytes of shape ",
      shape_text(packed.sizes()));
  TORCH_CHECK_TYPE(
      header.dtype == static_cast<int64_t>(dtype),
      kExpected,
      " of dtype ",
      dtype,
      ", got some of another dtype");
  // Sizes that are those of real tensors can be calculated with.
  TORCH_CHECK_VALUE(
      header.hidden == hidden && header.input_size == input_size,
      kExpected,
      " of shape (",
      3 * hidden,
      ", ",
      hidden + input_size,
      "), got some for hidden size ",
      header.hidden,
      " and input size ",
      header.input_size);
  const int64_t end = packed.numel();
  bool whole = false;
  if (header.split_at == 0) {
    whole =
        is_whole<float>(header, end) || (dtype == at::kBFloat16 && is_whole<BFloat16>(header, end));
  } else if (
      header.split_at == round_up(PackedWeights<float>::bytes(header), kPackedAlignment) &&
      header.split_at + kHeader <= end) {
    const PackedHeader split = read_header(packed.slice(0, header.split_at));
    whole = is_whole<float>(header, PackedWeights<float>::bytes(header)) &&
            split.hidden == hidden && split.input_size == input_size &&
            is_whole<BFloat16x3>(split, end - header.split_at);
  }
  TORCH_CHECK_VALUE(
      whole && dtype != at::kDouble,
      kExpected,
      ", got bytes that are not whole, of shape ",
      shape_text(packed.sizes()));
  TORCH_CHECK_VALUE(is_intact(packed), kExpected, ", got bytes that have changed since");
}

Tensor unpack(const Tensor& packed) {
  const PackedHeader header = read_header(packed);
  const Tensor weights = has_narrow_blocks(packed) ? unpack_weights<BFloat16>(header, packed)
                                                   : unpack_weights<float>(header, packed);
  return weights.to(static_cast<at::ScalarType>(header.dtype));
}

}  // namespace lltm::cpu
