// Functions that are compiled once per instruction set, from the same sources: only raw pointers.
// ATen headers, or standard headers with inline functions, could link AVX-512 code into the
// baseline.
#pragma once

#include "cell/cells.h"
#include "common/matrix.h"
#include "cpu/kernel/bf16x3.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernel/int8.h"
#include "cpu/kernel/small_layer.h"

#include <cstdint>

namespace lltm::cpu {

// Tests also use these conversions.
template <typename T>
struct ArrayConvert {
  void (*load)(const T* x, float* y, std::int64_t n);
  void (*store)(const float* x, T* y, std::int64_t n);
};

// y (columns, rows) = x^T; rows are contiguous.
template <typename T>
using Transpose = void (*)(std::int64_t rows, std::int64_t columns, Matrix<const T> x, Matrix<T> y);

// Interleaves a and b (columns) into y (2 * columns). A null b is zero.
using PairRows = void (*)(std::int64_t columns, const BFloat16* a, const BFloat16* b, BFloat16* y);

// y ((columns + 1) / 2, 2 * rows) = x^T in pairs: a y row has two adjacent elements from each x row
// (rows, columns), or a zero after an odd last column. Rows are contiguous.
using PairColumns =
    void (*)(std::int64_t rows, std::int64_t columns, Matrix<const BFloat16> x, Matrix<BFloat16> y);

using SumRows = void (*)(std::int64_t rows, std::int64_t columns, Matrix<const float> x, float* y);

// For small_batch.h, which computes in float64, or in float32 if the cell `forgets`. Columns are
// contiguous.
struct SmallBatchArgs {
  const CellInfo* cell;
  std::int64_t hidden;  // units in the block
  std::int64_t layer_hidden;
  Matrix<const float> z;
  std::int64_t z_stride;
  const float *bias, *parameters;  // or null
  Matrix<double> c;                // updated in place
  Matrix<float> h_next;
  Matrix<float> saved;  // or null
};

using ForwardSmallBatch = void (*)(const SmallBatchArgs& args, std::int64_t rows);

// C (m, b.n) = A (m, b.k) B, or += if `accumulate`, with contiguous B. Sums of 32 products in
// float32 are accumulated in float64, or in float32 (`_f32`).
using GemmSmallBatch = Gemm<float>*;

// C (m, n) = A0 B0^T + A1 B1^T, or += if `accumulate`, for m at most 4. Reads B (n, k) in place;
// rows are contiguous. A part with k = 0 is omitted.
template <typename B>
struct InPlaceGemm {
  struct Term {
    Matrix<const float> a;
    Matrix<const B> b;
    std::int64_t k = 0;
  };
  Term terms[2];
  std::int64_t n;
  Matrix<float> c;
  bool accumulate;
};

// The same with row-major B and contiguous rows of A and C. Adds at most `longest_chain` products
// in one chain.
template <typename B>
using GemmF32 = void (*)(
    std::int64_t m,
    Matrix<const float> a,
    PackedB<const B> b,
    Matrix<float> c,
    std::int64_t longest_chain,
    bool accumulate);

template <typename B>
struct GemmsF32 {
  GemmF32<B> multiply;  // null for the x86 baseline: ATen's GEMMs are faster
  void (*multiply_transposed)(std::int64_t m, const InPlaceGemm<B>& gemm);
};

// The same in bfloat16 with float32 accumulation. B has VNNI layout. b.k and A's stride are even.
using GemmBf16 = Gemm<BFloat16>*;

struct CellKernels : Elementwise<double, double>,
                     Elementwise<float, float>,
                     Elementwise<Half, float>,
                     Elementwise<BFloat16, float>,
                     Elementwise<BFloat16, BFloat16>,
                     Elementwise<float, BFloat16>,
                     Elementwise<float, BFloat16x3>,  // null without AMX
                     Elementwise<Half, BFloat16x3>,
                     Elementwise<float, Int8>,  // inference
                     Elementwise<Half, Int8>,
                     Elementwise<BFloat16, Int8> {
  ForwardSmallBatch small_batch;
  RunSmallLayer small_layer;  // null for programs
};
template <typename T, typename G>
constexpr const Elementwise<T, G>& elementwise_of(const CellKernels& cell) {
  return cell;
}

struct Kernels : GemmsF32<float>, GemmsF32<Half>, GemmsF32<BFloat16> {
  const char* name;
  CellKernels cells[Cells::kKernels];  // by CellInfo::native
  Bf16x3Kernels bf16x3;                // null without AMX
  Int8Kernels int8;
  GemmBf16 gemm_bf16_operands;  // null below AVX-512, and on ARM without BF16
  Transpose<float> transpose_f32;
  Transpose<BFloat16> transpose_bf16;
  PairRows pair_rows_bf16;
  PairColumns pair_columns_bf16;
  SumRows sum_rows_f32;
  GemmSmallBatch gemm_small_batch, gemm_small_batch_f32;
  ArrayConvert<Half> convert_f16;
  ArrayConvert<BFloat16> convert_bf16;
  bool fast_bf16 = false;  // gemm_bf16_operands is faster than float32's GEMM
};
template <typename B>
constexpr const GemmsF32<B>& gemms_f32_of(const Kernels& kernels) {
  return kernels;
}

// Null if compiled without this instruction set.
const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_amx();
// Null if not compiled.
GemmBf16 kernels_bf16();

}  // namespace lltm::cpu
