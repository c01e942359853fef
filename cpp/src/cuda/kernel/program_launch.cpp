#include "cuda/kernel/program_launch.h"

#include "cuda/kernel/nvrtc.h"
#include "cuda/kernel/program_source.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

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
  LLTM_FIND(cuGetErrorString);
  LLTM_FIND(cuLaunchKernel);
  LLTM_FIND(cuModuleGetFunction);
  LLTM_FIND(cuModuleLoadData);
#undef LLTM_FIND

  bool is_complete() const {
    return cuCtxGetCurrent != nullptr && cuGetErrorString != nullptr && cuLaunchKernel != nullptr &&
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

using Form = std::tuple<const CellPrograms*, ProgramType, ProgramType, int>;
struct Functions {
  CUfunction forward = nullptr, backward = nullptr;
};

const char* name_of(ProgramType type) {
  constexpr const char* kNames[] = {"double", "float", "lltm::cuda::Half", "lltm::cuda::BFloat16"};
  return kNames[static_cast<int>(type)];
}

std::string compiled(const ProgramKernel& kernel, int capability) {
  const ProgramTypes types = {name_of(kernel.tensor), name_of(kernel.state)};
  try {
    return compile(print_kernels(kernel.cell, types, kernel.width), capability);
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(
        false,
        "lltm: the kernels of the cell '",
        kernel.cell.title(),
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
Functions loaded(const std::string& code) {
  const c10::cuda::CUDAStreamCaptureModeGuard outside(cudaStreamCaptureModeRelaxed);
  CUmodule module = nullptr;
  check(driver().cuModuleLoadData(&module, code.data()));
  Functions kernels;
  check(driver().cuModuleGetFunction(&kernels.forward, module, "lltm_forward"));
  check(driver().cuModuleGetFunction(&kernels.backward, module, "lltm_backward"));
  return kernels;
}

// Never destroyed: other threads may still run when static objects are destroyed.
struct Cache {
  std::mutex mutex;
  std::map<std::pair<Form, int>, std::string> codes;  // by compute capability
  std::map<std::pair<Form, c10::DeviceIndex>, Functions> kernels;
};

CUfunction find(const ProgramKernel& kernel) {
  static Cache& cache = *new Cache;
  const Form form = {kernel.cell.programs, kernel.tensor, kernel.state, kernel.width};
  const std::lock_guard<std::mutex> lock(cache.mutex);
  Functions& kernels = cache.kernels[{form, c10::cuda::current_device()}];
  if (kernels.forward == nullptr) {
    const int capability = compute_capability();
    std::string& code = cache.codes[{form, capability}];
    if (code.empty()) code = compiled(kernel, capability);
    kernels = loaded(code);
  }
  return kernel.backward ? kernels.backward : kernels.forward;
}

}  // namespace

const char* why_no_programs() {
  if (const char* const why_not = why_no_nvrtc()) return why_not;
  return driver().is_complete() ? nullptr : "the CUDA driver lacks a required function";
}

void launch_program(
    const ProgramKernel& kernel,
    std::int64_t blocks,
    int threads,
    void** parameters,
    Stream stream) {
  need_context();
  check(
      driver().cuLaunchKernel(
          find(kernel),
          static_cast<unsigned>(blocks),
          1,
          1,
          static_cast<unsigned>(threads),
          1,
          1,
          /*sharedMemBytes=*/0,
          static_cast<CUstream>(stream.handle),
          parameters,
          /*extra=*/nullptr));
}

}  // namespace lltm::cuda
