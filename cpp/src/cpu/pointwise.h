// The pointwise part of a step on the CPU: what is left when the matrix
// product has given the pre-activations. And what else is worth vector code.
//
// The kernels are compiled once per instruction set, from the same source
// (pointwise_kernels.h), and see raw pointers only: no header of ATen or of
// the standard library with inline functions may reach those files, or AVX-512
// code could be linked into the baseline.
#pragma once

#include "cpu/split.h"
#include "matrix.h"

#include <cstdint>

namespace lltm::cpu {

// Storage of the 16-bit formats, as c10::Half and c10::BFloat16 lay them out.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The type that a storage type T is computed and accumulated in.
template <typename T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <typename T>
using compute_t = typename Compute<T>::type;

// The type that results are stored in for products with operands of type G.
template <typename G>
struct Stored {
  using type = G;
};
template <>
struct Stored<BFloat16x3> {
  using type = float;
};
template <typename G>
using stored_t = typename Stored<G>::type;

// In what follows T is the storage type of the tensors and G that of the matrix
// products' operands: T itself; float, where 16-bit products are not to be had;
// or BFloat16x3 in the place of float, where that is faster. One call covers some hidden
// units, `hidden` of them: all, or a block. For BFloat16x3, whole rows of them.
//
// Where an argument is written, its columns are contiguous. c_next may be c.
template <typename T, typename G>
struct ForwardArgs {
  std::int64_t hidden = 0;
  Matrix<const compute_t<T>> gates;  // pre-activations, less the bias; from the input gate's on
  std::int64_t gates_step = 0;       // columns from one gate to the next
  Matrix<const compute_t<T>> bias;   // as gates, row stride 0; or absent
  std::int64_t bias_step = 0;
  Matrix<const T> c;
  Matrix<T> h_next;
  Matrix<G> h_operand;  // h_next once more, as the next product reads it; or absent
  Matrix<T> c_next;
  Matrix<T> activations;  // i, o, g, tanh(c'); or absent
  std::int64_t activations_step = 0;
};

// grad_c_prev may be grad_c. An absent gradient is zero.
template <typename T, typename G>
struct BackwardArgs {
  std::int64_t hidden = 0;
  Matrix<const T> activations;
  std::int64_t activations_step = 0;
  Matrix<const T> grad_h;                   // or absent
  Matrix<const compute_t<T>> grad_h_state;  // added to grad_h, or absent
  Matrix<const compute_t<T>> grad_c;        // or absent
  Matrix<stored_t<G>> grad_gates;
  std::int64_t grad_gates_step = 0;
  Matrix<compute_t<T>> grad_c_prev;
  Matrix<G> operand;  // for BFloat16x3: grad_gates once more, as the next product reads it
  std::int64_t operand_step = 0;
  bool* unsplittable = nullptr;  // set where that cannot be written (split.h)
};

// Both work on elements [begin, end) of the (rows, hidden) elements in row
// order, so that work can be shared out for one long row as well as for many
// short ones.
template <typename T, typename G>
struct Pointwise {
  void (*forward)(const ForwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
  void (*backward)(const BackwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
};

// cell_math.h over arrays, for the tests that measure its errors.
template <typename T>
struct ArrayMath {
  using Function = void (*)(const T* x, T* y, std::int64_t n);
  Function exp_nonpositive, expm1_nonpositive, sigmoid, tanh, elu;
};

// Storage conversions over arrays, likewise.
template <typename T>
struct ArrayConvert {
  void (*load)(const T* x, float* y, std::int64_t n);
  void (*store)(const float* x, T* y, std::int64_t n);
};

// y (columns, rows) = x^T for x (rows, columns).
template <typename T>
using Transpose = void (*)(
    std::int64_t rows,
    std::int64_t columns,
    const T* x,
    std::int64_t x_stride,
    T* y,
    std::int64_t y_stride);

// y (2 columns) = a and b (columns), element by element in turn; without b, zeros.
using PairRows = void (*)(std::int64_t columns, const BFloat16* a, const BFloat16* b, BFloat16* y);

// y (columns) = the sum of the rows of x (rows, columns).
using SumRows = void (*)(
    std::int64_t rows, std::int64_t columns, const float* x, std::int64_t x_stride, float* y);

// The pointwise part of a step of few rows: pre-activations and state are float64,
// what is stored for the caller float32 (engine_few_rows.cpp). Columns are
// contiguous.
struct FewRowsArgs {
  std::int64_t hidden;  // units of a block
  Matrix<const double> gates;
  std::int64_t gates_step;
  const float* bias;  // as gates, or null
  std::int64_t bias_step;
  Matrix<double> c;  // renewed
  Matrix<double> h;  // for the next product; or absent
  Matrix<float> h_next;
  Matrix<float> activations;  // or absent
  std::int64_t activations_step;
};

// C (rows, columns) = A (rows, depth) B (depth, columns), or += if accumulate. The
// rows of B lie next to each other, and so do those of C. With a double A every
// product is exact; with a float A a few are added up in float at a time.
template <typename A>
using MultiplyFewRows = void (*)(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const A* a,
    std::int64_t lda,
    const float* b,
    double* c,
    bool accumulate);

struct FewRowsKernels {
  MultiplyFewRows<double> multiply_f64;
  MultiplyFewRows<float> multiply_f32;
  void (*forward)(const FewRowsArgs& args, std::int64_t rows);
};

// Everything compiled for one instruction set.
struct Kernels {
  const char* name;
  Pointwise<double, double> f64;
  Pointwise<float, float> f32;
  Pointwise<Half, float> f16;
  Pointwise<BFloat16, float> bf16;
  Pointwise<BFloat16, BFloat16> bf16_operands;
  Pointwise<float, BFloat16x3> f32_split;  // null where there is no matrix unit
  Pointwise<Half, BFloat16x3> f16_split;
  SplitKernels split;  // likewise
  Transpose<float> transpose_f32;
  Transpose<BFloat16> transpose_bf16;
  PairRows pair_rows_bf16;
  SumRows sum_rows_f32;
  FewRowsKernels few_rows;
  ArrayMath<double> math_f64;
  ArrayMath<float> math_f32;
  ArrayConvert<Half> convert_f16;
  ArrayConvert<BFloat16> convert_bf16;
};

// Null where the compiler was not told to use that instruction set.
const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_amx();

template <typename T, typename G>
constexpr Pointwise<T, G> Kernels::* kPointwise = nullptr;
template <>
constexpr auto kPointwise<double, double> = &Kernels::f64;
template <>
constexpr auto kPointwise<float, float> = &Kernels::f32;
template <>
constexpr auto kPointwise<Half, float> = &Kernels::f16;
template <>
constexpr auto kPointwise<BFloat16, float> = &Kernels::bf16;
template <>
constexpr auto kPointwise<BFloat16, BFloat16> = &Kernels::bf16_operands;
template <>
constexpr auto kPointwise<float, BFloat16x3> = &Kernels::f32_split;
template <>
constexpr auto kPointwise<Half, BFloat16x3> = &Kernels::f16_split;

}  // namespace lltm::cpu
