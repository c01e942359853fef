// Generates the CUDA sources that NVRTC compiles (compiled.cpp).
//
// No torch or CUDA header.
#pragma once

#include "cell/cell.h"

#include <compare>
#include <string>
#include <vector>

namespace lltm::cuda {

enum class KernelType : unsigned char { kDouble, kFloat, kHalf, kBFloat16 };

// An element-wise kernel (`width`, `stage`) or a persistent kernel (the last line).
struct KernelForm {
  const CellInfo* cell;  // with programs
  bool backward;
  KernelType tensor, state;  // T and D of elementwise.h
  int width = 0;             // units per thread
  const Stage* stage = nullptr;
  int units = 0, shared_units = 0, tiles = 0, tf32 = 0, heads = 0,
      directions = 0;  // PersistentKernel

  bool is_persistent() const { return tiles > 0; }
  auto operator<=>(const KernelForm&) const = default;
};

const char* kernel_name(const KernelForm& form);
std::string print_kernel(const KernelForm& form);

// The source's headers: our own, and replacements for standard headers, which NVRTC lacks.
// CMakeLists.txt generates this list.
struct ProgramHeader {
  const char *name, *text;
};
extern const std::vector<ProgramHeader> kProgramHeaders;

}  // namespace lltm::cuda
