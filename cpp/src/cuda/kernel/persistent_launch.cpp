#include "cuda/kernel/persistent_launch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <atomic>
#include <new>

namespace lltm::cuda {
namespace {

// In host memory that every device can write; null until a kernel may use it.
std::atomic<std::uint32_t*> failure_word_if_any;

// During a capture, CUDA rejects loading a kernel's module and allocating, which may wait for other
// work. These calls do not affect the captured work.
using OutsideOfCapture = c10::cuda::CUDAStreamCaptureModeGuard;

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

// Never freed: kernels may run until the process ends.
std::uint32_t* failure_word() {
  static std::uint32_t* const word = [] {
    const OutsideOfCapture outside(cudaStreamCaptureModeRelaxed);
    void* memory = nullptr;
    C10_CUDA_CHECK(
        cudaHostAlloc(&memory, sizeof(std::uint32_t), cudaHostAllocMapped | cudaHostAllocPortable));
    failure_word_if_any = new (memory) std::uint32_t(0);
    return failure_word_if_any.load();
  }();
  return word;
}

bool take_failure() {
  std::uint32_t* const word = failure_word_if_any.load();
  return word != nullptr && std::atomic_ref(*word).exchange(0) != 0;
}

// More than 48 KiB of shared memory must be requested.
std::int64_t resident_blocks_of(const void* kernel, std::size_t shared_bytes) {
  const OutsideOfCapture outside(cudaStreamCaptureModeRelaxed);
  const auto bytes = static_cast<int>(shared_bytes);
  if (attribute(cudaDevAttrComputeCapabilityMajor) < 8 ||
      attribute(cudaDevAttrCooperativeLaunch) == 0 ||
      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) < bytes) {
    return 0;
  }
  int blocks = 0;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  C10_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBlockThreads, shared_bytes));
  return std::int64_t{blocks} * attribute(cudaDevAttrMultiProcessorCount);
}

bool launch_cooperatively(
    const void* kernel,
    const void* args,
    std::int64_t slices,
    std::int64_t groups,
    int directions,
    std::size_t shared_bytes,
    Stream stream) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>(slices);
  config.gridDim.y = static_cast<unsigned>(groups);
  config.gridDim.z = static_cast<unsigned>(directions);
  config.blockDim.x = kBlockThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* parameters[] = {const_cast<void*>(args)};
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel, parameters);
  if (status == cudaErrorCooperativeLaunchTooLarge || status == cudaErrorLaunchOutOfResources) {
    (void)cudaGetLastError();  // clears the error
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

void mark_absent(void* data, std::int64_t bytes, Stream stream) {
  C10_CUDA_CHECK(cudaMemsetAsync(
      data, 0xFF, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream.handle)));
}

bool has_persistent_kernels(const CellInfo& cell) {
  return visit_persistent_cell(cell, [](auto) {});
}

template <typename Args>
std::int64_t resident_blocks(const CellInfo& cell, std::int64_t hidden, int tiles) {
  std::int64_t blocks = 0;
  visit_persistent_cell(cell, [&]<typename Definition>(Definition) {
    blocks = PersistentKernels<Definition::kCell.id, Args>::resident(hidden, tiles);
  });
  return blocks;
}

template <typename Args>
bool launch_persistent(
    const CellInfo& cell,
    const DirectionArgs<Args>& args,
    std::int64_t groups,
    int tiles,
    Stream stream) {
  bool launched = false;
  visit_persistent_cell(cell, [&]<typename Definition>(Definition) {
    launched = PersistentKernels<Definition::kCell.id, Args>::launch(args, groups, tiles, stream);
  });
  return launched;
}

#define LLTM_PERSISTENT_OF(Args)                                                   \
  template std::int64_t resident_blocks<Args>(const CellInfo&, std::int64_t, int); \
  template bool launch_persistent(                                                 \
      const CellInfo&, const DirectionArgs<Args>&, std::int64_t, int, Stream);
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::BFloat16>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::BFloat16>)
#undef LLTM_PERSISTENT_OF

}  // namespace lltm::cuda
