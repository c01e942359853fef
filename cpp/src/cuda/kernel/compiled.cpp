#include "cuda/kernel/compiled.h"

#include "cuda/kernel/nvrtc.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lltm::cuda {
namespace {

// ---- CUDA driver, loaded at run time (liblltm does not link it) ----------------

// Null if missing. The signature is that in this toolkit's headers.
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

struct Driver {
#define LLTM_FIND(name) decltype(&::name) name = driver_function<decltype(&::name)>(#name)
  LLTM_FIND(cuCtxGetCurrent);
  LLTM_FIND(cuFuncSetAttribute);
  LLTM_FIND(cuGetErrorString);
  LLTM_FIND(cuLaunchKernelEx);
  LLTM_FIND(cuModuleGetFunction);
  LLTM_FIND(cuModuleLoadData);
#undef LLTM_FIND

  bool is_complete() const {
    return cuCtxGetCurrent != nullptr && cuFuncSetAttribute != nullptr &&
           cuGetErrorString != nullptr && cuLaunchKernelEx != nullptr &&
           cuModuleGetFunction != nullptr && cuModuleLoadData != nullptr;
  }
};

const Driver& driver() {
  static const Driver driver;
  return driver;
}

void check(CUresult result) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().cuGetErrorString(result, &text);
  TORCH_CHECK(false, "CUDA driver error: ", text == nullptr ? "unknown" : text);
}

// A thread that has not called the CUDA runtime has no current context.
void need_context() {
  CUcontext context = nullptr;
  check(driver().cuCtxGetCurrent(&context));
  if (context == nullptr) C10_CUDA_CHECK(cudaSetDevice(c10::cuda::current_device()));
}

// Returns 90 for 9.0.
int compute_capability() {
  const auto attribute = [](cudaDeviceAttr which) {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, c10::cuda::current_device()));
    return value;
  };
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
         attribute(cudaDevAttrComputeCapabilityMinor);
}

std::string compiled(const KernelForm& form, int capability) {
  try {
    return compile(print_kernel(form), capability);
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(
        false,
        "lltm: a kernel of the cell '",
        form.cell->title(),
        "' could not be compiled for compute capability ",
        capability / 10,
        ".",
        capability % 10,
        ": ",
        error.what());
  }
}

// Loads the code into the current device's context. A capture otherwise forbids loading, which may
// wait for other work.
CUfunction loaded(const std::string& code, const KernelForm& form, std::int64_t shared_bytes) {
  const c10::cuda::CUDAStreamCaptureModeGuard outside(cudaStreamCaptureModeRelaxed);
  CUmodule module = nullptr;
  check(driver().cuModuleLoadData(&module, code.data()));
  CUfunction function = nullptr;
  check(driver().cuModuleGetFunction(&function, module, kernel_name(form)));
  // More than 48 KiB must be requested.
  check(
      driver().cuFuncSetAttribute(
          function,
          CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
          static_cast<int>(shared_bytes)));
  return function;
}

// A kernel's code by compute capability and functions by device. Its lock is held while it is
// compiled: only calls of the same kernel wait.
struct CompiledKernel {
  std::mutex mutex;
  std::map<int, std::string> codes;
  std::map<c10::DeviceIndex, CUfunction> functions;

  CUfunction function(const KernelForm& form, std::int64_t shared_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    CUfunction& function = functions[c10::cuda::current_device()];
    if (function == nullptr) {
      const int capability = compute_capability();
      std::string& code = codes[capability];
      if (code.empty()) code = compiled(form, capability);
      function = loaded(code, form, shared_bytes);
    }
    return function;
  }
};

CompiledKernel& kernel_of(const KernelForm& form) {
  // Never destroyed: other threads may still run when static objects are destroyed.
  static std::mutex& mutex = *new std::mutex;
  static auto& kernels = *new std::map<KernelForm, CompiledKernel>;
  const std::lock_guard<std::mutex> lock(mutex);
  return kernels[form];
}

// Remembers the last kernel: the steps of a sequence launch the same one, without a lock.
CUfunction find(const KernelForm& form, std::int64_t shared_bytes) {
  struct Found {
    KernelForm form = {};
    c10::DeviceIndex device = -1;
    CUfunction function = nullptr;
  };
  thread_local Found last;
  const c10::DeviceIndex device = c10::cuda::current_device();
  if (last.device != device || last.form != form) {
    last = {form, device, kernel_of(form).function(form, shared_bytes)};
  }
  return last.function;
}

}  // namespace

const char* why_no_compiled_kernels() {
  if (const char* const why_not = why_no_nvrtc()) return why_not;
  return driver().is_complete() ? nullptr : "the CUDA driver lacks a required function";
}

bool launch_compiled(const KernelForm& form, const Grid& grid, void** parameters, Stream stream) {
  need_context();
  CUlaunchAttribute cooperative = {};
  cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  cooperative.value.cooperative = 1;
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(grid.x);
  config.gridDimY = static_cast<unsigned>(grid.y);
  config.gridDimZ = static_cast<unsigned>(grid.z);
  config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = static_cast<unsigned>(grid.threads);
  config.sharedMemBytes = static_cast<unsigned>(grid.shared_bytes);
  config.hStream = static_cast<CUstream>(stream.handle);
  config.attrs = &cooperative;
  config.numAttrs = grid.cooperative ? 1 : 0;
  const CUresult result = driver().cuLaunchKernelEx(
      &config, find(form, grid.shared_bytes), parameters, /*extra=*/nullptr);
  if (result == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE ||
      result == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES) {
    if (grid.cooperative) return false;
  }
  check(result);
  return true;
}

}  // namespace lltm::cuda
