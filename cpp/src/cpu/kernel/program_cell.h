// Element-wise kernels for cell programs. Outputs can alias inputs (c_next can be c): states pass
// through buffers.
#pragma once

#include "cpu/kernel/elementwise_kernels.h"
#include "cpu/kernel/program_kernels.h"

#include <cstdint>
#include <type_traits>

namespace lltm::cpu {
namespace {

// Pieces with n units: the first at (row, col), the next `row_step` rows below or `col_stride`
// columns to the right.
struct Segment {
  std::int64_t row, col, pieces, n, row_step, col_stride;

  LLTM_CELL_INLINE std::int64_t row_of(std::int64_t p) const { return row + p * row_step; }
  LLTM_CELL_INLINE std::int64_t col_of(std::int64_t p) const { return col + p * col_stride; }
  LLTM_CELL_INLINE std::int64_t step(std::int64_t row_stride) const {
    return row_step * row_stride + col_stride;
  }
};

// Pieces per part, for this many elements in a matrix with `hidden` columns.
LLTM_CELL_INLINE std::int64_t most_pieces(std::int64_t hidden, std::int64_t elements) {
  const std::int64_t rows = elements / hidden;
  return rows > 1 ? rows : pieces_of(elements);
}

// Balances the last two parts.
LLTM_CELL_INLINE std::int64_t rows_of_segment(std::int64_t left, std::int64_t most) {
  return left <= most ? left : at_most((left + 1) / 2, most);
}

// Up to `most` pieces: in several rows if the range has complete rows, otherwise adjacent in one
// row.
template <typename Body>
LLTM_CELL_INLINE void for_each_segment(
    std::int64_t hidden, std::int64_t begin, std::int64_t end, std::int64_t most, Body body) {
  std::int64_t row = begin / hidden;
  std::int64_t col = begin % hidden;
  while (begin < end) {
    const bool below = col == 0 && end - begin >= 2 * hidden;
    const std::int64_t rows = below ? rows_of_segment((end - begin) / hidden, most) : 1;
    const std::int64_t last = below ? hidden : at_most(hidden, col + end - begin);
    begin += rows * (last - col);
    while (col < last) {
      const std::int64_t n = at_most(last - col, kPiece);
      const std::int64_t pieces = below ? rows : at_most(pieces_of(last - col), most);
      body(Segment{row, col, pieces, n, below ? 1 : 0, below ? 0 : kPiece});
      col += below ? n : pieces * n;
    }
    if (col == hidden) {
      col = 0;
      row += rows;
    }
  }
}

// Usually n == kPiece: loops become straight-line code.
template <typename Body>
LLTM_CELL_INLINE void with_size(std::int64_t n, const Body& body) {
  if (n == kPiece) {
    body(std::integral_constant<std::int64_t, kPiece>());
  } else {
    body(n);
  }
}

// For matrices that cannot be used in place. Not inlined, to limit code size: kernels have many,
// with several ways to copy.
template <typename T>
__attribute__((noinline)) Pieces<const compute_t<T>> copy_part(
    const Matrix<const T>& x,
    const Segment& part,
    std::int64_t offset,
    PieceBuffer<compute_t<T>>* buffers) {
  with_size(part.n, [&](auto n) {
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      load(x, part.row_of(p), part.col_of(p) + offset, n, buffers[p]);
    }
  });
  return {buffers->values, kPiece};
}

template <typename T>
__attribute__((noinline)) void copy_part_to(
    const Matrix<T>& y, const Segment& part, std::int64_t offset, Pieces<compute_t<T>> values) {
  with_size(part.n, [&](auto n) {
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      store(y, part.row_of(p), part.col_of(p) + offset, n, values.piece(p));
    }
  });
}

template <typename C>
__attribute__((noinline)) void add_parts(
    Pieces<const C> a, Pieces<const C> b, const Segment& part, PieceBuffer<C>* sums) {
  with_size(padded(part.n), [&](auto n) {
    const std::int64_t size = n;
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      const C* const x = a.piece(p);
      const C* const y = b.piece(p);
      C* const sum = sums[p].values;
      LLTM_INDEPENDENT
      for (std::int64_t j = 0; j < size; ++j) sum[j] = x[j] + y[j];
    }
  });
}

