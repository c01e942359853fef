// Element-wise kernels for custom cells, compiled at their first launch for a dtype and a GPU, and
// kept.
#pragma once

#include "cuda/kernel/elementwise.h"

#include <cstdint>

namespace lltm::cuda {

enum class ProgramType : unsigned char { kDouble, kFloat, kHalf, kBFloat16 };

struct ProgramKernel {
  const CellInfo& cell;
  ProgramType tensor, state;  // T and D of elementwise.h
  bool backward;
  int width;  // units per piece of work
};

// Null if custom cells can be compiled and launched, otherwise the reason.
const char* why_no_programs();

// The parameters are as in elementwise.cu. Throws if NVRTC cannot compile it.
void launch_program(
    const ProgramKernel& kernel,
    std::int64_t blocks,
    int threads,
    void** parameters,
    Stream stream);

}  // namespace lltm::cuda
