// Large matrix products of float32 or bfloat16 rows: by the micro-kernel where
// that is the faster way, else by public ATen.
#pragma once

#include <ATen/core/Tensor.h>

namespace lltm::cpu {

// out (rows, N) = a b for a (rows, K) and b (K, N), all of one dtype.
void product(at::Tensor out, const at::Tensor& a, const at::Tensor& b);

// out (M, N) = a^T b for a (rows, M) and b (rows, N), or += if accumulate. Rows
// may be summed up over several calls: for bfloat16 arguments, out is float32.
void transposed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// x^T as a contiguous tensor.
at::Tensor transposed(const at::Tensor& x);

}  // namespace lltm::cpu
