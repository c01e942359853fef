// Additional kernels for NEON with DotProd (dot products of signed bytes).
#include "cpu/kernel/int8_kernels.h"

const lltm::cpu::Int8Kernels* lltm::cpu::kernels_dotprod() {
#if defined(__ARM_FEATURE_DOTPROD)
  return &kInt8Kernels;
#else
  return nullptr;
#endif
}
