// Replaces cpu/dispatch.cpp: selects the emulated AMX kernels on every CPU with AVX-512.
#include "cpu/dispatch.h"

namespace lltm::cpu {

const Kernels* kernels_emulated_amx();

const Kernels& kernels() {
  return *kernels_emulated_amx();
}

}  // namespace lltm::cpu
