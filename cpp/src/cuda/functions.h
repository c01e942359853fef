// Functions of the CUDA driver, cuBLAS and PyTorch's CUDA library, found at their first use.
//
// liblltm neither links CUDA libraries nor includes their headers: one build serves PyTorch without
// CUDA and with each CUDA version. Functions have CUDA's names; types and constants have the
// stable ABI of cuda.h and cublas_api.h. test_nvrtc.cpp compares the constants of cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {

// 0 means success.
struct Functions {
  using Address = std::uint64_t;  // in device memory

  // The driver.
  int (*cuCtxGetDevice)(int* device);
  int (*cuCtxSetCurrent)(void* context);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuEventCreate)(void** event, unsigned flags);
  int (*cuEventRecord)(void* event, void* stream);
  int (*cuFuncGetAttribute)(int* value, int attribute, void* function);
  int (*cuFuncSetAttribute)(void* function, int attribute, int value);
  int (*cuGetErrorString)(int result, const char** text);
  int (*cuLaunchCooperativeKernel)(
      void* function,
      unsigned grid_x,
      unsigned grid_y,
      unsigned grid_z,
      unsigned block_x,
      unsigned block_y,
      unsigned block_z,
      unsigned shared_bytes,
      void* stream,
      void** parameters);
  int (*cuLaunchKernel)(
      void* function,
      unsigned grid_x,
      unsigned grid_y,
      unsigned grid_z,
      unsigned block_x,
      unsigned block_y,
      unsigned block_z,
      unsigned shared_bytes,
      void* stream,
      void** parameters,
      void** extra);
  int (*cuMemHostAlloc)(void** memory, std::size_t bytes, unsigned flags);
  int (*cuMemcpyDtoHAsync_v2)(void* to, Address from, std::size_t bytes, void* stream);
  int (*cuMemsetD2D8Async)(
      Address to,
      std::size_t pitch,
      unsigned char value,
      std::size_t width,
      std::size_t height,
      void* stream);
  int (*cuMemsetD8Async)(Address to, unsigned char value, std::size_t bytes, void* stream);
  int (*cuModuleGetFunction)(void** function, void* module, const char* name);
  int (*cuModuleLoadData)(void** module, const void* image);
  int (*cuStreamIsCapturing)(void* stream, int* status);
  int (*cuStreamSynchronize)(void* stream);
  int (*cuStreamWaitEvent)(void* stream, void* event, unsigned flags);
  int (*cuThreadExchangeStreamCaptureMode)(int* mode);

  int (*cublasGemmEx_64)(
      void* handle,
      int op_a,
      int op_b,
      std::int64_t m,
      std::int64_t n,
      std::int64_t k,
      const void* alpha,
      const void* a,
      int a_type,
      std::int64_t lda,
      const void* b,
      int b_type,
      std::int64_t ldb,
      const void* beta,
      void* c,
      int c_type,
      std::int64_t ldc,
      int compute_type,
      int algorithm);
  int (*cublasGetMathMode)(void* handle, int* mode);
  int (*cublasSetMathMode)(void* handle, int mode);

  // PyTorch's C interface (torch/csrc/stable/c/shim.h).
  int (*aoti_torch_get_current_cuda_stream)(std::int32_t device, void** stream);
  int (*torch_get_current_cuda_blas_handle)(void** handle);
};

// CUresult.
constexpr int kOutOfMemory = 2, kCooperativeLaunchTooLarge = 720, kLaunchOutOfResources = 701;
constexpr int kCaptureModeRelaxed = 2;                      // CUstreamCaptureMode
constexpr int kLocalBytes = 3, kMaxDynamicSharedBytes = 8;  // CUfunction_attribute
constexpr unsigned kHostAllocPortable = 1, kHostAllocDeviceMap = 2;
constexpr unsigned kEventDisableTiming = 2;

enum class DeviceAttribute : int {  // CUdevice_attribute
  kMultiprocessorCount = 16,
  kL2CacheBytes = 38,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kCooperativeLaunch = 95,
  kMaxSharedBytes = 97,  // per thread block, on request
};

enum CudaDataType : int { kR32F = 0, kR64F = 1, kR16F = 2, kR16BF = 14 };
enum CublasOperation : int { kNotTransposed = 0, kTransposed = 1 };
enum CublasCompute : int { kCompute32F = 68, kCompute64F = 70 };
enum CublasMath : int { kDefaultMath = 0, kTf32Math = 3, kNoReducedPrecisionReduction = 16 };
constexpr int kCublasDefaultAlgorithm = -1;

// Null if all functions were found, otherwise the reason.
const char* why_no_functions();
const Functions& functions();

}  // namespace lltm::cuda
