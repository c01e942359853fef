// What gemm.cpp takes from the headers of cuBLAS, and from those of ATen and c10 that need
// CUDA: CMakeLists.txt puts this file in their places, so that the host tests compile
// gemm.cpp unchanged. The functions are plain loops on the CPU, in cuda_on_host.cpp.
//
// Enumerators have cuBLAS's values where they are combined, by bits.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDataType_t { CUDA_R_64F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
// A stream other than the default one is made once, and has a number.
struct HostStream {
  int number;
};
using cudaStream_t = HostStream*;
enum { cudaStreamNonBlocking = 1 };

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
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
  int stream;  // of its GEMMs
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
// As ATen's, sets the handle's mode anew, TF32 where that is allowed, and its stream.
cublasHandle_t getCurrentCUDABlasHandle();
}  // namespace at::cuda

namespace lltm_test {
// What is queued runs at once, on whatever stream. But on a GPU it may run before or after all of
// another stream that it was not ordered with by events: what must not be is found by clocks. A
// stream's clock says how many pieces of each stream's work are done before what it does next.
constexpr int kStreams = 4;
using Clock = std::array<int64_t, kStreams>;
inline Clock clocks[kStreams] = {};
inline int current_stream = 0, streams_made = 0;
// Of the first stream: what other streams do has to come after it. ATen's operations are not seen,
// so a call says with this that its operands are there.
inline int64_t operands_made = 0;
// Work of a stream that reads or writes memory. Throws where other work, that may run at the same
// time, does so too, and one of the two writes.
void access_memory(int stream, const void* data, int64_t bytes, bool writes);
// Whether the first stream has waited for all that the others did.
inline bool all_is_joined() {
  for (int k = 1; k < kStreams; ++k) {
    if (clocks[0][k] < clocks[k][k]) return false;
  }
  return true;
}
inline bool capturing = false;
}  // namespace lltm_test

namespace c10::cuda {
struct CUDAStream {
  int number;
  operator cudaStream_t() const { return nullptr; }
  int device_index() const { return 0; }
};
inline CUDAStream getCurrentCUDAStream() {
  return {lltm_test::current_stream};
}
inline CUDAStream getStreamFromExternal(cudaStream_t stream, int /*device*/) {
  return {stream->number};
}
enum class CaptureStatus { None, Active };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return lltm_test::capturing ? CaptureStatus::Active : CaptureStatus::None;
}
class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream)
      : before_(std::exchange(lltm_test::current_stream, stream.number)) {}
  ~CUDAStreamGuard() { lltm_test::current_stream = before_; }
  CUDAStreamGuard(const CUDAStreamGuard&) = delete;
  CUDAStreamGuard& operator=(const CUDAStreamGuard&) = delete;

 private:
  int before_;
};
}  // namespace c10::cuda

namespace at::cuda {
class CUDAEvent {
 public:
  void record(c10::cuda::CUDAStream stream) { clock_ = lltm_test::clocks[stream.number]; }
  void block(c10::cuda::CUDAStream stream) const {
    lltm_test::Clock& clock = lltm_test::clocks[stream.number];
    for (size_t k = 0; k < clock.size(); ++k) clock[k] = std::max(clock[k], clock_[k]);
  }

 private:
  lltm_test::Clock clock_ = {};
};
}  // namespace at::cuda

namespace lltm_test {
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
// Launches of persistent kernels so far, and those of them of two calls.
inline int64_t persistent_launches = 0, launches_of_two = 0;
// GEMMs on another stream than the first.
inline int64_t gemms_beside = 0;
// How many more are not refused.
inline int64_t launches_left = std::numeric_limits<int64_t>::max();
// What the last of them would sleep between two polls.
inline int last_poll_nanoseconds = 0;
}  // namespace lltm_test

#define C10_CUDA_CHECK(status) TORCH_CHECK((status) == cudaSuccess, #status)
#define TORCH_CUDABLAS_CHECK(status) TORCH_CHECK((status) == CUBLAS_STATUS_SUCCESS, #status)
