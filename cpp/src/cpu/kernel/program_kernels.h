// Programs (cell/program.h) over blocks of units: each instruction is a loop over a block, which
// the compiler vectorises, so that what it takes to choose the loop is shared by all its units.
//
// How a kernel uses it, for blocks of a row:
//     Registers<C> registers(program);       // once: constants and temporaries
//     registers.set_input(k, x);             // for each block, all inputs and outputs
//     registers.set_output(k, y);
//     execute_block(program, registers, size);
#pragma once

#include "cell/math.h"
#include "cell/program.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernel/table.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

// Elements per block: enough to keep the vector units busy, few enough that
// all the buffers of a block stay in the first-level cache.
constexpr std::int64_t kBlock = 64;

template <typename T>
struct Block {
  alignas(64) T values[kBlock];
};

// The registers of a program that runs over blocks: an array of up to kBlock numbers each. Those of
// constants and temporaries are in here; only as much of it is touched as the program has of them.
template <typename C>
class Registers {
 public:
  explicit LLTM_CELL_INLINE Registers(const Program& program) : outputs_(at_ + program.inputs) {
    const int first = program.first_constant();
    for (int k = first; k < program.registers; ++k) at_[k] = memory_[k - first].values;
    for (int k = 0; k < program.constant_count; ++k) {
      for (C& value : memory_[k].values) value = static_cast<C>(program.constants[k]);
    }
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  // Arrays that overlap no other register, of a multiple of 16 numbers.
  LLTM_CELL_INLINE void set_input(int k, const C* values) {
    at_[k] = const_cast<C*>(values);  // programs never write to inputs
  }
  LLTM_CELL_INLINE void set_output(int k, C* values) { outputs_[k] = values; }

  LLTM_CELL_INLINE C* const* get() const { return at_; }

 private:
  C* at_[Program::kMostRegisters];
  C** outputs_;
  Block<C> memory_[Program::kMostRegisters];
};

// Before the loop of an instruction. Clang would unroll short loops before it vectorises, and take
// several vectors at once, which 16 numbers need not fill.
#if defined(__clang__)
#define LLTM_VECTORS \
  _Pragma("clang loop vectorize(assume_safety) interleave(disable) unroll(disable)")
#else
#define LLTM_VECTORS LLTM_INDEPENDENT
#endif

// Runs a program over `size` units, a multiple of 16 up to kBlock: kN if that is not 0. Each of
// `registers` is an array of as many numbers.
template <typename C, std::int64_t kN>
__attribute__((noinline)) void execute(
    const Program& program, C* const* registers, std::int64_t size) {
  const std::int64_t n = kN != 0 ? kN : size & -16;  // no loop needs a rest of scalar code
  for (int k = 0; k < program.size; ++k) {
    const Instruction& i = program.code[k];
    C* const y = registers[i.y];
    [[maybe_unused]] const C* const a = registers[i.a];
    [[maybe_unused]] const C* const b = registers[i.b];
    [[maybe_unused]] const C* const c = registers[i.c];
    switch (i.op) {
#define LLTM_OPERANDS_1 a[j]
#define LLTM_OPERANDS_2 a[j], b[j]
#define LLTM_OPERANDS_3 a[j], b[j], c[j]
#define LLTM_RUN(op, function, operands)               \
  case Op::op:                                         \
    LLTM_VECTORS                                       \
    for (std::int64_t j = 0; j < n; ++j) {             \
      y[j] = math::function(LLTM_OPERANDS_##operands); \
    }                                                  \
    break;
      LLTM_OPERATIONS(LLTM_RUN)
#undef LLTM_RUN
#undef LLTM_OPERANDS_1
#undef LLTM_OPERANDS_2
#undef LLTM_OPERANDS_3
    }
  }
}

template <typename C>
LLTM_CELL_INLINE void execute_block(
    const Program& program, const Registers<C>& registers, std::int64_t size) {
  if (size == kBlock) {
    execute<C, kBlock>(program, registers.get(), size);
  } else {
    execute<C, 0>(program, registers.get(), size);
  }
}

// As RunProgram in table.h says.
template <typename C>
void run_program(
    const Program& program, const C* const* inputs, C* const* outputs, std::int64_t n) {
  Registers<C> registers(program);
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    for (int k = 0; k < program.inputs; ++k) registers.set_input(k, inputs[k] + begin);
    for (int k = 0; k < program.outputs; ++k) registers.set_output(k, outputs[k] + begin);
    execute_block(program, registers, n - begin < kBlock ? n - begin : kBlock);
  }
}

}  // namespace
}  // namespace lltm::cpu
