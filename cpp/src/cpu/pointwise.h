// The pointwise part of a step on the CPU: what is left when the matrix
// product has given the pre-activations.
//
// The kernels are compiled once per instruction set, from the same source
// (pointwise_kernels.h), and see raw pointers only: no header of ATen or of
// the standard library with inline functions may reach those files, or AVX-512
// code could be linked into the baseline.
#pragma once

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

// A matrix in memory; strides in elements, any value. Null data: absent.
template <typename T>
struct Matrix {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  T* row(std::int64_t r) const { return data + r * row_stride; }
  Matrix from_row(std::int64_t r) const {
    return {data == nullptr ? nullptr : row(r), row_stride, col_stride};
  }
};

// Where an argument is written, its columns are contiguous. c_next may be c.
template <typename T>
struct ForwardArgs {
  std::int64_t hidden = 0;
  Matrix<const compute_t<T>> gates;  // (rows, 3H) pre-activations i | o | g
  Matrix<const T> c;                 // (rows, H)
  Matrix<T> h_next;                  // (rows, H)
  Matrix<compute_t<T>> h_state;      // (rows, H) h_next as the next product reads it, or absent
  Matrix<T> c_next;                  // (rows, H)
  Matrix<T> activations;             // (rows, 4H) i | o | g | tanh(c'), or absent
};

// grad_c_prev may be grad_c. An absent gradient is zero.
template <typename T>
struct BackwardArgs {
  std::int64_t hidden = 0;
  Matrix<const T> activations;           // (rows, 4H)
  Matrix<const T> grad_h;                // (rows, H), or absent
  Matrix<const compute_t<T>> grad_h_state;  // (rows, H) added to grad_h, or absent
  Matrix<const compute_t<T>> grad_c;     // (rows, H), or absent
  Matrix<compute_t<T>> grad_gates;       // (rows, 3H)
  Matrix<compute_t<T>> grad_c_prev;      // (rows, H)
};

// Both work on elements [begin, end) of the (rows, H) elements in row order, so
// that work can be shared out for one long row as well as for many short ones.
template <typename T>
struct Pointwise {
  void (*forward)(const ForwardArgs<T>& args, std::int64_t begin, std::int64_t end);
  void (*backward)(const BackwardArgs<T>& args, std::int64_t begin, std::int64_t end);
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

// Everything compiled for one instruction set.
struct Kernels {
  const char* name;
  Pointwise<double> f64;
  Pointwise<float> f32;
  Pointwise<Half> f16;
  Pointwise<BFloat16> bf16;
  ArrayMath<double> math_f64;
  ArrayMath<float> math_f32;
  ArrayConvert<Half> convert_f16;
  ArrayConvert<BFloat16> convert_bf16;
};

// Null where the compiler was not told to use that instruction set.
const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

template <typename T>
const Pointwise<T>& pointwise(const Kernels& kernels);
template <>
inline const Pointwise<double>& pointwise<double>(const Kernels& kernels) {
  return kernels.f64;
}
template <>
inline const Pointwise<float>& pointwise<float>(const Kernels& kernels) {
  return kernels.f32;
}
template <>
inline const Pointwise<Half>& pointwise<Half>(const Kernels& kernels) {
  return kernels.f16;
}
template <>
inline const Pointwise<BFloat16>& pointwise<BFloat16>(const Kernels& kernels) {
  return kernels.bf16;
}

}  // namespace lltm::cpu
