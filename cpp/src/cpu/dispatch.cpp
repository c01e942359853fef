#include "cpu/dispatch.h"

#include <ATen/Version.h>
#if __has_include(<ATen/cpu/Utils.h>)
#include <ATen/cpu/Utils.h>
#define LLTM_HAS_INIT_AMX 1
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string>

namespace lltm::cpu {

namespace {

// Whether this CPU has AMX and the operating system lets the process use it,
// which the process has to request. If ATEN_CPU_CAPABILITY names an instruction set, exactly that
// one is used.
bool has_amx() {
#if defined(LLTM_HAS_INIT_AMX) && defined(__x86_64__)
  // Not by __builtin_cpu_supports: Clang has no name for AMX.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool avx512_bf16 =
      __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0;
  const bool amx_bf16 =
      __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 22 & 1) != 0;
  return std::getenv("ATEN_CPU_CAPABILITY") == nullptr && avx512_bf16 && amx_bf16 &&
         at::cpu::init_amx();
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512vnni");
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

const Int8Kernels& int8_kernels() {
  static const Int8Kernels& chosen = []() -> const Int8Kernels& {
    const bool avx512 = at::get_cpu_capability() == "AVX512";
    return avx512 && has_vnni() && kernels_vnni() != nullptr ? *kernels_vnni() : kernels().int8;
  }();
  return chosen;
}

}  // namespace lltm::cpu