// `offset` columns to the right, with a buffer per piece.
template <typename T>
LLTM_CELL_INLINE Pieces<const compute_t<T>> load_part(
    const Matrix<const T>& x,
    const Segment& part,
    std::int64_t offset,
    PieceBuffer<compute_t<T>>* buffers,
    bool is_padded = false) {
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    if (is_in_place(x, part.n, is_padded)) {
      return {x.row(part.row) + part.col + offset, part.step(x.row_stride)};
    }
  }
  return copy_part(x, part, offset, buffers);
}

template <typename T>
LLTM_CELL_INLINE void load_input(
    Registers<compute_t<T>>& registers,
    int k,
    const Matrix<const T>& x,
    const Segment& part,
    std::int64_t offset) {
  registers.set_input(k, load_part(x, part, offset, registers.input_memory(k)));
}

template <typename T>
LLTM_CELL_INLINE Pieces<compute_t<T>> target_part(
    const Matrix<T>& y,
    const Segment& part,
    std::int64_t offset,
    PieceBuffer<compute_t<T>>* buffers) {
  compute_t<T>* const first = target(y, part.row, part.col + offset, part.n, buffers[0]);
  return {first, first != buffers[0].values ? part.step(y.row_stride) : kPiece};
}

template <typename T>
LLTM_CELL_INLINE void store_part(
    const Matrix<T>& y, const Segment& part, std::int64_t offset, Pieces<compute_t<T>> values) {
  if (y.data == nullptr) return;
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    if (y.row(part.row) + part.col + offset == values.values) return;
  }
  copy_part_to(y, part, offset, values);
}

// The part `ahead` rows below.
template <typename T>
LLTM_CELL_INLINE void fetch_part_ahead(
    const Matrix<T>& x, const Segment& part, std::int64_t offset, std::int64_t ahead) {
  for (std::int64_t p = 0; p < part.pieces; ++p) {
    fetch_ahead(x.row(part.row_of(p) + ahead) + part.col_of(p) + offset, part.n);
  }
}

// To the next part, if parts have several rows.
LLTM_CELL_INLINE std::int64_t rows_ahead(const Segment& part) {
  return part.row_step == 1 ? part.pieces : kRowsAhead;
}

// Adds the rows to `sums`, one per unit.
template <typename C>
__attribute__((noinline)) void add_rows(const Segment& part, Pieces<C> x, double* sums) {
  with_size(part.n, [&](auto n) {
    const std::int64_t size = n;
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      const C* const piece = x.piece(p);
      double* const sum = sums + part.col_of(p);
      LLTM_INDEPENDENT
      for (std::int64_t j = 0; j < size; ++j) sum[j] += static_cast<double>(piece[j]);
    }
  });
}

// Groups of kUnitsPerSum terms are added in a fixed order. Vectors by hand: the compiler would load
// each term by itself.
template <typename C>
LLTM_CELL_INLINE void add_groups(const C* x, double* sums) {
  constexpr int kHalf = kUnitsPerSum / 2;
  using Terms [[gnu::vector_size(kHalf * sizeof(C))]] = C;
  using Doubles [[gnu::vector_size(kHalf * sizeof(double))]] = double;
  static_assert(kHalf == 8);
  for (int k = 0; k < kPiece / kUnitsPerSum; ++k, x += kUnitsPerSum) {
    Terms first, second;
    __builtin_memcpy(&first, x, sizeof(first));
    __builtin_memcpy(&second, x + kHalf, sizeof(second));
    const Doubles h =
        __builtin_convertvector(first, Doubles) + __builtin_convertvector(second, Doubles);
    const auto q =
        __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    const auto pair = __builtin_shufflevector(q, q, 0, 1) + __builtin_shufflevector(q, q, 2, 3);
    sums[k] = pair[0] + pair[1];
  }
}

