// The weights of tensors, in place and packed in advance.
#pragma once

#include "common/operator_args.h"
#include "common/weights.h"
#include "cpu/packed_weights.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace lltm::cpu {

inline bool packs_heads(const at::Tensor& weight_hh) {
  return has_heads(weight_hh) && weight_hh.size(2) % kHeadAlign == 0;
}
inline int64_t packed_heads_of(const at::Tensor& weight_hh) {
  return packs_heads(weight_hh) ? heads_of(weight_hh) : 1;
}

// `views` refer to the caller's tensors, or to copies if rows are not contiguous or, to be packed,
// not of a dtype that a format packs (as_packed_dtype).
struct WeightTensors {
  WeightTensors(
      const CellInfo& cell,
      const at::Tensor& weight_ih,
      const at::Tensor& weight_hh,
      std::optional<at::ScalarType> packed_dtype);

  at::Tensor ih, hh;
  WeightViews views;
};

// Bytes as of packed_weights.h or, without a packed format for the dtype and CPU, a copy of the
// concatenated matrix. With dtype qint8, quantizes (int8.h).
at::Tensor prepack(
    const CellInfo& cell,
    const at::Tensor& weight_ih,
    const at::Tensor& weight_hh,
    std::optional<at::ScalarType> dtype);

inline PackedBytes bytes_of(const at::Tensor& packed) {
  return std::as_bytes(
      std::span(packed.const_data_ptr<uint8_t>(), static_cast<size_t>(packed.numel())));
}

// Throws if header or size does not match the cell (is_whole).
void check_prepacked(const char* op, const CellInfo& cell, const at::Tensor& packed);
// Also checks sizes and dtype.
void check_prepacked(const SequenceArgs& args);

// Bytes from a file may lack the kernels' alignment.
at::Tensor aligned(const at::Tensor& packed);

// int8 is dequantized to float32; quantizing again gives bitwise identical bytes and scales.
Weights unpack(const CellInfo& cell, const at::Tensor& packed);

}  // namespace lltm::cpu
