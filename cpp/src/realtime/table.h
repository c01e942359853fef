// The real-time engine's kernels, compiled once per instruction set. No PyTorch header.
#pragma once

#include "cell/cells.h"

#include <cstddef>
#include <cstdint>

namespace lltm::realtime {

constexpr std::int64_t kUnits = 16;  // of a block; rows of H values are padded to complete blocks
constexpr int kGroup = 4;            // pre-activations that are multiplied together

// A layer, on memory that realtime.cpp allocates. S pre-activations, P parameters.
struct LayerView {
  const CellInfo* cell;
  std::int64_t input, hidden, padded, batch;
  // For each block of units: (input, ., kUnits) for each group of pre-activations that read x, then
  // (hidden, ., kUnits) for those that read h.
  const float* weights;
  const float* bias;        // (S, padded)
  const float* parameters;  // (P, padded)
  float* h;                 // (batch, hidden), of the last step
  float* c;                 // (batch, state columns, padded); cell.h explains c
  float* z;                 // (S, padded) for programs
  void* registers;          // for programs
};

// y (steps, batch, hidden) from x (steps, batch, input). They do not overlap.
using Run = void (*)(const LayerView& layer, const float* x, float* y, std::int64_t steps);

struct Kernels {
  Run run[Cells::kKernels];  // by CellInfo::native
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