template <typename C>
__attribute__((noinline)) void add_terms(
    const StageMemory<C>& memory, const Segment& part, int mean, Pieces<C> terms) {
  for (std::int64_t p = 0; p < part.pieces; ++p) {
    double* const sums =
        memory.sums.row(part.row_of(p)) + mean * memory.sums_stride + part.col_of(p) / kUnitsPerSum;
    C* const piece = terms.piece(p);  // in a PieceBuffer
    for (std::int64_t j = part.n; j < kPiece; ++j) piece[j] = 0;
    double of_piece[kPiece / kUnitsPerSum];
    add_groups(piece, of_piece);
    for (std::int64_t k = 0; k * kUnitsPerSum < part.n; ++k) sums[k] = of_piece[k];
  }
}

// A mean is the same for all units of a row.
template <typename C>
LLTM_CELL_INLINE void load_mean(
    Registers<C>& registers, int k, const StageMemory<C>& memory, const Segment& part, int mean) {
  const Matrix<const C> means = {memory.means.data + mean, memory.means.row_stride, 0};
  load_input(registers, k, means, part, 0);
}

// Saved values that are the same for all units of a row.
LLTM_CELL_INLINE bool is_per_row(const CellInfo& cell, int saved) {
  return (cell.programs->per_row >> saved & 1) != 0;
}

template <typename T>
LLTM_CELL_INLINE void store_per_row(
    const Matrix<T>& y,
    const Segment& part,
    std::int64_t offset,
    std::int64_t unit,
    Pieces<compute_t<T>> values) {
  for (std::int64_t p = 0; p < part.pieces; ++p) {
    if (unit + part.col_of(p) == 0) store(y, part.row_of(p), offset, 1, values.piece(p));
  }
}

// Rounded to T, as h.
template <typename T, typename G, typename C>
__attribute__((noinline)) void store_operand_part(
    const Matrix<G>& y, const Segment& part, Pieces<C> values) {
  PieceBuffer<C> rounded;
  for (std::int64_t p = 0; p < part.pieces; ++p) {
    round_row<T>(values.piece(p), part.n, rounded.values);
    store_operand(y, part.row_of(p), part.col_of(p), part.n, rounded.values);
  }
}

// A part of a call, with buffers for a second summand.
template <typename Args, typename C>
struct PartOfCall {
  const Args& a;
  Registers<C>& registers;
  const Segment& part;
  std::int64_t ahead;  // rows to the next part
  PieceBuffer<C>* buffers;
};
template <typename T, typename G>
using PartOfForward = PartOfCall<ForwardArgs<T, G>, compute_t<T>>;
template <typename T, typename G>
using PartOfBackward = PartOfCall<BackwardArgs<T, G>, compute_t<T>>;

// Calls body(matrix, column) with the place in memory of an output that a program can write there,
// or that store_part copies there. False if there is none.
template <typename T, typename G, typename Body>
LLTM_CELL_INLINE bool with_matrix(const ForwardArgs<T, G>& a, Port port, const Body& body) {
  if (port.place == Place::kSaved && !is_per_row(*a.cell, port.index)) {
    body(a.saved, port.index * a.layer_hidden);
  } else if (port.place == Place::kKept) {
    body(a.stages->kept, port.index * a.stages->kept_stride);
  } else {
    return false;
  }
  return true;
}
// Gradients of parameters follow those of pre-activations.
template <typename T, typename G, typename Body>
LLTM_CELL_INLINE bool with_matrix(const BackwardArgs<T, G>& a, Port port, const Body& body) {
  if (port.place == Place::kGate) {
    body(a.dz, port.index * a.layer_hidden);
  } else if (port.place == Place::kParameter && a.parameter_sums == nullptr) {
    body(a.dz, (a.cell->slots + port.index) * a.layer_hidden);
  } else if (port.place == Place::kKept) {
    body(a.stages->kept, port.index * a.stages->kept_stride);
  } else {
    return false;
  }
  return true;
}

