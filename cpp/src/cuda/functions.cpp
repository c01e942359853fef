#include "cuda/functions.h"

#include <dlfcn.h>

#include <string>

namespace lltm::cuda {
namespace {

struct Found {
  Functions functions = {};
  std::string why_not;

  // A process with CUDA tensors has loaded both libraries. PyTorch's links cuBLAS, which is
  // therefore searched too.
  Found() {
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* const torch = ::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (driver == nullptr || torch == nullptr) {
      why_not = torch == nullptr ? "PyTorch has no CUDA" : "there is no CUDA driver, libcuda.so.1";
      return;
    }
#define LLTM_FIND(library, name) find(library, #name, functions.name)
    LLTM_FIND(driver, cuCtxGetDevice);
    LLTM_FIND(driver, cuCtxSetCurrent);
    LLTM_FIND(driver, cuDeviceGetAttribute);
    LLTM_FIND(driver, cuDevicePrimaryCtxRetain);
    LLTM_FIND(driver, cuEventCreate);
    LLTM_FIND(driver, cuEventRecord);
    LLTM_FIND(driver, cuFuncGetAttribute);
    LLTM_FIND(driver, cuFuncSetAttribute);
    LLTM_FIND(driver, cuGetErrorString);
    LLTM_FIND(driver, cuLaunchCooperativeKernel);
    LLTM_FIND(driver, cuLaunchKernel);
    LLTM_FIND(driver, cuMemHostAlloc);
    LLTM_FIND(driver, cuMemcpyDtoHAsync_v2);
    LLTM_FIND(driver, cuMemsetD2D8Async);
    LLTM_FIND(driver, cuMemsetD8Async);
    LLTM_FIND(driver, cuModuleGetFunction);
    LLTM_FIND(driver, cuModuleLoadData);
    LLTM_FIND(driver, cuStreamIsCapturing);
    LLTM_FIND(driver, cuStreamSynchronize);
    LLTM_FIND(driver, cuStreamWaitEvent);
    LLTM_FIND(driver, cuThreadExchangeStreamCaptureMode);
    LLTM_FIND(torch, cublasGemmEx_64);
    LLTM_FIND(torch, cublasGetMathMode);
    LLTM_FIND(torch, cublasSetMathMode);
    LLTM_FIND(torch, aoti_torch_get_current_cuda_stream);
    LLTM_FIND(torch, torch_get_current_cuda_blas_handle);
#undef LLTM_FIND
  }

  template <typename Function>
  void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    if (function == nullptr) why_not = std::string("CUDA has no function ") + name;
  }
};

const Found& found() {
  static const Found found;
  return found;
}

}  // namespace

const char* why_no_functions() {
  const std::string& why_not = found().why_not;
  return why_not.empty() ? nullptr : why_not.c_str();
}

const Functions& functions() {
  return found().functions;
}

}  // namespace lltm::cuda
