// Functions of CUDA's driver, which a program need not be linked to.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace lltm::cuda {

// As this toolkit's headers declare it; null where the driver has none.
template <typename Function>
Function driver_function([[maybe_unused]] const char* name) {
#if CUDART_VERSION >= 12050
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, CUDART_VERSION, cudaEnableDefault, &found);
  if (status != cudaSuccess) (void)cudaGetLastError();
  const bool there = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<Function>(function) : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace lltm::cuda
