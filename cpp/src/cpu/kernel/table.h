// Everything that is compiled once per instruction set, from the same sources
// (elementwise_kernels.h, program_kernels.h, gemm_kernels.h, few_rows_kernels.h, int8_kernels.h,
// amx_kernels.h).
//
// Those files see raw pointers only: no header of ATen or of the standard library with
// inline functions may reach them, or AVX-512 code could be linked into the baseline.
#pragma once

#include "cell/cells.h"
#include "common/matrix.h"
#include "cpu/kernel/bf16x3.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernel/int8.h"

#include <cstdint>

namespace lltm::cpu {

// Conversions of storage types over arrays, for tests too.
template <typename T>
struct ArrayConvert {
  void (*load)(const T* x, float* y, std::int64_t n);
  void (*store)(const float* x, T* y, std::int64_t n);
};

// y (columns, rows) = x^T for x (rows, columns); the rows of both are contiguous.
template <typename T>
using Transpose = void (*)(std::int64_t rows, std::int64_t columns, Matrix<const T> x, Matrix<T> y);

// y (2 columns) = a and b (columns), element by element in turn; without b, zeros.
using PairRows = void (*)(std::int64_t columns, const BFloat16* a, const BFloat16* b, BFloat16* y);

// y ((columns + 1) / 2, 2 rows) = x^T for x (rows, columns), in pairs: a row of y has two
// neighbouring elements of each row of x. An odd last column is paired with zeros. The rows of both
// are contiguous.
using PairColumns =
    void (*)(std::int64_t rows, std::int64_t columns, Matrix<const BFloat16> x, Matrix<BFloat16> y);

// y (columns) = the sum of the rows of x (rows, columns).
using SumRows = void (*)(std::int64_t rows, std::int64_t columns, Matrix<const float> x, float* y);

// The element-wise part of a step in few_rows.cpp, in float64; what is stored for the caller is
// float32. Columns are contiguous.
struct FewRowsArgs {
  const CellInfo* cell;
  std::int64_t hidden;  // units of a block
  std::int64_t layer_hidden;
  Matrix<const float> gates;
  std::int64_t gates_step;
  const float *bias, *parameters;  // or null
  Matrix<double> c;                // in place
  Matrix<float> h_next;
  Matrix<float> activations;  // or absent
};

using ForwardFewRows = void (*)(const FewRowsArgs& args, std::int64_t rows);

// C (m, b.n) = A (m, b.k) B, or += where `accumulate`, with B contiguous. Sums are float64, of sums
// of 32 products in float32.
using GemmFewRows = Gemm<float>*;

// C (m, n) = A0 B0^T + A1 B1^T, or +=, for m up to 4, with B (n, k) as they lie: their rows and
// those of A are contiguous. A part may be absent, with k = 0.
template <typename B>
struct InPlaceGemm {
  struct Part {
    Matrix<const float> a;
    Matrix<const B> b;
    std::int64_t k = 0;
  };
  Part parts[2];
  std::int64_t n;
  Matrix<float> c;
  bool accumulate;
};

// C (m, b.n) = A (m, b.k) B, or += where `accumulate`; B row by row, the rows of A and C
// contiguous. At most `longest_chain` products are added one after another.
template <typename B>
using GemmF32 = void (*)(
    std::int64_t m,
    Matrix<const float> a,
    PackedB<const B> b,
    Matrix<float> c,
    std::int64_t longest_chain,
    bool accumulate);

// float32 GEMMs whose B is of a storage type, and is widened as it is read.
template <typename B>
struct GemmsF32 {
  GemmF32<B> multiply;  // null for the baseline of x86, where ATen's GEMMs of all rows are faster
  void (*multiply_transposed)(std::int64_t m, const InPlaceGemm<B>& gemm);
};

// C (m, b.n) = A (m, b.k) B, or += where `accumulate`, in bfloat16 with sums in float32. B in VNNI
// layout, pairs of rows interleaved; b.k and the stride of A are even, the rows of A and C
// contiguous.
using GemmBf16 = Gemm<BFloat16>*;

// The element-wise part of a cell: elementwise_of() chooses by the types.
struct CellKernels : Elementwise<double, double>,
                     Elementwise<float, float>,
                     Elementwise<Half, float>,
                     Elementwise<BFloat16, float>,
                     Elementwise<BFloat16, BFloat16>,
                     Elementwise<float, BFloat16>,
                     Elementwise<float, BFloat16x3>,  // null where there is no matrix unit
                     Elementwise<Half, BFloat16x3>,
                     Elementwise<float, Int8>,  // inference: no backward
                     Elementwise<Half, Int8>,
                     Elementwise<BFloat16, Int8> {
  ForwardFewRows few_rows;
};
template <typename T, typename G>
constexpr const Elementwise<T, G>& elementwise_of(const CellKernels& cell) {
  return cell;
}

// Everything compiled for one instruction set; gemms_f32_of() chooses by the type of B.
struct Kernels : GemmsF32<float>, GemmsF32<Half>, GemmsF32<BFloat16> {
  const char* name;
  CellKernels cells[kProgramId + 1];  // by id; last those of cells that users have written
  Bf16x3Kernels bf16x3;               // null where there is no matrix unit
  Int8Kernels int8;
  GemmBf16 gemm_bf16_operands;  // null below AVX512
  Transpose<float> transpose_f32;
  Transpose<BFloat16> transpose_bf16;
  PairRows pair_rows_bf16;
  PairColumns pair_columns_bf16;
  SumRows sum_rows_f32;
  GemmFewRows gemm_few_rows;
  ArrayConvert<Half> convert_f16;
  ArrayConvert<BFloat16> convert_bf16;
};
template <typename B>
constexpr const GemmsF32<B>& gemms_f32_of(const Kernels& kernels) {
  return kernels;
}

// Null where the compiler was not told to use that instruction set.
const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_amx();
// The GEMM of bfloat16 for a CPU that has AVX-512 and BF16; null likewise.
GemmBf16 kernels_bf16();

}  // namespace lltm::cpu
