// Additional kernels for AVX-512 with BF16, and for NEON with BF16.
#include "cpu/kernel/bfmmla_kernels.h"
#include "cpu/kernel/gemm_kernels.h"

lltm::cpu::GemmBf16 lltm::cpu::kernels_bf16() {
#if defined(__AVX512BF16__)
  return kGemmBf16;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return gemm_bfmmla;
#else
  return nullptr;
#endif
}
