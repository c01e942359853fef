// The int8 kernels for AVX512 with VNNI. Empty where the compiler was not told to use it.
#if defined(__AVX512VNNI__)
#include "cpu/kernel/int8_kernels.h"

namespace lltm::cpu {

const Int8Kernels* kernels_vnni() {
  return &kInt8Kernels;
}

}  // namespace lltm::cpu
#else
#include "cpu/kernel/int8.h"

namespace lltm::cpu {

const Int8Kernels* kernels_vnni() {
  return nullptr;
}

}  // namespace lltm::cpu
#endif
