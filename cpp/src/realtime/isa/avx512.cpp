#if defined(__AVX512F__)
#include "realtime/kernels.h"
#else
#include "realtime/table.h"
#endif

const lltm::realtime::Kernels* lltm::realtime::kernels_avx512() {
#if defined(__AVX512F__)
  static constexpr Kernels kKernels = make_kernels();
  return &kKernels;
#else
  return nullptr;
#endif
}
