// Built-in cells have the kernels of cpu/kernel/small_layer_kernels.h. Here are those of cells that
// are programs: the pre-activations of all units, and then the program.
#pragma once

#include "cell/cells.h"
#include "cpu/kernel/program_kernels.h"
#include "cpu/kernel/small_layer_kernels.h"
#include "realtime/table.h"

#include <cstdint>
#include <new>

namespace lltm::realtime {
namespace {

using cpu::Floats;
using cpu::kLanes;
using cpu::load_lanes;
using cpu::store_lanes;

// z (kSlots, stride) += a (n) w (n, kSlots, kUnits). Returns the end of w.
template <int kSlots>
LLTM_CELL_INLINE const float* multiply_block(
    const float* w, const float* a, std::int64_t n, float* z, std::int64_t stride) {
  constexpr int kWidth = cpu::kWidthFor<kSlots>;
  LLTM_UNROLL
  for (int first = 0; first < kUnits; first += kWidth * kLanes) {
    Floats sums[kSlots][kWidth];
    const auto for_each = [&](const auto& body) __attribute__((always_inline)) {
      LLTM_UNROLL
      for (int s = 0; s < kSlots; ++s) {
        LLTM_UNROLL
        for (int v = 0; v < kWidth; ++v) body(sums[s][v], z + s * stride + first + v * kLanes);
      }
    };
    for_each([](Floats& sum, const float* from) { sum = load_lanes(from); });
    cpu::multiply<kSlots, false>(w + first, kUnits, 0, a, n, sums);
    for_each([](Floats sum, float* to) { store_lanes(sum, to); });
  }
  return w + n * kSlots * kUnits;
}

LLTM_CELL_INLINE const float* multiply_slots(
    const float* w,
    const float* a,
    std::int64_t n,
    SlotRange slots,
    float* z,
    std::int64_t stride) {
  for (int s = slots.begin; s < slots.end; s += kGroup) {
    float* const of_group = z + s * stride;
    switch (slots.end - s) {
      case 1:
        w = multiply_block<1>(w, a, n, of_group, stride);
        break;
      case 2:
        w = multiply_block<2>(w, a, n, of_group, stride);
        break;
      case 3:
        w = multiply_block<3>(w, a, n, of_group, stride);
        break;
      default:
        w = multiply_block<kGroup>(w, a, n, of_group, stride);
    }
  }
  return w;
}

using ProgramRegisters = cpu::Registers<float>;
constexpr std::int64_t kPiece = cpu::kPiece;

void make_registers(const LayerView& layer) {
  new (layer.registers) ProgramRegisters(layer.cell->forward().program(), /*pieces=*/1);
}

// A program has float32 registers, also of cells whose states do not decay.
void run_program(const cpu::SmallLayer& small, const float* x, float* y, std::int64_t steps) {
  const auto& layer = static_cast<const LayerView&>(small);
  const CellInfo& cell = *layer.cell;
  const Program& program = cell.forward().program();
  auto& registers = *static_cast<ProgramRegisters*>(layer.registers);
  const std::int64_t padded = layer.padded;
  const int columns = cell.state_columns(), first_state = cell.reads_h ? 1 : 0;
  const float* h = layer.h;
  for (std::int64_t t = 0; t < steps; ++t) {
    const float* const h_of_step = h;
    h = y;
    for (std::int64_t r = 0; r < layer.batch; ++r) {
      const float* w = layer.weights;
      __builtin_memcpy(layer.z, layer.bias, cell.slots * padded * sizeof(float));
      for (std::int64_t first = 0; first < layer.hidden; first += kUnits) {
        float* const z = layer.z + first;
        w = multiply_slots(w, x, layer.input, cell.x, z, padded);
        w = multiply_slots(w, h_of_step + r * layer.hidden, layer.hidden, cell.h, z, padded);
      }
      float* const c = layer.c + r * columns * padded;
      for (std::int64_t first = 0; first < layer.hidden; first += kPiece) {
        const std::int64_t size = padded - first < kPiece ? padded - first : kPiece;
        int k = 0;
        const auto set_inputs = [&](const float* rows, int count) {
          for (int row = 0; row < count; ++row) {
            registers.set_input(k++, {rows + row * padded + first, kPiece});
          }
        };
        set_inputs(layer.z, cell.slots);
        set_inputs(c, columns);
        set_inputs(layer.parameters, cell.parameters);
        cpu::execute_block(program, registers, 1, size);
        const auto copy = [&](int output, float* to, std::int64_t n) {
          __builtin_memcpy(to, registers.output(output).values, n * sizeof(float));
        };
        const std::int64_t left = layer.hidden - first;
        copy(0, y + first, left < kPiece ? left : kPiece);
        if (cell.reads_h) copy(0, c + first, size);
        for (int s = 0; s < cell.states; ++s) {
          copy(1 + s, c + (first_state + s) * padded + first, size);
        }
      }
      x += layer.input;
      y += layer.hidden;
    }
  }
  if (steps > 0) __builtin_memcpy(layer.h, h, layer.batch * layer.hidden * sizeof(float));
}

constexpr Kernels make_kernels() {
  Kernels kernels = {{run_program}, sizeof(ProgramRegisters), make_registers};
  Cells::for_each([&]<typename Definition>(Definition) {
    kernels.run[Cells::native<Definition>()] = cpu::run_small_layer<Definition>;
  });
  return kernels;
}

}  // namespace
}  // namespace lltm::realtime
