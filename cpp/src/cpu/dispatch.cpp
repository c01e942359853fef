#include "cpu/dispatch.h"

#include <ATen/Version.h>
#if __has_include(<ATen/cpu/Utils.h>)
#include <ATen/cpu/Utils.h>
#define LLTM_HAS_INIT_AMX 1
#endif

#include <cstdlib>
#include <string>

namespace lltm::cpu {

namespace {

// Whether this CPU has AMX and the operating system lets the process use it,
// which has to be asked for. An instruction set that the environment names is
// meant as it stands there.
bool has_amx() {
#if defined(LLTM_HAS_INIT_AMX) && defined(LLTM_COMPILER_HAS_AMX)
  return std::getenv("ATEN_CPU_CAPABILITY") == nullptr && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("amx-bf16") && at::cpu::init_amx();
#else
  return false;
#endif
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512" && has_amx() && kernels_amx() != nullptr) return *kernels_amx();
    if (capability == "AVX512" && kernels_avx512() != nullptr) return *kernels_avx512();
    const bool avx2 = capability == "AVX512" || capability == "AVX2";
    if (avx2 && kernels_avx2() != nullptr) return *kernels_avx2();
    return *kernels_default();
  }();
  return chosen;
}

}  // namespace lltm::cpu
