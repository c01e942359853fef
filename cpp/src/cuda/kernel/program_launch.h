// The element-wise kernels of cells that users have written: compiled for a dtype and a GPU when
// they are first launched, and kept for as long as the process lasts.
#pragma once

#include "cuda/kernel/elementwise.h"

#include <cstdint>

namespace lltm::cuda {

enum class ProgramType : unsigned char { kDouble, kFloat, kHalf, kBFloat16 };

struct ProgramKernel {
  const CellInfo& cell;
  ProgramType tensor, state;  // T and D of elementwise.h
  bool backward;
  int width;  // units of a piece
};

// Null where they can be compiled and launched, else why not.
const char* why_no_programs();

// Queues one on a stream of the current device, with the parameters of the kernels in
// elementwise.cu. Throws where NVRTC does not compile it.
void launch_program(
    const ProgramKernel& kernel,
    std::int64_t blocks,
    int threads,
    void** parameters,
    Stream stream);

}  // namespace lltm::cuda
