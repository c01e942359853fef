#if defined(__AVX2__)
#include "realtime/kernels.h"
#else
#include "realtime/table.h"
#endif

const lltm::realtime::Kernels* lltm::realtime::kernels_avx2() {
#if defined(__AVX2__)
  static constexpr Kernels kKernels = make_kernels();
  return &kKernels;
#else
  return nullptr;
#endif
}
