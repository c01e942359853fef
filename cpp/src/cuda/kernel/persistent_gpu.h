// The GPU's functions for persistent kernels.
#pragma once

#include "cuda/kernel/persistent.h"
#include "cuda/kernel/program_gpu.h"

#define LLTM_MMA(form, d, a, b0, b1)                                              \
  asm volatile("mma.sync.aligned." form                                           \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                   \
               : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b0), "r"(b1))

namespace lltm::cuda {
namespace {

// An absent word; a word holds two adjacent units, or one in float32.
constexpr std::uint32_t kAbsent = 0xFFFFFFFF;
template <typename T>
constexpr bool kIsWord = sizeof(T) == sizeof(std::uint32_t);

struct alignas(16) Words {
  std::uint32_t w[4];
};

// Only 3xTF32 has `small`.
struct Operand {
  std::uint32_t big[2], small[2];
};

extern __shared__ Words shared_memory[];

// mma, any, sync_warp and neighbor require all lanes in a warp, sync_block all threads in a block:
// conditions around their calls are uniform.
//
// Words are exchanged with relaxed, device-scope accesses, which use the L2 cache. Each word is its
// own flag: no other ordering is needed.
struct Gpu {
  // About two seconds, at half a microsecond per poll; far longer than any word needs.
  static constexpr int kMostPolls = 1 << 22;

  const LaunchWords& words;
  enum { kBlocksMayBegin, kAllHaveBegun, kTimedOut } limit = kBlocksMayBegin;

  __device__ int slice() const { return static_cast<int>(blockIdx.x); }
  __device__ int group() const { return static_cast<int>(blockIdx.y); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ Sums* shared() const { return reinterpret_cast<Sums*>(shared_memory); }
  __device__ void sync_warp() const { __syncwarp(); }
  __device__ void sync_block() const { __syncthreads(); }
  __device__ bool any(bool condition) const { return __any_sync(0xFFFFFFFF, condition) != 0; }
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

  // After a poll without success; `polls` of a word are zero before the first. False if the lane
  // times out, so that a lost word ends the kernel. Counts polls, because a clock continues while
  // another process or a debugger interrupts the kernel. Blocks may begin arbitrarily late if other
  // kernels occupy multiprocessors: a lane stops only if its polls run out after all blocks had
  // begun. The failure word is in host memory: no context is lost, and the host does not wait.
  __device__ bool wait(int& polls) {
    if (goes_on(polls)) return true;
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(words.failure), "r"(1) : "memory");
    return false;
  }

  template <typename T, bool kTf32>
  __device__ static Words weights(const Words& a) {
    if constexpr (!kIsWord<T> || !kTf32) return a;
    return {{to_tf32(a.w[0]), to_tf32(a.w[1]), to_tf32(a.w[2]), to_tf32(a.w[3])}};
  }

  // Of two words, for the mma of all outputs.
  template <typename T, bool kTf32>
  __device__ static Operand operand(std::uint32_t w0, std::uint32_t w1) {
    Operand b = {{w0, w1}, {}};
    if constexpr (kIsWord<T> && kTf32) {
      b = {{to_tf32(w0), to_tf32(w1)}, {}};
    } else if constexpr (kIsWord<T>) {
      split(w0, b.big[0], b.small[0]);
      split(w1, b.big[1], b.small[1]);
    }
    return b;
  }

  template <typename T, bool kTf32>
  __device__ void mma(float (&d)[4], const Words& a, const Operand& b) const {
    const auto [b0, b1] = b.big;
    if constexpr (kIsWord<T> && kTf32) {
      mma_tf32(d, a, b0, b1);
    } else if constexpr (kIsWord<T>) {
      // Three of the four products of two parts, each of 11 bits; the smallest sums first.
      Words big, small;
      LLTM_UNROLL
      for (int k = 0; k < 4; ++k) split(a.w[k], big.w[k], small.w[k]);
      mma_tf32(d, small, b0, b1);
      mma_tf32(d, big, b.small[0], b.small[1]);
      mma_tf32(d, big, b0, b1);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      LLTM_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", d, a, b0, b1);
    } else {
#if __CUDA_ARCH__ >= 800
      LLTM_MMA("m16n8k16.row.col.f32.f16.f16.f32", d, a, b0, b1);
#else
      mma_f16(d, a.w[0], a.w[1], b0);
      mma_f16(d, a.w[2], a.w[3], b1);
#endif
    }
  }

 private:
  __device__ bool goes_on(int& polls) {
    if (limit == kTimedOut) return false;
    if (++polls <= kMostPolls) return true;
    polls = 0;
    if (limit == kAllHaveBegun) {
      limit = kTimedOut;
    } else if (all_have_begun()) {
      limit = kAllHaveBegun;
    }
    return limit != kTimedOut;
  }
  // Half of m16n8k16, which compute capability 7.5 lacks.
  __device__ static void mma_f16(
      float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
  __device__ static void mma_tf32(
      float (&d)[4], const Words& a, std::uint32_t b0, std::uint32_t b1) {
    LLTM_MMA("m16n8k8.row.col.f32.tf32.tf32.f32", d, a, b0, b1);
  }
  __device__ static std::uint32_t to_tf32(std::uint32_t x) {
    std::uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(math::bit_cast<float>(x)));
    return rounded;
  }
  // The first 11 bits, and the remainder. mma ignores the last 13 bits of its operands, here of
  // `big` and `small`, on all GPUs whose arithmetic was published; PTX leaves it open, and the
  // self-check asks the GPU. Volatile: the remainders of all weights would not fit into the
  // registers.
  __device__ static void split(std::uint32_t x, std::uint32_t& big, std::uint32_t& small) {
    big = x;
    asm volatile(
        "{\n\t.reg .b32 first;\n\tand.b32 first, %1, 0xFFFFE000;\n\t"
        "sub.rn.f32 %0, %1, first;\n\t}"
        : "=r"(small)
        : "r"(x));
  }
};

}  // namespace
}  // namespace lltm::cuda
