// What persistent.h declares, in two parts: the kernels of each cell and dtype (persistent_gpu.h,
// compiled by nvcc), and what is the same for all of them (persistent_launch.cpp).
#pragma once

#include "cuda/kernel/persistent.h"

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {

constexpr int kBlockThreads = kWarps * kWarpLanes;

// By the id of the cell, because its page is another type in every file.
template <int kId, typename T>
struct PersistentKernels {
  static std::int64_t resident_forward(std::int64_t hidden, int tiles);
  static std::int64_t resident_backward(std::int64_t hidden, int tiles);
  static bool launch_forward(
      const ForwardCalls<T>& calls, std::int64_t groups, int tiles, Stream stream);
  static bool launch_backward(
      const BackwardCalls<T>& calls, std::int64_t groups, int tiles, Stream stream);
};

// How many thread blocks of a kernel with so many bytes of shared memory the device runs at once.
std::int64_t resident_blocks(const void* kernel, std::size_t shared_bytes);

// A grid all of whose blocks run at once; false where that is refused. `calls` is the parameter.
struct PersistentGrid {
  std::int64_t hidden, groups;
  int calls;
};
bool launch_cooperatively(
    const void* kernel,
    const void* calls,
    const PersistentGrid& grid,
    std::size_t shared_bytes,
    Stream stream);

}  // namespace lltm::cuda
