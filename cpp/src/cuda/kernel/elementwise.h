// Arguments of the element-wise kernels. No ATen header: NVRTC compiles the arguments.
#pragma once

#include "common/matrix.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cuda {

// A kind of value of a stage (program.h), `block_stride` elements from one index to the next.
template <typename T>
struct StageMatrix {
  T* data = nullptr;  // null: inputs are zero, and outputs are not stored
  std::int64_t row_stride = 0, col_stride = 0, block_stride = 0;
  bool is_wide = false;  // rows of blocks support 16-byte accesses
};

// T of the tensors, V of computation, D of the gradients of states: T in a single step, V between
// steps. Written matrices have contiguous columns. next_states may be states; other outputs do not
// overlap inputs.
template <typename T, typename D, bool kBackward>
struct StageArgs {
  using V = compute_t<T>;
  using Gate = std::conditional_t<kBackward, T, V>;
  using State = std::conditional_t<kBackward, D, T>;
  using Operand = std::conditional_t<kBackward, V, T>;

  std::int64_t hidden = 0;
  StageMatrix<Gate> gates;  // pre-activations; backward: their gradients, then of parameters
  // Forward: added to pre-activations. After the biases, bias_ih has the parameters.
  StageMatrix<const T> bias_ih, bias_hh;
  StageMatrix<State> states, next_states;  // backward: gradients of c', of c
  StageMatrix<T> h;                        // h', or its gradient
  // Forward: h' is also stored for the next GEMM and, if the cell reads h, as a state. Backward:
  // their gradients are added to that of h'.
  StageMatrix<State> h_of_gemm;
  StageMatrix<T> saved;
  StageMatrix<Operand> operands;
  StageMatrix<V> means, terms, kept;  // `terms` are averaged
};

// A cudaStream_t, for code without CUDA headers.
struct Stream {
  void* handle;
};

// The current device's; makes its context current. All must stay current. Costs more than a launch:
// once per operator.
Stream current_stream();

}  // namespace lltm::cuda
