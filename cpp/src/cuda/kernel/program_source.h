// The CUDA source of the element-wise kernels of a cell that a user has written, which NVRTC
// compiles (program_launch.cpp).
//
// No header of torch or CUDA.
#pragma once

#include "cell/cell.h"

#include <string>
#include <vector>

namespace lltm::cuda {

// The programs of a cell as a type for elementwise_kernels.h: struct `name`, in C++ for host and
// device.
std::string print_page(const CellInfo& cell, const std::string& name);

// The types of a kernel, as program_gpu.h has them.
struct ProgramTypes {
  std::string tensor;  // T of ForwardArgs and BackwardArgs
  std::string state;   // D of BackwardArgs
};

// The page and two kernels, lltm_forward and lltm_backward, each thread of which computes `width`
// units at a time.
std::string print_kernels(const CellInfo& cell, const ProgramTypes& types, int width);

// What the source includes, by the names that it has for them: our own headers, and what stands in
// for those of the standard library, which NVRTC does not have. CMakeLists.txt writes the list.
struct ProgramHeader {
  const char *name, *text;
};
extern const std::vector<ProgramHeader> kProgramHeaders;

}  // namespace lltm::cuda
