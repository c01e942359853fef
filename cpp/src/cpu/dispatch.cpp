#include "cpu/dispatch.h"

#include <ATen/Version.h>

#include <string>

namespace lltm::cpu {

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512" && kernels_avx512() != nullptr) return *kernels_avx512();
    const bool avx2 = capability == "AVX512" || capability == "AVX2";
    if (avx2 && kernels_avx2() != nullptr) return *kernels_avx2();
    return *kernels_default();
  }();
  return chosen;
}

}  // namespace lltm::cpu
