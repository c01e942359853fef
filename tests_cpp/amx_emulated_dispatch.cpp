// In the place of cpu/dispatch.cpp: the kernels for AMX, emulated, wherever there is
// AVX-512.
#include "cpu/dispatch.h"

namespace lltm::cpu {

const Kernels* kernels_emulated_amx();

const Kernels& kernels() {
  return *kernels_emulated_amx();
}

}  // namespace lltm::cpu
