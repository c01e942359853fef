#include "cpu/packed_weights.h"

#include "cpu/dispatch.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "text.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

namespace {

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
  const Blocks blocks(hidden, parts, block_units(kForwardUnits, unit_bytes, kUnits));
  const Tensor rows = weights.to(kOperandDtype<G>);
  const auto w = read<G>(rows);
  const PackedHeader header = {
      PackedHeader::kMagic,
      static_cast<int64_t>(weights.scalar_type()),
      static_cast<int64_t>(kOperandDtype<G>),
      hidden,
      input_size,
      blocks.width,
      {}};
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
          const int64_t row = gate * hidden + blocks.begin(block);
          pack_transposed(
              const_cast<G*>(to) + gate * width * kRowsTogether<G>,
              3 * width,
              w.from(row, first_column),
              columns,
              width);
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

Tensor prepack(const Tensor& weights) {
  if (weights.scalar_type() == at::kDouble || weights.numel() == 0 || !has_micro_kernel<float>()) {
    return weights.clone(at::MemoryFormat::Contiguous);
  }
  const int64_t hidden = weights.size(0) / 3;
  const int64_t rows = kGoodRows;
  const Grid grid =
      choose_grid(available_threads(), rows, hidden, weights.nbytes(), rows * 3 * hidden * hidden);
  return weights.scalar_type() == at::kBFloat16 && has_micro_kernel<BFloat16>()
             ? pack_weights<BFloat16>(weights, grid.columns).tensor
             : pack_weights<float>(weights, grid.columns).tensor;
}

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
  const bool narrow = header.operand == static_cast<int64_t>(at::kBFloat16);
  TORCH_CHECK_VALUE(
      (narrow ? dtype == at::kBFloat16 : header.operand == static_cast<int64_t>(at::kFloat)) &&
          dtype != at::kDouble && header.width > 0 && header.width <= kForwardUnits &&
          header.width % kUnits == 0 &&
          packed.numel() == (narrow ? PackedWeights<BFloat16>::bytes(header)
                                    : PackedWeights<float>::bytes(header)),
      kExpected,
      ", got bytes that are not whole, of shape ",
      shape_text(packed.sizes()));
}

Tensor unpack(const Tensor& packed) {
  const PackedHeader header = read_header(packed);
  const Tensor weights = has_narrow_blocks(packed) ? unpack_weights<BFloat16>(header, packed)
                                                   : unpack_weights<float>(header, packed);
  return weights.to(static_cast<at::ScalarType>(header.dtype));
}

}  // namespace lltm::cpu
