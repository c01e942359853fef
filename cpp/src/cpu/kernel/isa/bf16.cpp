// Additional kernels for AVX-512 with BF16.
#include "cpu/kernel/gemm_kernels.h"

lltm::cpu::GemmBf16 lltm::cpu::kernels_bf16() {
#if defined(__AVX512BF16__)
  return kGemmBf16;
#else
  return nullptr;
#endif
}
