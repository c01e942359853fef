// Generates the CUDA source for a custom cell's element-wise kernels, which NVRTC compiles
// (program_launch.cpp).
//
// No torch or CUDA header.
#pragma once

#include "cell/cell.h"

#include <string>
#include <vector>

namespace lltm::cuda {

// A cell definition for elementwise_kernels.h: struct `name`, in C++ for host and device.
std::string print_definition(const CellInfo& cell, const std::string& name);

struct ProgramTypes {
  std::string tensor;  // as in ForwardArgs and BackwardArgs
  std::string state;   // as in BackwardArgs
};

// The cell definition and two kernels, lltm_forward and lltm_backward. Each thread computes `width`
// units.
std::string print_kernels(const CellInfo& cell, const ProgramTypes& types, int width);

// The source's headers: our own, and replacements for standard headers, which NVRTC lacks.
// CMakeLists.txt generates this list.
struct ProgramHeader {
  const char *name, *text;
};
extern const std::vector<ProgramHeader> kProgramHeaders;

}  // namespace lltm::cuda
