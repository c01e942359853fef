// Types and the element-wise kernels on a GPU, compiled by NVRTC.
#pragma once

#include "cuda/kernel/elementwise_kernels.h"

#include <cstdint>

namespace lltm::cuda {
namespace {

// Laid out as c10's types, whose headers NVRTC cannot compile. Conversions round to nearest, ties
// to even.
struct Half {
  std::uint16_t bits;

  Half() = default;
  LLTM_CELL_INLINE explicit Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  LLTM_CELL_INLINE operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  LLTM_CELL_INLINE explicit BFloat16(float x) {
    const auto u = math::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<std::uint16_t>(x != x ? 0x7FC0u : rounded);
  }
  LLTM_CELL_INLINE operator float() const {
    return math::bit_cast<float>(std::uint32_t{bits} << 16);
  }
};

}  // namespace
}  // namespace lltm::cuda

// Of Definition, a stage, and its Args, in this namespace.
#define LLTM_STAGE_KERNEL(name, kWidth)                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, resident_blocks(kWidth)) \
      name(const Args args, const std::int64_t count) {                           \
    const std::int64_t n = piece_of(blockIdx.x, threadIdx.x);                     \
    if (n < count) Definition::run<kWidth>(args, n);                              \
  }
