// GEMMs on complete tensors.
#pragma once

#include "common/tensor_views.h"
#include "common/weights.h"
#include "cpu/bias.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/operands.h"

#include <ATen/core/Tensor.h>

#include <functional>

namespace lltm::cpu {

// For calls so short that views would be noticeable.
template <typename T>
WeightMatrices<T> read_weights(
    const at::Tensor& weight_ih, const at::Tensor& weight_hh, int64_t hidden) {
  const auto w = read<T>(weight_ih);
  if (weight_hh.defined()) return {w, read<T>(weight_hh)};
  return {w.from(0, hidden), w};
}

// Copies if rows overlap or are not contiguous.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// x.to(dtype), but without the dispatcher, which is noticeable in short calls, between float32 and
// 16 bits.
at::Tensor converted(const at::Tensor& x, at::ScalarType dtype);

// Weights that are packed for a format from `dtype`: packing widens 16-bit weights to float32.
at::Tensor as_packed_dtype(const at::Tensor& weights, at::ScalarType dtype);

// C (rows, N) = A B, with B (K, N) packed once. Rows are contiguous, of A in the format's Unpacked
// type, of C in any. False: out of range.
using PackedGemm = std::function<bool(const at::Tensor& out, const at::Tensor& a)>;
PackedGemm make_packed_gemm(GemmFormat format, const at::Tensor& b);

}  // namespace lltm::cpu
