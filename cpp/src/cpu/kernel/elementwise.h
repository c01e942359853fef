#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "cpu/kernel/bf16x3.h"
#include "cpu/kernel/int8.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cpu {

// Laid out as c10::Half and c10::BFloat16.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// A mean's terms are added in this order on any number of threads.
constexpr std::int64_t kUnitsPerSum = 16;

template <typename G>
using source_t =
    std::conditional_t<std::is_same_v<G, BFloat16x3> || std::is_same_v<G, Int8>, float, G>;

// Between the stages of a step (program.h). C: compute type.
template <typename C>
struct StageMemory {
  const Stage* stage = nullptr;
  Matrix<C> kept;
  std::int64_t kept_stride = 0;  // columns between kept values
  Matrix<const C> means;         // (rows, means)
  Matrix<double> sums;           // (rows, means * sums_stride), of the terms of kUnitsPerSum units
  std::int64_t sums_stride = 0;
  std::int64_t unit = 0;  // the first

  StageMemory from(std::int64_t row, std::int64_t units) const {
    StageMemory part = *this;
    part.kept = kept.from(row, units);
    part.means = means.from(row);
    part.sums = sums.from(row, units / kUnitsPerSum);
    part.unit += units;
    return part;
  }
};

// T: storage type. G: GEMM operand type: T, float (if T has no GEMM), or BFloat16x3 or Int8 instead
// of float. A call covers `hidden` units: all, a block, or, for BFloat16x3, complete rows. Blocks
// of H columns are `layer_hidden` columns apart unless stated otherwise.
//
// Written matrices have contiguous columns. c_next may be c.
template <typename T, typename G>
struct ForwardArgs {
  const CellInfo* cell = nullptr;
  std::int64_t hidden = 0;
  std::int64_t layer_hidden = 0;
  Matrix<const compute_t<T>> z;           // pre-activations without bias
  std::int64_t z_stride = 0;              // columns between pre-activations
  bool z_padded = false;                  // 15 more columns are readable
  Matrix<const compute_t<T>> bias;        // per pre-activation, row stride 0; or null
  Matrix<const compute_t<T>> parameters;  // row stride 0; or null
  Matrix<const T> c;
  Matrix<T> h_next;
  Matrix<G> h_operand;             // h_next for the next GEMM; or null
  Matrix<const T> recurrent_mask;  // multiplied into h_operand; or null
  Matrix<bool> out_of_range;       // set for rows that cannot be packed (bf16x3.h, int8.h)
  Matrix<T> c_next;
  Matrix<T> saved;                                    // saved for backward (cell.h); or null
  const StageMemory<compute_t<T>>* stages = nullptr;  // null for cells without stages
  const Matrix<G>* operands = nullptr;                // of products
};

// grad_c_prev may be grad_c. A null gradient is zero.
template <typename T, typename G>
struct BackwardArgs {
  const CellInfo* cell = nullptr;
  std::int64_t hidden = 0;
  std::int64_t layer_hidden = 0;
  Matrix<const T> saved;
  Matrix<const compute_t<T>> parameters;    // row stride 0; or null
  Matrix<const T> grad_h;                   // or null
  Matrix<const compute_t<T>> grad_h_state;  // added to grad_h; or null
  Matrix<const compute_t<T>> grad_c;        // or null
  Matrix<source_t<G>> dz;                   // per pre-activation, then per parameter, or instead:
  double* parameter_sums = nullptr;         // adds the gradients of parameters over the rows
  Matrix<compute_t<T>> grad_c_prev;
  Matrix<G> operand;  // dz without parameters, for the next GEMM; or null
  std::int64_t operand_stride = 0;
  bool* out_of_range = nullptr;  // set if a value cannot be packed
  const StageMemory<compute_t<T>>* stages = nullptr;
  Matrix<const compute_t<T>> grad_operands;  // of products, in the order of operands
  std::int64_t after_rows = 0;  // rows from the last row to the first of the next step, to prefetch
};

// Elements [begin, end) in row order: threads can divide a long row or many short rows.
template <typename T, typename G>
struct Elementwise {
  void (*forward)(const ForwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
  void (*backward)(const BackwardArgs<T, G>& args, std::int64_t begin, std::int64_t end);
};

}  // namespace lltm::cpu
