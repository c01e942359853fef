#include "realtime/kernels.h"

const lltm::realtime::Kernels* lltm::realtime::kernels_default() {
#if defined(__aarch64__)
  static constexpr Kernels kKernels = make_kernels("NEON");
#else
  static constexpr Kernels kKernels = make_kernels("DEFAULT");
#endif
  return &kKernels;
}
