// The weights of a layer and direction as the blocked engine's forward pass reads
// them: laid out in every call, or once for all (prepack).
#pragma once

#include "cpu/blocks.h"
#include "cpu/micro_kernel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace lltm::cpu {

// Packed weights are a tensor of bytes: this header, then for each block of
// hidden units the rows that multiply the input and those that multiply the
// state, the columns being the block's units gate by gate.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x314B4341504D544C;  // LTMPACK1
  int64_t magic;
  int64_t dtype;    // of the weights, an at::ScalarType
  int64_t operand;  // of the products' operands
  int64_t hidden, input_size, width;
  int64_t unused[2];  // zero; what follows is aligned as the tensor is
};
static_assert(sizeof(PackedHeader) == 64);

inline PackedHeader read_header(const at::Tensor& packed) {
  PackedHeader header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  return header;
}

template <typename G>
struct PackedWeights {
  explicit PackedWeights(at::Tensor bytes) : PackedWeights(read_header(bytes), bytes) {}

  PackedWeights(const PackedHeader& header, at::Tensor bytes)
      : tensor(std::move(bytes)),
        blocks(header.hidden, header.width),
        depth_x(padded_depth<G>(header.input_size)),
        depth_h(padded_depth<G>(header.hidden)),
        data(reinterpret_cast<const G*>(tensor.const_data_ptr<uint8_t>() + sizeof(PackedHeader))) {}

  static int64_t bytes(const PackedHeader& header) {
    const int64_t depth = padded_depth<G>(header.input_size) + padded_depth<G>(header.hidden);
    return static_cast<int64_t>(sizeof(PackedHeader)) +
           3 * header.hidden * depth * static_cast<int64_t>(sizeof(G));
  }

  const G* x(int64_t block) const { return data + 3 * blocks.begin(block) * (depth_x + depth_h); }
  const G* h(int64_t block) const { return x(block) + 3 * blocks.size(block) * depth_x; }

  at::Tensor tensor;
  Blocks blocks;
  int64_t depth_x, depth_h;
  const G* data;
};

// Weights (3H, H+I), in blocks for `parts` threads; for G float or BFloat16.
template <typename G>
PackedWeights<G> pack_weights(const at::Tensor& weights, int64_t parts);

// The same as a tensor of its own, for few rows, where that pays most; or, where
// there is no such form for the weights' dtype or on this CPU, a copy.
at::Tensor prepack(const at::Tensor& weights);

inline bool is_prepacked(const at::Tensor& weights) {
  return weights.scalar_type() == at::kByte;
}
// Whether these are for products of bfloat16.
inline bool has_narrow_blocks(const at::Tensor& packed) {
  return read_header(packed).operand == static_cast<int64_t>(at::kBFloat16);
}
// Whether prepacked weights, perhaps of another CPU, are those of a layer with
// the sizes and the dtype of `input` and `h_0`; throws if not.
void check_prepacked(const at::Tensor& weights, const at::Tensor& input, const at::Tensor& h_0);

// The weights (3H, H+I) again.
at::Tensor unpack(const at::Tensor& packed);

}  // namespace lltm::cpu
