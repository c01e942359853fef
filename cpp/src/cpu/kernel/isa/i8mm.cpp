// Additional kernels for NEON with I8MM (dot products of unsigned and signed bytes).
#include "cpu/kernel/int8_kernels.h"

const lltm::cpu::Int8Kernels* lltm::cpu::kernels_i8mm() {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return &kInt8Kernels;
#else
  return nullptr;
#endif
}
