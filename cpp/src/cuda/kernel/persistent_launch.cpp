#include "cuda/kernel/persistent_launch.h"

#include "cell/cells.h"
#include "cuda/kernel/driver.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <new>

namespace lltm::cuda {
namespace {

// One word for each device, in host memory that every device writes to; never freed, because
// kernels may outlive everything else. A process has few devices.
constexpr int kMostDevices = 64;
std::atomic<std::uint32_t*> failure_words[kMostDevices];

std::atomic<std::uint32_t*>& failure_word_of_device() {
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  TORCH_CHECK(device < kMostDevices, "lltm: too many GPUs");
  return failure_words[device];
}

// A capture forbids calls that might wait for other work, as loading a kernel's module and
// allocating do. None of those here touches what is captured.
using OutsideOfCapture = c10::cuda::CUDAStreamCaptureModeGuard;

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// Those that this process and context may use: a green context has some of the device's. The
// device's number where the driver can't say.
int own_multiprocessors() {
  const int all = attribute(cudaDevAttrMultiProcessorCount);
#if CUDART_VERSION >= 12050
  static const auto get_context = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  static const auto get_resource =
      driver_function<decltype(&cuCtxGetDevResource)>("cuCtxGetDevResource");
  CUcontext context = nullptr;
  CUdevResource resource = {};
  if (get_context != nullptr && get_resource != nullptr && get_context(&context) == CUDA_SUCCESS &&
      get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
    return std::min(all, static_cast<int>(resource.sm.smCount));
  }
#endif
  return all;
}

}  // namespace

std::uint32_t* failure_word() {
  std::atomic<std::uint32_t*>& word = failure_word_of_device();
  if (std::uint32_t* const known = word.load()) return known;
  const OutsideOfCapture outside(cudaStreamCaptureModeRelaxed);
  void* memory = nullptr;
  C10_CUDA_CHECK(
      cudaHostAlloc(&memory, sizeof(std::uint32_t), cudaHostAllocMapped | cudaHostAllocPortable));
  auto* const made = new (memory) std::uint32_t(0);
  std::uint32_t* expected = nullptr;
  if (word.compare_exchange_strong(expected, made)) return made;
  C10_CUDA_CHECK(cudaFreeHost(memory));  // another thread was first
  return expected;
}

bool take_failure() {
  std::uint32_t* const word = failure_word_of_device().load();
  return word != nullptr && std::atomic_ref(*word).exchange(0) != 0;
}

// More than 48 KiB of shared memory is for kernels that ask for it.
std::int64_t resident_blocks(const void* kernel, std::size_t shared_bytes) {
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
  return std::int64_t{blocks} * own_multiprocessors();
}

bool launch_cooperatively(
    const void* kernel,
    const void* calls,
    const PersistentGrid& grid,
    std::size_t shared_bytes,
    Stream stream) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>((grid.hidden + kSliceUnits - 1) / kSliceUnits);
  config.gridDim.y = static_cast<unsigned>(grid.groups);
  config.gridDim.z = static_cast<unsigned>(grid.calls);
  config.blockDim.x = kBlockThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* parameters[] = {const_cast<void*>(calls)};
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel, parameters);
  if (status == cudaErrorCooperativeLaunchTooLarge || status == cudaErrorLaunchOutOfResources) {
    (void)cudaGetLastError();  // nothing has failed
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

GpuKind current_gpu() {
  return {
      10 * attribute(cudaDevAttrComputeCapabilityMajor) +
          attribute(cudaDevAttrComputeCapabilityMinor),
      attribute(cudaDevAttrMultiProcessorCount)};
}

void mark_absent(void* data, std::int64_t bytes, Stream stream) {
  C10_CUDA_CHECK(cudaMemsetAsync(
      data, 0xFF, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream.handle)));
}

// ---- to the kernels of a cell -----------------------------------------------

template <typename T>
std::int64_t resident_forward_blocks(const CellInfo& cell, std::int64_t hidden, int tiles) {
  return visit_cell(cell, [&]<typename Page>(Page) {
    return PersistentKernels<Page::kCell.id, T>::resident_forward(hidden, tiles);
  });
}

template <typename T>
std::int64_t resident_backward_blocks(const CellInfo& cell, std::int64_t hidden, int tiles) {
  return visit_cell(cell, [&]<typename Page>(Page) {
    return PersistentKernels<Page::kCell.id, T>::resident_backward(hidden, tiles);
  });
}

template <typename T>
bool launch_persistent_forward(
    const CellInfo& cell,
    const ForwardCalls<T>& calls,
    std::int64_t groups,
    int tiles,
    Stream stream) {
  return visit_cell(cell, [&]<typename Page>(Page) {
    return PersistentKernels<Page::kCell.id, T>::launch_forward(calls, groups, tiles, stream);
  });
}

template <typename T>
bool launch_persistent_backward(
    const CellInfo& cell,
    const BackwardCalls<T>& calls,
    std::int64_t groups,
    int tiles,
    Stream stream) {
  return visit_cell(cell, [&]<typename Page>(Page) {
    return PersistentKernels<Page::kCell.id, T>::launch_backward(calls, groups, tiles, stream);
  });
}

#define LLTM_PERSISTENT_OF(T)                                                            \
  template std::int64_t resident_forward_blocks<T>(const CellInfo&, std::int64_t, int);  \
  template std::int64_t resident_backward_blocks<T>(const CellInfo&, std::int64_t, int); \
  template bool launch_persistent_forward(                                               \
      const CellInfo&, const ForwardCalls<T>&, std::int64_t, int, Stream);               \
  template bool launch_persistent_backward(                                              \
      const CellInfo&, const BackwardCalls<T>&, std::int64_t, int, Stream);
LLTM_PERSISTENT_OF(float)
LLTM_PERSISTENT_OF(c10::Half)
LLTM_PERSISTENT_OF(c10::BFloat16)
#undef LLTM_PERSISTENT_OF

}  // namespace lltm::cuda
