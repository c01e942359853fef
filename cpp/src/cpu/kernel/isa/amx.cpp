// The kernels for AMX: those for AVX512, and what its matrix unit adds.
// Empty where the compiler was not told to use it.
#if defined(__AMX_BF16__)
#include "cpu/kernel/amx_kernels.h"

#include "cpu/kernel/elementwise_kernels.h"

namespace lltm::cpu {
namespace {

constexpr Kernels make_amx_kernels() {
  Kernels kernels = make_kernels("AMX");
  kernels.f32_bf16x3 = {forward<float, BFloat16x3>, backward<float, BFloat16x3>};
  kernels.f16_bf16x3 = {forward<Half, BFloat16x3>, backward<Half, BFloat16x3>};
  kernels.bf16x3 = kBf16x3Kernels;
  return kernels;
}

}  // namespace

const Kernels* kernels_amx() {
  static constexpr Kernels kernels = make_amx_kernels();
  return &kernels;
}

}  // namespace lltm::cpu
#else
#include "cpu/kernel/table.h"

namespace lltm::cpu {

const Kernels* kernels_amx() {
  return nullptr;
}

}  // namespace lltm::cpu
#endif
