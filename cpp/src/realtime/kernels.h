// One step is, for each block of units,
//     z = bias + x W_x^T + h W_h^T
//     h', c' from z and c
// A CPU that executes out of order computes the second line while it reads the next block's
// weights.
#pragma once

#include "cell/cells.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/program_kernels.h"
#include "realtime/table.h"

#include <cstdint>
#include <new>

namespace lltm::realtime {
namespace {

using cpu::broadcast;
using cpu::Floats;
using cpu::kLanes;
using cpu::load_lanes;
using cpu::store_lanes;

// Vectors that are summed at once. Sums must hide the latency of a multiply-add, and fit in the
// registers with a product's operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMostSums = 16;
#elif defined(__AVX__)
constexpr int kMostSums = 12;
#else
constexpr int kMostSums = 8;
#endif
// Products that are added in float32 in one chain.
constexpr std::int64_t kLongestChain = 32;

// Not memcpy, whose smaller stores a load of complete vectors would wait for.
template <int kN>
LLTM_CELL_INLINE void copy(const float* from, float* to) {
  LLTM_UNROLL
  for (int v = 0; v < kN; v += kLanes) store_lanes(load_lanes(from + v), to + v);
}

// z (kSlots, z_stride) += a (n) w (n, kSlots, kUnits), for kWidth vectors of each row.
template <int kSlots, int kWidth>
LLTM_CELL_INLINE void multiply_part(
    const float* w, const float* a, std::int64_t n, float* z, std::int64_t z_stride) {
  constexpr int kSums = kSlots * kWidth;
  constexpr int kChains = kMostSums >= 8 * kSums   ? 8
                          : kMostSums >= 4 * kSums ? 4
                          : kMostSums >= 2 * kSums ? 2
                                                   : 1;
  Floats sums[kSlots][kWidth];
  const auto for_each = [&](const auto& body) __attribute__((always_inline)) {
    LLTM_UNROLL
    for (int s = 0; s < kSlots; ++s) {
      LLTM_UNROLL
      for (int v = 0; v < kWidth; ++v) body(s, v);
    }
  };
  for_each([&](int s, int v) __attribute__((always_inline)) {
    sums[s][v] = load_lanes(z + s * z_stride + v * kLanes);
  });
  for (std::int64_t k = 0; k < n;) {
    Floats chains[kChains][kSlots][kWidth] = {};
    const auto add = [&](int chain, std::int64_t row) __attribute__((always_inline)) {
      const Floats factor = broadcast(a[row]);
      const float* const weights = w + row * kSlots * kUnits;
      for_each([&](int s, int v) __attribute__((always_inline)) {
        chains[chain][s][v] += factor * load_lanes(weights + s * kUnits + v * kLanes);
      });
    };
    const std::int64_t left = n - k, most = kChains * kLongestChain;
    const std::int64_t end = k + (left < most ? left : most);
    for (; k + kChains <= end; k += kChains) {
      LLTM_UNROLL
      for (int chain = 0; chain < kChains; ++chain) add(chain, k + chain);
    }
    for (; k < end; ++k) add(0, k);
    for_each([&](int s, int v) __attribute__((always_inline)) {
      LLTM_UNROLL
      for (int half = kChains / 2; half > 0; half /= 2) {
        LLTM_UNROLL
        for (int q = 0; q < half; ++q) chains[q][s][v] += chains[q + half][s][v];
      }
      sums[s][v] += chains[0][s][v];
    });
  }
  for_each([&](int s, int v) __attribute__((always_inline)) {
    store_lanes(sums[s][v], z + s * z_stride + v * kLanes);
  });
}

// The same for the first kN units of each row. Returns the end of w.
template <int kSlots, int kN = kUnits>
LLTM_CELL_INLINE const float* multiply(
    const float* w, const float* a, std::int64_t n, float* z, std::int64_t z_stride) {
  if constexpr (kSlots > 0) {
    constexpr int kVectors = kN / kLanes, kFitting = kMostSums / kSlots;
    constexpr int kWidth = kFitting >= kVectors ? kVectors : kFitting >= 2 ? 2 : 1;
    LLTM_UNROLL
    for (int v = 0; v < kVectors; v += kWidth) {
      multiply_part<kSlots, kWidth>(w + v * kLanes, a, n, z + v * kLanes, z_stride);
    }
  }
  return w + n * kSlots * kUnits;
}

// A step of a row, in a block of which kN units are computed: `h`, `c` and `bias` begin at the
// block. Returns the end of the block's weights.
template <typename Definition, int kN>
LLTM_CELL_INLINE const float* run_block(
    const LayerView& layer,
    const float* w,
    const float* bias,
    const float* x,
    const float* h_row,
    float* c,
    float* h_next) {
  constexpr CellInfo kCell = Definition::kCell;
  alignas(64) float z[kCell.slots][kUnits];
  LLTM_UNROLL
  for (int s = 0; s < kCell.slots; ++s) copy<kN>(bias + s * layer.padded, z[s]);
  w = multiply<kCell.x.count(), kN>(w, x, layer.input, z[kCell.x.begin], kUnits);
  w = multiply<kCell.h.count(), kN>(w, h_row, layer.hidden, z[kCell.h.begin], kUnits);
  LLTM_INDEPENDENT
#pragma GCC unroll 1
  for (std::int64_t j = 0; j < kN; ++j) {
    float z_j[kCell.slots];
    LLTM_UNROLL
    for (int s = 0; s < kCell.slots; ++s) z_j[s] = z[s][j];
    const auto next = Definition::forward(z_j, c[j]);
    c[j] = next.c;
    h_next[j] = next.h;
  }
  return w;
}

template <typename Definition>
void run(const LayerView& layer, const float* x, float* y, std::int64_t steps) {
  constexpr CellInfo kCell = Definition::kCell;
  static_assert(kCell.x.count() <= kGroup && kCell.h.count() <= kGroup);
  static_assert(kCell.state_columns() == 1 && kCell.parameters == 0);
  constexpr int kHalf = kLanes < kUnits ? kUnits / 2 : kUnits;
  const float* h = layer.h;
  for (std::int64_t t = 0; t < steps; ++t) {
    const float* const h_of_step = h;
    h = y;
    for (std::int64_t r = 0; r < layer.batch; ++r) {
      const float* const h_row = h_of_step + r * layer.hidden;
      const float* w = layer.weights;
      float* const c = layer.c + r * layer.padded;
      std::int64_t first = 0;
      for (; first + kUnits <= layer.hidden; first += kUnits) {
        alignas(64) float h_next[kUnits];
        w = run_block<Definition, kUnits>(
            layer, w, layer.bias + first, x, h_row, c + first, h_next);
        copy<kUnits>(h_next, y + first);
      }
      if (const std::int64_t rest = layer.hidden - first; rest > 0) {
        alignas(64) float h_next[kUnits];
        const auto run_rest =
            rest <= kHalf ? run_block<Definition, kHalf> : run_block<Definition, kUnits>;
        run_rest(layer, w, layer.bias + first, x, h_row, c + first, h_next);
        for (std::int64_t j = 0; j < rest; ++j) y[first + j] = h_next[j];
      }
      x += layer.input;
      y += layer.hidden;
    }
  }
  if (steps > 0) __builtin_memcpy(layer.h, h, layer.batch * layer.hidden * sizeof(float));
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
        w = multiply<1>(w, a, n, of_group, stride);
        break;
      case 2:
        w = multiply<2>(w, a, n, of_group, stride);
        break;
      case 3:
        w = multiply<3>(w, a, n, of_group, stride);
        break;
      default:
        w = multiply<kGroup>(w, a, n, of_group, stride);
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
void run_program(const LayerView& layer, const float* x, float* y, std::int64_t steps) {
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
    kernels.run[Cells::native<Definition>()] = run<Definition>;
  });
  return kernels;
}

}  // namespace
}  // namespace lltm::realtime
