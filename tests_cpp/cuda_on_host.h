// Replaces the CUDA headers of cuBLAS, ATen and c10: host tests compile gemm.cpp and backend.cpp
// unchanged. Enumerators combined as bits have cuBLAS's values.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDataType_t { CUDA_R_64F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
using cudaStream_t = void*;

cudaError_t cudaMemset2DAsync(
    void* data, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream);

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_INVALID_VALUE };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT };
enum cublasMath_t {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_TF32_TENSOR_OP_MATH = 3,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
};

struct HostCublas {
  cublasMath_t math_mode;
};
using cublasHandle_t = HostCublas*;

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode);
// Rejects empty GEMMs and, like cuBLAS, leading dimensions too small or above 32 bits and
// unsupported types.
cublasStatus_t cublasGemmEx_64(
    cublasHandle_t handle,
    cublasOperation_t op_a,
    cublasOperation_t op_b,
    int64_t m,
    int64_t n,
    int64_t k,
    const void* alpha,
    const void* a,
    cudaDataType_t a_type,
    int64_t lda,
    const void* b,
    cudaDataType_t b_type,
    int64_t ldb,
    const void* beta,
    void* c,
    cudaDataType_t c_type,
    int64_t ldc,
    cublasComputeType_t compute_type,
    cublasGemmAlgo_t algorithm);

struct HostProperties {
  int l2CacheSize = 48 << 20;
};

namespace at::cuda {
inline const HostProperties* getCurrentDeviceProperties() {
  static const HostProperties properties;
  return &properties;
}
// Sets TF32 mode if allowed, like ATen's.
cublasHandle_t getCurrentCUDABlasHandle();
}  // namespace at::cuda

namespace c10::cuda {
inline cudaStream_t getCurrentCUDAStream() {
  return nullptr;
}
struct CUDAGuard {
  explicit CUDAGuard(at::Device) {}
};
enum class CaptureStatus { None, Active };
// As in a graph's capture, kernels run unchecked except in test_cuda_self_check.cpp.
inline bool capturing = true;
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return capturing ? CaptureStatus::Active : CaptureStatus::None;
}
enum class SyncDebugMode { L_DISABLED, L_WARN, L_ERROR };
struct WarningState {
  SyncDebugMode mode = SyncDebugMode::L_DISABLED;
  SyncDebugMode get_sync_debug_mode() const { return mode; }
  void set_sync_debug_mode(SyncDebugMode to) { mode = to; }
};
inline WarningState& warning_state() {
  static WarningState state;
  return state;
}
}  // namespace c10::cuda

namespace lltm_test {
inline bool has_nvrtc = true;
inline void* stream = nullptr;  // the current stream
// tf32: GEMMs or kernels use TF32 even if PyTorch forbids it.
enum class Fault { none, wrong, fails, tf32 };
inline Fault fault = Fault::none, persistent_fault = Fault::none;
inline int faulty_tiles = 0;  // limits persistent_fault, unless 0
// torch.backends.cuda.matmul.allow_tf32.
inline bool allow_tf32 = false;
inline cublasMath_t last_math_mode = CUBLAS_DEFAULT_MATH;
// A matrix address, leading dimension or extent is not a multiple of 16 bytes, as cuBLAS's 16-byte
// kernels require.
inline int64_t gemm_calls = 0, unaligned_gemm_calls = 0;
// GEMMs round each partial sum in order, as cuBLAS may; otherwise sums are nearly exact.
inline bool sums_in_order = false;

// Concurrent thread blocks of a persistent kernel, and their shared memory.
inline int64_t multiprocessors = 132, shared_bytes = 227 << 10;
// Only one unit of K has its weights in registers.
inline bool prefers_shared = false;
// Of the next launch's schedule; changed by each launch.
inline uint64_t schedule_seed = 1;
inline int64_t persistent_launches = 0;
// For each fill with absent words: earlier launches, and bytes.
inline std::vector<std::pair<int64_t, int64_t>> filled;
// Launches before launches fail.
inline int64_t launches_left = std::numeric_limits<int64_t>::max();
}  // namespace lltm_test

#define C10_CUDA_CHECK(status) TORCH_CHECK((status) == cudaSuccess, #status)
#define TORCH_CUDABLAS_CHECK(status) TORCH_CHECK((status) == CUBLAS_STATUS_SUCCESS, #status)
