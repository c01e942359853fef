// What gemm.cpp and operators.cpp take from the headers of cuBLAS, and from those of ATen and c10
// that need CUDA: CMakeLists.txt puts this file in their places, so that the host tests compile
// them unchanged. The functions are plain loops on the CPU, in cuda_on_host.cpp.
//
// Enumerators have cuBLAS's values where they are combined, by bits.
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
// Refuses what cuBLAS would (leading dimensions that are too short for the matrix or do not
// fit 32 bits, unsupported types) and GEMMs that need no call: with M, N or K zero.
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

namespace at::cuda {
// As ATen's, sets the handle's mode anew: TF32 where that is allowed.
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
inline bool capturing = false;
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
// Whether NVRTC is there, for cells that users have written.
inline bool has_nvrtc = true;
// Has all built-in cells check their kernels, which else the first call of each does: tests count
// what they call. Before the first test, and after those that make the backend forget it.
void check_kernels_now();
// What is wrong with the kernels: a result is, or they cannot be launched.
enum class Fault { none, wrong, fails };
inline Fault fault = Fault::none, persistent_fault = Fault::none;
// torch.backends.cuda.matmul.allow_tf32.
inline bool allow_tf32 = false;
// The mode of the last GEMM.
inline cublasMath_t last_math_mode = CUBLAS_DEFAULT_MATH;
// GEMMs so far, and those of them that cuBLAS's kernels for 16-byte accesses cannot take: by its
// documentation, where a matrix or its leading dimension, or its extent in memory, is no multiple.
inline int64_t gemm_calls = 0, unaligned_gemm_calls = 0;
// Whether a GEMM adds up its products one after another, rounding each sum, as cuBLAS may; else
// sums are exact, or nearly.
inline bool sums_in_order = false;

// Of the GPU: how many thread blocks of a persistent kernel run at once.
inline int64_t multiprocessors = 132;
// What the next launch draws its schedule from; each draws another.
inline uint64_t schedule_seed = 1;
// Launches of persistent kernels so far.
inline int64_t persistent_launches = 0;
// What was made absent: after how many launches, and how many bytes.
inline std::vector<std::pair<int64_t, int64_t>> filled;
// How many more are not refused.
inline int64_t launches_left = std::numeric_limits<int64_t>::max();
}  // namespace lltm_test

#define C10_CUDA_CHECK(status) TORCH_CHECK((status) == cudaSuccess, #status)
#define TORCH_CUDABLAS_CHECK(status) TORCH_CHECK((status) == CUBLAS_STATUS_SUCCESS, #status)
