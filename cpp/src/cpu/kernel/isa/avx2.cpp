// The kernels for AVX2. Empty where the compiler was not told to
// use it: on another architecture, or in a build with one set of flags.
#if defined(__AVX2__)
#include "cpu/kernel/elementwise_kernels.h"

namespace lltm::cpu {

const Kernels* kernels_avx2() {
  static constexpr Kernels kernels = make_kernels("AVX2");
  return &kernels;
}

}  // namespace lltm::cpu
#else
#include "cpu/kernel/table.h"

namespace lltm::cpu {

const Kernels* kernels_avx2() {
  return nullptr;
}

}  // namespace lltm::cpu
#endif
