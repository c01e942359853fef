// The kernels for AVX512. Empty where the compiler was not told to
// use it: on another architecture, or in a build with one set of flags.
#if defined(__AVX512F__)
#include "cpu/kernel/elementwise_kernels.h"

namespace lltm::cpu {

const Kernels* kernels_avx512() {
  static constexpr Kernels kernels = make_kernels("AVX512");
  return &kernels;
}

}  // namespace lltm::cpu
#else
#include "cpu/kernel/table.h"

namespace lltm::cpu {

const Kernels* kernels_avx512() {
  return nullptr;
}

}  // namespace lltm::cpu
#endif
