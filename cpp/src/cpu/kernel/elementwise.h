// The element-wise part of a step on the CPU: what is left when the GEMMs have given the
// pre-activations. Parameters of the kernels in elementwise_kernels.h.
//
// Part of the files per instruction set: no header of torch.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "cpu/kernel/bf16x3.h"
#include "cpu/kernel/int8.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cpu {

// Storage of the 16-bit formats, as c10::Half and c10::BFloat16 lay them out.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The type that elements of a GEMM operand of type G are packed from.
template <typename G>
using source_t =
    std::conditional_t<std::is_same_v<G, BFloat16x3> || std::is_same_v<G, Int8>, float, G>;

// T is the storage type of the tensors, G that of the GEMM operands: T itself; float, where
// there is no GEMM of T; or BFloat16x3 or Int8 in the place of float. A call covers `hidden` units:
// all of them, or a block; of BFloat16x3, whole rows. What has several blocks of H columns has the
// first unit of each `layer_hidden` columns after that of the one before, unless said.
//
// Arguments that are written have contiguous columns. c_next may be c.
template <typename T, typename G>
struct ForwardArgs {
  const CellInfo* cell = nullptr;
  std::int64_t hidden = 0;
  std::int64_t layer_hidden = 0;
  Matrix<const compute_t<T>> gates;       // pre-activations less the bias, from the first slot on
  std::int64_t gates_step = 0;            // columns from one slot to the next
  bool gates_padded = false;              // 15 columns more may be read, whatever they hold
  Matrix<const compute_t<T>> bias;        // of each slot, row stride 0; or absent
  Matrix<const compute_t<T>> parameters;  // of the cell, row stride 0; or absent
  Matrix<const T> c;
  Matrix<T> h_next;
  Matrix<G> h_operand;        // h_next once more, packed for the next GEMM; or absent
  Matrix<const T> h_factor;   // that is multiplied by this; or absent
  Matrix<bool> out_of_range;  // set in rows with a value that cannot be packed (bf16x3.h, int8.h)
  Matrix<T> c_next;
  Matrix<T> activations;  // what backward needs (cell.h); or absent
};

// grad_c_prev may be grad_c. An absent gradient is zero.
template <typename T, typename G>
struct BackwardArgs {
  const CellInfo* cell = nullptr;
  std::int64_t hidden = 0;
  std::int64_t layer_hidden = 0;
  Matrix<const T> activations;
  Matrix<const compute_t<T>> parameters;    // of the cell, row stride 0; or absent
  Matrix<const T> grad_h;                   // or absent
  Matrix<const compute_t<T>> grad_h_state;  // added to grad_h, or absent
  Matrix<const compute_t<T>> grad_c;        // or absent
  Matrix<source_t<G>> grad_gates;           // of each slot, then of each parameter
  Matrix<compute_t<T>> grad_c_prev;
  Matrix<G> operand;  // that of slots once more, packed for the next GEMM; or absent
  std::int64_t operand_step = 0;
  bool* out_of_range = nullptr;  // set where a value cannot be packed
};

// Both work on elements [begin, end) of the (rows, hidden) elements in row order, so that
// one long row can be divided among threads as well as many short ones.
template <typename T, typename G>
struct Elementwise {
  void (*forward)(const ForwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
  void (*backward)(const BackwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
};

}  // namespace lltm::cpu
