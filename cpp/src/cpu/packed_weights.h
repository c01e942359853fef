// The weights of a layer and direction as the blocked engine's forward pass reads
// them: laid out in every call, or once for all (prepack).
#pragma once

#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace lltm::cpu {

// Packed weights are a tensor of bytes: this header, then for each block of
// hidden units the rows that multiply the input and those that multiply the
// state, the columns being the block's units gate by gate. Those that are made
// ahead may have two forms, one after the other: for few rows and for many.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x324B4341504D544C;  // LTMPACK2
  int64_t magic;
  int64_t dtype;    // of the weights, an at::ScalarType
  int64_t operand;  // of the products' operands, kOperandTag
  int64_t hidden, input_size, width;
  int64_t split_at;  // where the form for BFloat16x3 begins, in bytes, or 0
  int64_t checksum;  // of all the other bytes, in weights that are made ahead; else 0
};
// What follows is aligned as the tensor is.
static_assert(sizeof(PackedHeader) == 64);

template <typename G>
constexpr auto kOperandTag = static_cast<int64_t>(kOperandDtype<G>);
template <>
inline constexpr int64_t kOperandTag<BFloat16x3> = 3000;  // no dtype

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
           3 * padded_columns<G>(header.hidden) * depth * static_cast<int64_t>(sizeof(G));
  }

  const G* x(int64_t block) const { return data + 3 * blocks.begin(block) * (depth_x + depth_h); }
  const G* h(int64_t block) const { return x(block) + columns(block) * depth_x; }
  // Of the product: the gates one after the other, each of gate_columns.
  int64_t columns(int64_t block) const { return 3 * gate_columns(block); }
  int64_t gate_columns(int64_t block) const { return padded_columns<G>(blocks.size(block)); }

  at::Tensor tensor;
  Blocks blocks;
  int64_t depth_x, depth_h;
  const G* data;
};

// Weights (3H, H+I), in blocks for `parts` threads.
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
  return read_header(packed).operand == kOperandTag<BFloat16>;
}
// Whether these have a form for products of BFloat16x3 too.
inline bool has_split_blocks(const at::Tensor& packed) {
  return read_header(packed).split_at != 0;
}
// Whether prepacked weights, perhaps of another CPU, are those of a layer with
// the sizes and the dtype of `input` and `h_0`, with the bytes that prepack gave
// them; throws if not. The bytes are read once for each state of a tensor.
void check_prepacked(const at::Tensor& weights, const at::Tensor& input, const at::Tensor& h_0);

// Prepacked weights in their form for G.
template <typename G>
PackedWeights<G> read_packed(const at::Tensor& packed) {
  return PackedWeights<G>(
      kOperandTag<G> == kOperandTag<BFloat16x3> ? packed.slice(0, read_header(packed).split_at)
                                                : packed);
}

// The weights (3H, H+I) again.
at::Tensor unpack(const at::Tensor& packed);

}  // namespace lltm::cpu
