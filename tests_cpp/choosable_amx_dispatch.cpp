// Replaces cpu/dispatch.cpp. LLTM_EMULATED_AMX selects the emulated AMX kernels on every CPU with
// AVX-512.
#include "cpu/dispatch.h"

#include <ATen/Version.h>

#include <cstdlib>
#include <string>

namespace lltm::cpu {

const Kernels* kernels_emulated_amx();

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512" && std::getenv("LLTM_EMULATED_AMX") != nullptr) {
      return *kernels_emulated_amx();
    }
    if (capability == "AVX512") return *kernels_avx512();
    return capability == "AVX2" ? *kernels_avx2() : *kernels_default();
  }();
  return chosen;
}

}  // namespace lltm::cpu
