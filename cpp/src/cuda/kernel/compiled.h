// All kernels: NVRTC compiles them at their first use on a GPU, unless they were compiled with the
// library; the process and files (kernel_cache.h) keep them.
#pragma once

#include "cuda/kernel/elementwise.h"
#include "cuda/kernel/persistent.h"
#include "cuda/kernel/program_source.h"

#include <c10/util/Half.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace lltm::cuda {

// Null if kernels can be compiled and launched, otherwise the reason.
const char* why_no_compiled_kernels();

// Lines of build_info.
std::string describe_compiled_kernels();

template <typename T>
constexpr KernelType kKernelType = std::is_same_v<T, double>      ? KernelType::kDouble
                                   : std::is_same_v<T, float>     ? KernelType::kFloat
                                   : std::is_same_v<T, c10::Half> ? KernelType::kHalf
                                                                  : KernelType::kBFloat16;

template <typename Args>
KernelForm form_of(const PersistentKernel& kernel) {
  constexpr KernelType kType = kKernelType<typename Args::Element>;
  KernelForm form = {kernel.cell, !Args::kIsForward, kType, kType};
  form.units = kernel.units;
  form.shared_units = kernel.shared_units;
  form.tiles = kernel.tiles;
  form.tf32 = kernel.tf32 ? 1 : 0;
  form.heads = kernel.heads ? 1 : 0;
  form.directions = kernel.directions;
  return form;
}

struct Grid {
  std::int64_t x, y, z;
  int threads;
  std::int64_t shared_bytes;
  bool cooperative;  // all blocks run concurrently
};

// Per thread, of spilled registers and arrays. Compiles the kernel at its first use.
int local_bytes(const KernelForm& form, std::int64_t shared_bytes);

// Throws if NVRTC cannot compile the kernel. Returns false if too few multiprocessors are
// available for a cooperative launch.
bool launch_compiled(const KernelForm& form, const Grid& grid, void** parameters, Stream stream);

}  // namespace lltm::cuda
