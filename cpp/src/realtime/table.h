// The real-time engine's kernels, compiled once per instruction set. No PyTorch header.
#pragma once

#include "cell/cells.h"
#include "cpu/kernel/small_layer.h"

#include <cstddef>
#include <cstdint>

namespace lltm::realtime {

constexpr std::int64_t kUnits = cpu::kLayerUnits;
constexpr int kGroup = 4;  // pre-activations that a program's layer multiplies together

// A layer, on memory that realtime.cpp allocates. For programs: P parameters, the weights of each
// group of pre-activations are together, and all blocks have kUnits units.
struct LayerView : cpu::SmallLayer {
  const CellInfo* cell;
  const float* parameters;  // (P, padded)
  float* z;                 // (S, padded)
  void* registers;
};

struct Kernels {
  cpu::RunSmallLayer run[Cells::kKernels];  // by CellInfo::native
  std::size_t registers_bytes;
  // Once, before the first run of a program.
  void (*make_registers)(const LayerView& layer);
};

// Null if compiled without this instruction set.
const Kernels* kernels_default();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

// Of this CPU, or those that a test has chosen for its next layers.
const Kernels& best_kernels();
inline const Kernels* chosen_by_test = nullptr;

}  // namespace lltm::realtime
