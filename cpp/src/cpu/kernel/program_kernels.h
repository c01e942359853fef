// Runs cell programs (cell/program.h), each instruction as a vectorized loop. A block's pieces, of
// up to kPiece units, share the cost of selecting the loop and waiting for the previous result.
//
// In a kernel:
//     Registers<C> registers(program, most); // once: constants and temporaries
//     registers.set_input(k, x);             // for each block, all inputs and outputs
//     registers.set_output(k, y);
//     execute_block(program, registers, pieces, size);
#pragma once

#include "cell/math.h"
#include "cell/program.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

// Enough elements to occupy the vector units, and few enough that all buffers stay in L1.
constexpr std::int64_t kPiece = 64;

template <typename T>
struct PieceBuffer {
  alignas(64) T values[kPiece];
};

// Pieces that are `step` values apart.
template <typename C>
struct Pieces {
  C* values;
  std::int64_t step;

  LLTM_CELL_INLINE C* piece(std::int64_t p) const { return values + p * step; }
};

// Registers for up to pieces() pieces of up to kPiece values. Inputs and outputs need not use their
// memory.
template <typename C>
class Registers {
 public:
  // Most programs' registers fit in L1.
  static constexpr int kMostPieces = 32 / sizeof(C);

  // `pieces` is the largest block's piece count; pieces() may be smaller, for compact memory.
  LLTM_CELL_INLINE Registers(const Program& program, std::int64_t pieces)
      : first_output_(program.inputs), pieces_(at_most(pieces, most_pieces(program.registers))) {
    for (int k = 0; k < program.registers; ++k) at_[k] = in_memory(k);
    for (int k = 0; k < program.constant_count; ++k) {
      PieceBuffer<C>* const constant = memory_of(program.first_constant() + k);
      for (C& value : constant->values) value = static_cast<C>(program.constants[k]);
      at_[program.first_constant() + k].step = 0;
    }
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  LLTM_CELL_INLINE std::int64_t pieces() const { return pieces_; }

  LLTM_CELL_INLINE PieceBuffer<C>* input_memory(int k) { return memory_of(k); }
  LLTM_CELL_INLINE PieceBuffer<C>* output_memory(int k) { return memory_of(first_output_ + k); }

  // The array overlaps no other register and has a multiple of 16 values.
  LLTM_CELL_INLINE void set_input(int k, Pieces<const C> x) {
    at_[k] = {const_cast<C*>(x.values), x.step};  // programs never write to inputs
  }
  LLTM_CELL_INLINE void set_output(int k, Pieces<C> y) { at_[first_output_ + k] = y; }
  LLTM_CELL_INLINE Pieces<C> output(int k) const { return at_[first_output_ + k]; }

  LLTM_CELL_INLINE const Pieces<C>* get() const { return at_; }

 private:
  static constexpr int kBlocks = Program::kMostRegisters;

  static constexpr int most_pieces(int registers) {
    return registers * kMostPieces <= kBlocks ? kMostPieces : kBlocks / registers;
  }
  LLTM_CELL_INLINE PieceBuffer<C>* memory_of(int k) { return memory_ + k * pieces_; }
  LLTM_CELL_INLINE Pieces<C> in_memory(int k) { return {memory_of(k)->values, kPiece}; }

  const int first_output_;
  const std::int64_t pieces_;
  Pieces<C> at_[Program::kMostRegisters];
  PieceBuffer<C> memory_[kBlocks];
};

// Clang would unroll short loops before vectorizing, and interleave several vectors, which 16
// values may not fill.
#if defined(__clang__)
#define LLTM_VECTORS \
  _Pragma("clang loop vectorize(assume_safety) interleave(disable) unroll(disable)")
#else
#define LLTM_VECTORS LLTM_INDEPENDENT
#endif

// `size`: a multiple of 16, at most kPiece, and equal to kN unless kN is 0.
template <typename C, std::int64_t kN>
__attribute__((noinline)) void execute(
    const Program& program, const Pieces<C>* registers, std::int64_t pieces, std::int64_t size) {
  const std::int64_t n = kN != 0 ? kN : size & -16;  // no scalar remainder
  for (int k = 0; k < program.size; ++k) {
    const Instruction& i = program.code[k];
    const Pieces<C> of_y = registers[i.y];
    [[maybe_unused]] const Pieces<C> of_a = registers[i.a];
    [[maybe_unused]] const Pieces<C> of_b = registers[i.b];
    [[maybe_unused]] const Pieces<C> of_c = registers[i.c];
    switch (i.op) {
// Other operands name no register.
#define LLTM_OPERANDS_1 a[j]
#define LLTM_OPERANDS_2 a[j], b[j]
#define LLTM_OPERANDS_3 a[j], b[j], c[j]
#define LLTM_PIECES_1 const C* const a = of_a.piece(p)
#define LLTM_PIECES_2 LLTM_PIECES_1, * const b = of_b.piece(p)
#define LLTM_PIECES_3 LLTM_PIECES_2, * const c = of_c.piece(p)
#define LLTM_RUN(op, function, operands, ...)            \
  case Op::op:                                           \
    for (std::int64_t p = 0; p < pieces; ++p) {          \
      C* const y = of_y.piece(p);                        \
      LLTM_PIECES_##operands;                            \
      LLTM_VECTORS                                       \
      for (std::int64_t j = 0; j < n; ++j) {             \
        y[j] = math::function(LLTM_OPERANDS_##operands); \
      }                                                  \
    }                                                    \
    break;
      LLTM_OPERATIONS(LLTM_RUN)
#undef LLTM_RUN
#undef LLTM_OPERANDS_1
#undef LLTM_OPERANDS_2
#undef LLTM_OPERANDS_3
#undef LLTM_PIECES_1
#undef LLTM_PIECES_2
#undef LLTM_PIECES_3
    }
  }
}

template <typename C>
LLTM_CELL_INLINE void execute_block(
    const Program& program, const Registers<C>& registers, std::int64_t pieces, std::int64_t size) {
  if (size == kPiece) {
    execute<C, kPiece>(program, registers.get(), pieces, size);
  } else {
    execute<C, 0>(program, registers.get(), pieces, size);
  }
}

// Without a remainder shorter than kPiece.
LLTM_CELL_INLINE std::int64_t pieces_of(std::int64_t n) {
  return n < kPiece ? 1 : n / kPiece;
}

}  // namespace
}  // namespace lltm::cpu
