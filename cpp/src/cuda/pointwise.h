// The pointwise part of a step on a GPU: what is left when the matrix products
// have given the pre-activations. Parameters of the kernels, and the functions
// that launch them.
//
// No header of ATen: pointwise.cu, which nvcc compiles, includes this file too.
#pragma once

#include "matrix.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cuda {

// The type that a storage type T is computed and accumulated in.
template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// `rows` rows of `hidden` units each. Where an argument is written, its columns
// are contiguous. c_next may be c; otherwise nothing that is written overlaps
// what is read.
template <typename T>
struct ForwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const compute_t<T>> gates;  // (rows, 3H), pre-activations less the bias
  Matrix<const T> bias;              // (3H) as a matrix of row stride 0; or absent
  Matrix<const T> c;                 // (rows, H)
  Matrix<T> h_next;                  // (rows, H)
  Matrix<T> h_state;                 // (rows, H), h_next once more; or absent
  Matrix<T> c_next;                  // (rows, H)
  Matrix<T> activations;             // (rows, 4H): i, o, g, tanh(c'); or absent
};

// S is the type of the gradients of the state: that of the tensors in a single
// step, and the compute type where they are carried from step to step. An
// absent gradient is zero. grad_c_prev may be grad_c.
template <typename T, typename S>
struct BackwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const T> activations;   // (rows, 4H)
  Matrix<const T> grad_h;        // (rows, H), or absent
  Matrix<const S> grad_h_state;  // (rows, H), added to grad_h; or absent
  Matrix<const S> grad_c;        // (rows, H), or absent
  Matrix<T> grad_gates;          // (rows, 3H)
  Matrix<S> grad_c_prev;         // (rows, H), or absent
};

// A cudaStream_t, whose type the engine does not know.
struct Stream {
  void* handle;
};

// The current stream of the current device. Asked for once in a call of an
// operator, since the question costs more than a launch; both must stay current.
Stream current_stream();

// Both queue one kernel on a stream of the current device, and return at once.
// With no rows or no units they do nothing.
template <typename T>
void launch_forward(const ForwardArgs<T>& args, Stream stream);
template <typename T, typename S>
void launch_backward(const BackwardArgs<T, S>& args, Stream stream);

}  // namespace lltm::cuda
