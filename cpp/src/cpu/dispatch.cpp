// Chooses the kernels of this CPU. A new instruction set also needs its file in kernel/isa/, its
// declaration in kernel/table.h and its flags in CMakeLists.txt.
#include "cpu/dispatch.h"

#include <ATen/Version.h>
#if __has_include(<ATen/cpu/Utils.h>)
#include <ATen/cpu/Utils.h>
#define LLTM_HAS_INIT_AMX 1
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstdlib>
#include <string>

namespace lltm::cpu {
namespace {

#if defined(__aarch64__)

struct Extensions {
  bool dotprod = false, i8mm = false, bf16 = false;
};

Extensions extensions() {
  Extensions found;
#if defined(__linux__)
  // HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16, undefined in older kernel headers.
  found.dotprod = (getauxval(AT_HWCAP) >> 20 & 1) != 0;
  found.i8mm = (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
  found.bf16 = (getauxval(AT_HWCAP2) >> 14 & 1) != 0;
#elif defined(__APPLE__)
  const auto has = [](const char* name) {
    int value = 0;
    std::size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  found.dotprod = has("hw.optional.arm.FEAT_DotProd");
  found.i8mm = has("hw.optional.arm.FEAT_I8MM");
  found.bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
  // ATEN_CPU_CAPABILITY excludes BF16, as on x86.
  if (std::getenv("ATEN_CPU_CAPABILITY") != nullptr) found.bf16 = false;
  return found;
}

// All these CPUs have NEON, whatever capability (such as SVE) libtorch reports. Dot products give
// the same results.
Kernels choose_kernels() {
  const Extensions has = extensions();
  Kernels kernels = *kernels_default();
  if (has.dotprod && kernels_dotprod() != nullptr) kernels.int8 = *kernels_dotprod();
  if (has.dotprod && has.i8mm && kernels_i8mm() != nullptr) kernels.int8 = *kernels_i8mm();
  if (has.bf16 && kernels_bf16() != nullptr) {
    kernels.gemm_bf16_operands = kernels_bf16();
    kernels.fast_bf16 = true;
  }
  return kernels;
}

#else

struct Extensions {
  bool vnni = false, bf16 = false, fast_bf16 = false, amx = false;
};

Extensions extensions() {
  Extensions found;
#if defined(__x86_64__)
  // Clang's __builtin_cpu_supports lacks some of these names.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.vnni = (ecx >> 11 & 1) != 0;
  found.amx = found.vnni && (edx >> 22 & 1) != 0 && (edx >> 25 & 1) != 0;  // bfloat16 and int8
  found.bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0;
  // In multiply-adds a cycle, the dot product is twice as fast as the float32 FMA on AMD's cores,
  // and half as fast on Intel's (Emerald Rapids: 1.3 and 5.3 instructions a nanosecond), which have
  // AMX, unless a hypervisor hides it.
  constexpr unsigned kAmd = 0x68747541;  // "Auth"
  found.fast_bf16 = __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ebx == kAmd;
#endif
  // ATEN_CPU_CAPABILITY selects exactly that instruction set, without bf16 and AMX. VNNI gives the
  // same results.
  if (std::getenv("ATEN_CPU_CAPABILITY") != nullptr) found.bf16 = false;
#if defined(LLTM_HAS_INIT_AMX)
  // The operating system must permit the process to use AMX.
  found.amx = found.amx && found.bf16 && at::cpu::init_amx();
#else
  found.amx = false;
#endif
  return found;
}

Kernels choose_kernels() {
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512" && kernels_avx512() != nullptr) {
    const Extensions has = extensions();
    const bool amx = has.amx && kernels_amx() != nullptr;
    Kernels kernels = amx ? *kernels_amx() : *kernels_avx512();
    if (has.vnni && !amx && kernels_vnni() != nullptr) kernels.int8 = *kernels_vnni();
    if (has.bf16 && !amx && kernels_bf16() != nullptr) {
      kernels.gemm_bf16_operands = kernels_bf16();
      kernels.fast_bf16 = has.fast_bf16;
    }
    return kernels;
  }
  const bool avx2 = capability == "AVX512" || capability == "AVX2";
  return avx2 && kernels_avx2() != nullptr ? *kernels_avx2() : *kernels_default();
}

#endif

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

}  // namespace lltm::cpu