// Of other places, the program writes to the register's memory.
template <typename Args, typename C>
LLTM_CELL_INLINE void set_output(const PartOfCall<Args, C>& call, int k, Port port) {
  PieceBuffer<C>* const memory = call.registers.output_memory(k);
  if constexpr (requires { call.a.h_next; }) {
    if (port.place == Place::kH) {
      call.registers.set_output(k, target_part(call.a.h_next, call.part, 0, memory));
    }
  }
  with_matrix(call.a, port, [&](const auto& y, std::int64_t offset) {
    const bool is_kept = port.place == Place::kKept;
    if (!is_kept && y.data != nullptr) fetch_part_ahead(y, call.part, offset, call.ahead);
    call.registers.set_output(k, target_part(y, call.part, offset, memory));
  });
}

// Of the places that forward and backward read alike.
template <typename Args, typename C>
LLTM_CELL_INLINE void load_other(const PartOfCall<Args, C>& call, int k, Port port) {
  const auto& [a, registers, part, ahead, buffers] = call;
  if (port.place == Place::kParameter) {
    load_input(registers, k, a.parameters, part, port.index * a.layer_hidden);
  } else if (port.place == Place::kMean) {
    load_mean(registers, k, *a.stages, part, port.index);
  } else {
    const Matrix<const C> kept = as_const(a.stages->kept);
    load_input(registers, k, kept, part, port.index * a.stages->kept_stride);
  }
}

template <typename T, typename G>
LLTM_CELL_INLINE void load(const PartOfForward<T, G>& call, int k, Port port) {
  const auto& [a, registers, part, ahead, buffers] = call;
  const std::int64_t offset = port.index * a.layer_hidden;
  if (port.place == Place::kGate) {
    PieceBuffer<compute_t<T>>* const sums = registers.input_memory(k);
    const auto z = load_part(a.z, part, port.index * a.z_stride, sums, a.z_padded);
    add_parts(z, load_part(a.bias, part, offset, buffers), part, sums);
  } else if (port.place == Place::kState) {
    load_input(registers, k, a.c, part, offset);
  } else {
    load_other(call, k, port);
  }
}

template <typename T, typename G>
LLTM_CELL_INLINE void store(const PartOfForward<T, G>& call, int k, Port port) {
  const auto& [a, registers, part, ahead, buffers] = call;
  const std::int64_t offset = port.index * a.layer_hidden;
  const Pieces<compute_t<T>> y = registers.output(k);
  if (with_matrix(a, port, [&part = part, &y](const auto& to, std::int64_t column) {
        store_part(to, part, column, y);
      })) {
    return;
  }
  if (port.place == Place::kSaved) {
    store_per_row(a.saved, part, offset, a.stages->unit, y);
  } else if (port.place == Place::kMean) {
    add_terms(*a.stages, part, port.index, y);
  } else if (port.place == Place::kOperand) {
    store_operand_part<T>(a.operands[port.index], part, y);
  } else if (port.place == Place::kState) {
    store_part(a.c_next, part, offset, y);
  } else {
    if (a.cell->reads_h) store_part(a.c_next, part, 0, y);
    PieceBuffer<compute_t<T>>* const rounded = registers.output_memory(k);
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      store_h(a, part.row_of(p), part.col_of(p), part.n, y.piece(p), rounded[p]);
    }
  }
}

