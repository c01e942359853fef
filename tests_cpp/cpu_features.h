// Which of the instruction sets that the kernels are compiled for this CPU has.
#pragma once

#include <string_view>

#if defined(LLTM_COMPILER_HAS_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lltm_test {

// `capability` as ATEN_CPU_CAPABILITY names it: default, avx2 or avx512; or amx.
inline bool cpu_has(std::string_view capability) {
#if defined(__x86_64__)
  if (capability == "avx2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  }
  if (capability == "avx512") {
    return cpu_has("avx2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#if defined(__linux__) && defined(LLTM_COMPILER_HAS_AMX)
  if (capability == "amx") {
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return cpu_has("avx512") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
#endif
#endif
  return capability == "default";
}

}  // namespace lltm_test
