#include "realtime/kernels.h"

const lltm::realtime::Kernels* lltm::realtime::kernels_default() {
  static constexpr Kernels kKernels = make_kernels();
  return &kKernels;
}
