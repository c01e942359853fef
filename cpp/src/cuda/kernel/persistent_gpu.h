// The persistent kernels on a GPU, compiled by nvcc once per cell and dtype. Only c10 headers, to
// compile faster.
#pragma once

#include "cuda/kernel/persistent_kernels.h"
#include "cuda/kernel/persistent_launch.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if !defined(LLTM_MOST_POLLS)
#define LLTM_MOST_POLLS (1 << 21)
#endif

namespace lltm::cuda {
namespace {

extern __shared__ Sums shared_memory[];

// The `Machine` of persistent_kernels.h.
//
// Words are exchanged with relaxed, device-scope accesses, which use the L2 cache. Each word is its
// own flag: no other ordering is needed.
struct Gpu {
  // About a second, at half a microsecond per poll; far longer than any word needs.
  static constexpr int kMostPolls = LLTM_MOST_POLLS;

  const LaunchWords& words;
  Patience patience = {};

  __device__ int slice() const { return static_cast<int>(blockIdx.x); }
  __device__ int group() const { return static_cast<int>(blockIdx.y); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ Sums* shared() const { return shared_memory; }
  __device__ void sync_warp() const { __syncwarp(); }
  __device__ void sync_block() const { __syncthreads(); }
  __device__ std::uint32_t neighbor(std::uint32_t word) const {
    return __shfl_xor_sync(0xFFFFFFFF, word, 1);
  }

  __device__ Words read(const void* data) const {
    Words x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(data)
                 : "memory");
    return x;
  }

  __device__ void publish(void* data, std::uint32_t word) const {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(data), "r"(word) : "memory");
  }

  __device__ void begin() const {
    if (threadIdx.x == 0) atomicAdd(words.begun, 1U);
  }
  __device__ bool all_have_begun() const {
    std::uint32_t begun;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(begun) : "l"(words.begun) : "memory");
    return begun == words.blocks;
  }

  // The failure word is in host memory: no context is lost, and the host does not wait.
  __device__ bool wait(int& polls) {
    if (patience.wait(*this, polls, kMostPolls)) return true;
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(words.failure), "r"(1) : "memory");
    return false;
  }

  // Compute capabilities below 8.0 lack this instruction and never run the kernels.
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

template <typename Definition, int kUnitsK, int kTiles, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    lltm_persistent_forward(const __grid_constant__ DirectionArgs<PersistentForwardArgs<T>> all) {
  const PersistentForwardArgs<T>& args = all.of[blockIdx.z];
  Gpu gpu{args.words};
  run_steps<Definition, kUnitsK, kTiles>(args, gpu);
}

template <typename Definition, int kUnitsK, int kTiles, typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    lltm_persistent_backward(const __grid_constant__ DirectionArgs<PersistentBackwardArgs<T>> all) {
  const PersistentBackwardArgs<T>& args = all.of[blockIdx.z];
  Gpu gpu{args.words};
  run_steps<Definition, kUnitsK, kTiles>(args, gpu);
}

template <typename Definition, int kUnitsK, int kTiles, typename T>
const void* kernel_of(const PersistentForwardArgs<T>* /*args*/) {
  return reinterpret_cast<const void*>(lltm_persistent_forward<Definition, kUnitsK, kTiles, T>);
}
template <typename Definition, int kUnitsK, int kTiles, typename T>
const void* kernel_of(const PersistentBackwardArgs<T>* /*args*/) {
  return reinterpret_cast<const void*>(lltm_persistent_backward<Definition, kUnitsK, kTiles, T>);
}

template <int kId, typename Definition, typename... Others>
auto definition_of(CellList<Definition, Others...>) {
  if constexpr (kId == Definition::kCell.id) {
    return Definition{};
  } else {
    return definition_of<kId>(CellList<Others...>());
  }
}

template <int kId, typename Args, typename Run>
auto with_kernel(std::int64_t hidden, int tiles, const Run& run) {
  using Definition = decltype(definition_of<kId>(PersistentCells()));
  decltype(run(nullptr, 0)) result = {};
  visit_kernel<Definition, Args>(hidden, tiles, [&](auto units_k, auto tile_count) {
    constexpr int kSums = shared_sums<tile_count, kOutputsOf<Definition, Args>>();
    const void* const kernel =
        kernel_of<Definition, units_k, tile_count>(static_cast<Args*>(nullptr));
    result = run(kernel, kSums * sizeof(Sums));
  });
  return result;
}

}  // namespace

template <int kId, typename Args>
std::int64_t PersistentKernels<kId, Args>::resident(std::int64_t hidden, int tiles) {
  return with_kernel<kId, Args>(hidden, tiles, resident_blocks_of);
}

template <int kId, typename Args>
bool PersistentKernels<kId, Args>::launch(
    const DirectionArgs<Args>& args, std::int64_t groups, int tiles, Stream stream) {
  const std::int64_t hidden = args.of[0].hidden;
  const auto run = [&](const void* kernel, std::size_t bytes) {
    return launch_cooperatively(
        kernel, &args, slices_of(hidden), groups, args.count, bytes, stream);
  };
  return with_kernel<kId, Args>(hidden, tiles, run);
}

}  // namespace lltm::cuda