template <typename T, typename G>
LLTM_CELL_INLINE void load(const PartOfBackward<T, G>& call, int k, Port port) {
  const auto& [a, registers, part, ahead, buffers] = call;
  const std::int64_t offset = port.index * a.layer_hidden;
  if (port.place == Place::kSaved && is_per_row(*a.cell, port.index)) {
    const T* const first = a.saved.data + (offset - a.stages->unit);
    load_input(registers, k, Matrix<const T>{first, a.saved.row_stride, 0}, part, 0);
  } else if (port.place == Place::kSaved) {
    fetch_part_ahead(a.saved, part, offset, ahead);
    load_input(registers, k, a.saved, part, offset);
  } else if (port.place == Place::kState) {
    load_input(registers, k, a.grad_c, part, offset);
  } else if (port.place == Place::kH) {
    PieceBuffer<compute_t<T>>* const dh = registers.input_memory(k);
    const auto from_output = load_part(a.grad_h, part, 0, dh);
    add_parts(from_output, load_part(a.grad_h_state, part, 0, buffers), part, dh);
    if (a.cell->reads_h) {
      const Pieces<const compute_t<T>> sum = {dh->values, kPiece};
      add_parts(sum, load_part(a.grad_c, part, 0, buffers), part, dh);
    }
  } else if (port.place == Place::kOperand) {
    load_input(registers, k, a.grad_operands, part, port.index * a.stages->kept_stride);
  } else {
    load_other(call, k, port);
  }
}

template <typename T, typename G>
LLTM_CELL_INLINE void store(const PartOfBackward<T, G>& call, int k, Port port) {
  const auto& [a, registers, part, ahead, buffers] = call;
  const Pieces<compute_t<T>> y = registers.output(k);
  const bool has_matrix =
      with_matrix(a, port, [&part = part, &y](const auto& to, std::int64_t column) {
        store_part(to, part, column, y);
      });
  if (port.place == Place::kGate && a.operand.data != nullptr) {
    for (std::int64_t p = 0; p < part.pieces; ++p) {
      const std::int64_t column = part.col_of(p) + port.index * a.operand_stride;
      if (!store_operand(a.operand, part.row_of(p), column, part.n, y.piece(p))) {
        *a.out_of_range = true;
      }
    }
  }
  if (has_matrix) return;
  if (port.place == Place::kMean) {
    add_terms(*a.stages, part, port.index, y);
  } else if (port.place == Place::kParameter) {
    add_rows(part, y, a.parameter_sums + port.index * a.layer_hidden);
  } else {
    store_part(a.grad_c_prev, part, port.index * a.layer_hidden, y);
  }
}

// One stage of a step: of several, that of `a.stages`. `ahead` returns the rows from a part to
// the next.
template <typename C, typename Args, typename Ahead>
LLTM_CELL_INLINE void run_stage(
    const Args& a, const Pass& pass, std::int64_t begin, std::int64_t end, const Ahead& ahead) {
  const Stage& stage = a.stages != nullptr ? *a.stages->stage : *pass.stages;
  const Program& program = stage.program;
  const Port* const to = stage.ports + program.inputs;
  Registers<C> registers(program, most_pieces(a.hidden, end - begin));
  PieceBuffer<C> buffers[Registers<C>::kMostPieces];
  for_each_segment(a.hidden, begin, end, registers.pieces(), [&](const Segment& part) {
    const PartOfCall<Args, C> call = {a, registers, part, ahead(part), buffers};
    for (int k = 0; k < program.inputs; ++k) load(call, k, stage.ports[k]);
    for (int k = 0; k < program.outputs; ++k) set_output(call, k, to[k]);
    execute_block(program, registers, part.pieces, padded(part.n));
    for (int k = 0; k < program.outputs; ++k) store(call, k, to[k]);
  });
}

template <typename T, typename G>
void forward_program(const ForwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  run_stage<compute_t<T>>(a, a.cell->forward(), begin, end, rows_ahead);
}

template <typename T, typename G>
void backward_program(const BackwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  const std::int64_t last_row = end / a.hidden - 1;
  run_stage<compute_t<T>>(a, a.cell->backward(), begin, end, [&](const Segment& part) {
    const std::int64_t ahead = rows_ahead(part);
    return part.row + ahead > last_row ? ahead + a.after_rows : ahead;
  });
}

