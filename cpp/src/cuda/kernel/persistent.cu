// The persistent kernels and their launches; persistent_kernels.h has the code of a thread.
// c10 headers only, which keeps nvcc quick.
#include "cuda/kernel/persistent.h"

#include "cuda/kernel/persistent_kernels.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace lltm::cuda {
namespace {

constexpr int kBlockThreads = kWarps * kWarpLanes;

extern __shared__ Sums shared_memory[];

// The `Machine` of persistent_kernels.h.
//
// Words are exchanged by relaxed accesses of the device's scope, which go to the second-level
// cache. Nothing else has to be ordered: a word is its own flag.
struct Gpu {
  // Far more than any word takes, so that a lost one ends the kernel instead of hanging it:
  // half a minute, at half a microsecond each. Counted, because a clock goes on while the
  // kernel is interrupted by a debugger or another process.
  static constexpr int kMostPolls = 1 << 26;

  int poll_nanoseconds;

  __device__ int slice() const { return static_cast<int>(blockIdx.x); }
  __device__ int group() const { return static_cast<int>(blockIdx.y); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ Sums* shared() const { return shared_memory; }
  __device__ void sync_warp() const { __syncwarp(); }
  __device__ void sync_block() const { __syncthreads(); }

  __device__ Words read(const void* data) const {
    Words x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(data)
                 : "memory");
    return x;
  }

  __device__ void publish(void* data, const std::uint32_t (&words)[1]) const {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(data), "r"(words[0]) : "memory");
  }
  __device__ void publish(void* data, const std::uint32_t (&words)[2]) const {
    asm volatile(
        "st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(data), "r"(words[0]), "r"(words[1])
        : "memory");
  }

  __device__ void wait(int polls) const {
    if (polls > kMostPolls) __trap();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
    if (poll_nanoseconds > 0) __nanosleep(static_cast<unsigned>(poll_nanoseconds));
#endif
  }

  // Before compute capability 8.0 there are no such instructions, and kernels are not launched.
  template <typename T>
  __device__ std::uint32_t operand(std::uint32_t word) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, float>) {
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(__uint_as_float(word)));
    }
#endif
    return word;
  }

  template <typename T>
  __device__ void mma(
      float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else if constexpr (std::is_same_v<T, float>) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#endif
  }
};

template <int kUnitsK, int kTiles, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    lltm_persistent_forward(const __grid_constant__ PersistentForwardArgs<T> args) {
  Gpu gpu{args.poll_nanoseconds};
  persistent_forward<kUnitsK, kTiles>(args, gpu);
}

template <int kUnitsK, int kTiles, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    lltm_persistent_backward(const __grid_constant__ PersistentBackwardArgs<T> args) {
  Gpu gpu{args.poll_nanoseconds};
  persistent_backward<kUnitsK, kTiles>(args, gpu);
}

template <int kTiles, int kOutputs>
constexpr int shared_bytes() {
  return shared_sums<kTiles, kOutputs>() * static_cast<int>(sizeof(Sums));
}

// More than 48 KiB of shared memory is for kernels that ask for it.
std::int64_t resident_blocks(const void* kernel, int bytes) {
  int device = 0, major = 0, cooperative = 0, most_bytes = 0, multiprocessors = 0, blocks = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(value, attribute, device));
  };
  ask(&major, cudaDevAttrComputeCapabilityMajor);
  ask(&cooperative, cudaDevAttrCooperativeLaunch);
  ask(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(&multiprocessors, cudaDevAttrMultiProcessorCount);
  if (major < 8 || cooperative == 0 || bytes > most_bytes) return 0;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  C10_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBlockThreads, bytes));
  return std::int64_t{blocks} * multiprocessors;
}

// All of its blocks run at once, or the launch fails.
template <typename Args>
void launch_cooperatively(
    void (*kernel)(Args), const Args& args, std::int64_t groups, int bytes, Stream stream) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>((args.hidden + kSliceUnits - 1) / kSliceUnits);
  config.gridDim.y = static_cast<unsigned>(groups);
  config.blockDim.x = kBlockThreads;
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace

template <typename T>
std::int64_t resident_forward_blocks(std::int64_t hidden, int tiles) {
  std::int64_t blocks = 0;
  visit_forward_kernel<T>(hidden, tiles, [&](auto units_k, auto tile_count) {
    const auto kernel = lltm_persistent_forward<units_k, tile_count, T>;
    blocks =
        resident_blocks(reinterpret_cast<const void*>(kernel), shared_bytes<tile_count, kSlots>());
  });
  return blocks;
}

template <typename T>
std::int64_t resident_backward_blocks(std::int64_t hidden, int tiles) {
  std::int64_t blocks = 0;
  visit_backward_kernel<T>(hidden, tiles, [&](auto units_k, auto tile_count) {
    const auto kernel = lltm_persistent_backward<units_k, tile_count, T>;
    blocks = resident_blocks(reinterpret_cast<const void*>(kernel), shared_bytes<tile_count, 1>());
  });
  return blocks;
}

GpuKind current_gpu() {
  int device = 0, major = 0, minor = 0, multiprocessors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return {10 * major + minor, multiprocessors};
}

void mark_absent(void* data, std::int64_t bytes, Stream stream) {
  C10_CUDA_CHECK(cudaMemsetAsync(
      data, 0xFF, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream.handle)));
}

template <typename T>
void launch_persistent_forward(
    const PersistentForwardArgs<T>& args, std::int64_t groups, int tiles, Stream stream) {
  visit_forward_kernel<T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
    launch_cooperatively(
        lltm_persistent_forward<units_k, tile_count, T>,
        args,
        groups,
        shared_bytes<tile_count, kSlots>(),
        stream);
  });
}

template <typename T>
void launch_persistent_backward(
    const PersistentBackwardArgs<T>& args, std::int64_t groups, int tiles, Stream stream) {
  visit_backward_kernel<T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
    launch_cooperatively(
        lltm_persistent_backward<units_k, tile_count, T>,
        args,
        groups,
        shared_bytes<tile_count, 1>(),
        stream);
  });
}

template std::int64_t resident_forward_blocks<float>(std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::Half>(std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::BFloat16>(std::int64_t, int);
template std::int64_t resident_backward_blocks<float>(std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::Half>(std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::BFloat16>(std::int64_t, int);
template void launch_persistent_forward(
    const PersistentForwardArgs<float>&, std::int64_t, int, Stream);
template void launch_persistent_forward(
    const PersistentForwardArgs<c10::Half>&, std::int64_t, int, Stream);
template void launch_persistent_forward(
    const PersistentForwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<float>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<c10::Half>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);

}  // namespace lltm::cuda
