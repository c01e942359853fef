// The element-wise part of a step on a GPU, which follows the GEMMs: arguments of the
// kernels, and the functions that launch them.
//
// No header of ATen: elementwise.cu, which nvcc compiles, includes this file too.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"

#include <cstdint>

namespace lltm::cuda {

// `rows` rows of H = `hidden` units, with G gates, S slots, K states, P parameters and A saved
// values (cell.h). c is what engines call c; of the library's own cells K is 1 and P is 0.
//
// Arguments that are written have contiguous columns. c_next may be c; otherwise they do not
// overlap those that are read.
template <typename T>
struct ForwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const compute_t<T>> gates;  // (rows, S * H), pre-activations less the biases
  Matrix<const T> bias_ih;           // (G * H) with row stride 0; or absent
  Matrix<const T> bias_hh;           // the same
  Matrix<const T> parameters;        // (P * H) with row stride 0; or absent
  Matrix<const T> c;                 // (rows, K * H)
  Matrix<T> h_next;                  // (rows, H)
  Matrix<T> h_operand;               // (rows, H), h_next once more, for the next GEMM; or absent
  Matrix<T> c_next;                  // (rows, K * H)
  Matrix<T> activations;             // (rows, A * H); or absent
};

// D is the type of the gradients of the state: T in a single step, and the compute type
// where they are carried from step to step. An absent gradient is zero. grad_c_prev may be
// grad_c.
template <typename T, typename D>
struct BackwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const T> activations;   // (rows, A * H)
  Matrix<const T> parameters;    // (P * H) with row stride 0; or absent
  Matrix<const T> grad_h;        // (rows, H), or absent
  Matrix<const D> grad_h_state;  // (rows, H), added to grad_h; or absent
  Matrix<const D> grad_c;        // (rows, K * H), or absent
  Matrix<T> grad_gates;          // (rows, (S + P) * H): of the gates, then of the parameters
  Matrix<D> grad_c_prev;         // (rows, K * H), or absent
};

// A cudaStream_t, for code that sees no CUDA header.
struct Stream {
  void* handle;
};

// The current stream of the current device; both must stay current. Fetched once per
// operator call, because fetching it costs more than a launch.
Stream current_stream();

// Both queue one kernel of the cell on a stream of the current device and return immediately.
// With no rows or no units they do nothing.
template <typename T>
void launch_forward(const CellInfo& cell, const ForwardArgs<T>& args, Stream stream);
template <typename T, typename D>
void launch_backward(const CellInfo& cell, const BackwardArgs<T, D>& args, Stream stream);

}  // namespace lltm::cuda
