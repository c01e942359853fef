// Large matrix products of float32 or bfloat16 rows: by the micro-kernel where
// that is the faster way, else by public ATen.
#pragma once

#include <ATen/core/Tensor.h>

namespace lltm::cpu {

// a b for a (rows, K) and b (K, N); of their dtype.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

// out (M, N) = a^T b for a (rows, M) and b (rows, N), or += if accumulate.
void transposed_product(
    at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// x^T as a contiguous tensor.
at::Tensor transposed(const at::Tensor& x);

}  // namespace lltm::cpu
