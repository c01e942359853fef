// Arguments of the element-wise kernels. No ATen header: NVRTC compiles the arguments.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"

#include <cstdint>

namespace lltm::cuda {

// H = `hidden` units, G gates, S pre-activations, K states, P parameters, A saved values (cell.h).
// Built-in cells have K = 1 and P = 0. Written matrices have contiguous columns. c_next may be c;
// other outputs do not overlap inputs.
template <typename T>
struct ForwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const compute_t<T>> gates;  // (rows, S * H), without biases
  Matrix<const T> bias_ih;           // (G * H), row stride 0; or null
  Matrix<const T> bias_hh;           // (G * H), row stride 0; or null
  Matrix<const T> parameters;        // (P * H), row stride 0; or null
  Matrix<const T> c;                 // (rows, K * H)
  Matrix<T> h_next;                  // (rows, H)
  Matrix<T> h_operand;               // (rows, H), for the next GEMM; or null
  Matrix<T> c_next;                  // (rows, K * H)
  Matrix<T> activations;             // (rows, A * H); or null
};

// D: state gradients, T in a single step, the compute type between steps. Null gradients are zero.
// grad_c_prev may be grad_c.
template <typename T, typename D>
struct BackwardArgs {
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  Matrix<const T> activations;   // (rows, A * H)
  Matrix<const T> parameters;    // (P * H), row stride 0; or null
  Matrix<const T> grad_h;        // (rows, H), or null
  Matrix<const D> grad_h_state;  // (rows, H), added to grad_h; or null
  Matrix<const D> grad_c;        // (rows, K * H), or null
  Matrix<T> grad_gates;          // (rows, (S + P) * H): pre-activations, then parameters
  Matrix<D> grad_c_prev;         // (rows, K * H), or null
};

// A value of a stage. The element type is known to the kernel (value_type of program_source.h).
struct StagePort {
  void* data;  // null: an input that is zero, or an output that is not stored
  std::int64_t row_stride, col_stride;
};
template <int kPorts = Program::kMostRegisters>
struct StageArgs {
  std::int64_t hidden;
  // Forward: added to pre-activations.
  StagePort bias_ih, bias_hh;
  // Forward: h' is also stored for the next GEMM and, if the cell reads h, as a state. Backward:
  // their gradients are added to that of h'.
  StagePort h_of_gemm, h_of_state;
  // Inputs, then outputs, in the order of the stage's ports. A kernel declares only its own.
  StagePort ports[kPorts];
};
// The driver's limit for a kernel's arguments.
static_assert(sizeof(StageArgs<>) + 2 * sizeof(std::int64_t) <= 4096);

// A cudaStream_t, for code without CUDA headers.
struct Stream {
  void* handle;
};

// The current device's; makes its context current. All must stay current. Costs more than a launch:
// once per operator.
Stream current_stream();

}  // namespace lltm::cuda
