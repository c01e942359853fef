#pragma once

#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace lltm_test {

// `capability`: an ATEN_CPU_CAPABILITY (default, avx2, avx512), or vnni, bf16, amx, dotprod or
// i8mm. Clang's __builtin_cpu_supports lacks some names.
inline bool cpu_has(std::string_view capability) {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (capability == "avx2") {
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  if (capability == "avx512") {
    return cpu_has("avx2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
  if (capability == "vnni") {
    return cpu_has("avx512") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (ecx >> 11 & 1) != 0;
  }
  if (capability == "bf16") {
    return cpu_has("avx512") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 &&
           (eax >> 5 & 1) != 0;
  }
  if (capability == "amx") {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    const bool bf16_and_int8 = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
                               (edx >> 22 & 1) != 0 && (edx >> 25 & 1) != 0;
    return cpu_has("bf16") && cpu_has("vnni") && bf16_and_int8 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
#elif defined(__aarch64__) && defined(__linux__)
  if (capability == "dotprod") return (getauxval(AT_HWCAP) >> 20 & 1) != 0;
  if (capability == "bf16") return (getauxval(AT_HWCAP2) >> 14 & 1) != 0;
  if (capability == "i8mm") {
    return cpu_has("dotprod") && (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
  }
#endif
  return capability == "default";
}

}  // namespace lltm_test
