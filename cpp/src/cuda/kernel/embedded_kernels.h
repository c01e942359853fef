// Kernels of built-in cells that LLTM_CUDA_EMBED compiles with the library.
#pragma once

#include "cuda/kernel/compiled.h"
#include "cuda/kernel/elementwise_kernels.h"

#include <c10/util/BFloat16.h>

#include <set>
#include <vector>

namespace lltm::cuda {

// All element-wise kernels, and the persistent kernels for these H.
inline std::set<KernelForm> embedded_kernels(
    const CellInfo& cell, const std::vector<std::int64_t>& sizes) {
  std::set<KernelForm> forms;
  const auto add_persistent = [&]<typename Args>(Args*) {
    using T = typename Args::Element;
    for (const std::int64_t hidden : sizes) {
      for (const int tiles : kTileCounts) {
        for (const int directions : {1, 2}) {
          for (const bool tf32 : {false, true}) {
            if (tiles > most_tiles<T>(directions) || (tf32 && sizeof(T) != sizeof(float))) continue;
            PersistentKernel kernel = persistent_kernel<Args>(cell, hidden, tiles, tf32);
            kernel.directions = directions;
            forms.insert(form_of<Args>(kernel));
          }
        }
      }
    }
  };
  const auto add = [&]<typename T>(T*) {
    constexpr KernelType kType = kKernelType<T>, kCompute = kKernelType<compute_t<T>>;
    for (const int width : {1, kWide<T>}) {
      forms.insert({&cell, /*backward=*/false, kType, kCompute, width, cell.forward().stages});
      for (const KernelType state : {kCompute, kType}) {
        forms.insert({&cell, /*backward=*/true, kType, state, width, cell.backward().stages});
      }
    }
    if constexpr (sizeof(T) <= sizeof(float)) {
      add_persistent(static_cast<PersistentForwardArgs<T>*>(nullptr));
      add_persistent(static_cast<PersistentBackwardArgs<T>*>(nullptr));
    }
  };
  add(static_cast<double*>(nullptr));
  add(static_cast<float*>(nullptr));
  add(static_cast<c10::Half*>(nullptr));
  add(static_cast<c10::BFloat16*>(nullptr));
  return forms;
}

}  // namespace lltm::cuda
