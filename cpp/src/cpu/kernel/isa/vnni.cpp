// Additional kernels for AVX-512 with VNNI.
#include "cpu/kernel/int8_kernels.h"

const lltm::cpu::Int8Kernels* lltm::cpu::kernels_vnni() {
#if defined(__AVX512VNNI__)
  return &kInt8Kernels;
#else
  return nullptr;
#endif
}