// C is the compute type. a.c is always float64.
template <typename C>
void forward_small_batch_program_in(const SmallBatchArgs& a, std::int64_t rows) {
  const CellInfo& cell = *a.cell;
  const Program& program = cell.programs->forward.program();
  const int own = cell.reads_h ? 1 : 0;
  Registers<C> registers(program, most_pieces(a.hidden, rows * a.hidden));
  for_each_segment(a.hidden, 0, rows * a.hidden, registers.pieces(), [&](const Segment& part) {
    const std::int64_t n = part.n, size = padded(n);
    const auto load_to = [&](PieceBuffer<C>& y, const auto* x, const float* bias) {
      if (bias == nullptr) {
        for (std::int64_t j = 0; j < n; ++j) y.values[j] = static_cast<C>(x[j]);
      } else {
        for (std::int64_t j = 0; j < n; ++j) y.values[j] = static_cast<C>(x[j]) + bias[j];
      }
      for (std::int64_t j = n; j < size; ++j) y.values[j] = 0;
    };
    const auto store_to = [&](const auto& y, std::int64_t offset, Pieces<C> x) {
      for (std::int64_t p = 0; p < part.pieces; ++p) {
        auto* const to = y.row(part.row_of(p)) + part.col_of(p) + offset;
        using To = std::remove_pointer_t<decltype(y.data)>;
        for (std::int64_t j = 0; j < n; ++j) to[j] = static_cast<To>(x.piece(p)[j]);
      }
    };
    int in = 0, out = 1;
    for (int k = 0; k < cell.slots; ++k, ++in) {
      for (std::int64_t p = 0; p < part.pieces; ++p) {
        const std::int64_t col = part.col_of(p);
        const float* const bias = a.bias == nullptr ? nullptr : a.bias + col + k * a.layer_hidden;
        const float* const z = a.z.row(part.row_of(p)) + col + k * a.z_stride;
        load_to(registers.input_memory(in)[p], z, bias);
      }
    }
    for (int k = 0; k < cell.state_columns(); ++k, ++in) {
      for (std::int64_t p = 0; p < part.pieces; ++p) {
        const double* const c = a.c.row(part.row_of(p)) + part.col_of(p) + k * a.layer_hidden;
        load_to(registers.input_memory(in)[p], c, nullptr);
      }
    }
    for (int k = 0; k < cell.parameters; ++k, ++in) {
      for (std::int64_t p = 0; p < part.pieces; ++p) {
        const float* const own_parameter = a.parameters + part.col_of(p) + k * a.layer_hidden;
        load_to(registers.input_memory(in)[p], own_parameter, nullptr);
      }
    }

    execute_block(program, registers, part.pieces, size);

    const Pieces<C> h = registers.output(0);
    store_to(a.h_next, 0, h);
    if (own == 1) store_to(a.c, 0, h);
    for (int k = 0; k < cell.states; ++k) {
      store_to(a.c, (own + k) * a.layer_hidden, registers.output(out++));
    }
    if (a.saved.data == nullptr) return;
    for (int k = 0; k < cell.saved; ++k) {
      store_to(a.saved, k * a.layer_hidden, registers.output(out++));
    }
  });
}

void forward_small_batch_program(const SmallBatchArgs& a, std::int64_t rows) {
  if (a.cell->forgets) {
    forward_small_batch_program_in<float>(a, rows);
  } else {
    forward_small_batch_program_in<double>(a, rows);
  }
}

template <typename T, typename G>
constexpr Elementwise<T, G> kProgramElementwise = {forward_program<T, G>, backward_program<T, G>};

constexpr CellKernels kProgramKernels = {
    kProgramElementwise<double, double>,
    kProgramElementwise<float, float>,
    kProgramElementwise<Half, float>,
    kProgramElementwise<BFloat16, float>,
    kProgramElementwise<BFloat16, BFloat16>,
    kProgramElementwise<float, BFloat16>,
#if defined(__AMX_BF16__)
    kProgramElementwise<float, BFloat16x3>,
    kProgramElementwise<Half, BFloat16x3>,
#else
    {},
    {},
#endif
    {forward_program<float, Int8>, nullptr},
    {forward_program<Half, Int8>, nullptr},
    {forward_program<BFloat16, Int8>, nullptr},
    forward_small_batch_program,
    nullptr,
};

}  // namespace
}  // namespace lltm::cpu
