#include <lltm/version.h>

#include "cpu/dispatch.h"
#include "cpu/gemm/formats.h"

#include <torch/library.h>
#include <torch/version.h>

#include <sstream>
#include <string>

namespace lltm {

const char* version() {
  return LLTM_VERSION;
}

const char* cpu_kernels() {
  return cpu::kernels().name;
}

std::string build_info() {
  std::ostringstream info;
  info << "lltm: " << LLTM_VERSION << '\n'
       << "torch: " << TORCH_VERSION << '\n'
       << "compiler: " <<
#if defined(__clang__)
      "clang " << __clang_version__
#elif defined(__GNUC__)
      "gcc " << __VERSION__
#else
      "unknown"
#endif
       << '\n'
       << "CUDA kernels: " <<
#if defined(LLTM_CUDA_KERNELS)
      LLTM_CUDA_KERNELS
#else
      "none (ATen operations)"
#endif
       << '\n'
       << "CPU kernels: " << cpu::kernels_default()->name
       << (cpu::kernels_avx2() != nullptr ? ", AVX2" : "")
       << (cpu::kernels_avx512() != nullptr ? ", AVX512" : "")
       << (cpu::kernels_amx() != nullptr ? ", AMX" : "") << '\n'
       << "CPU kernels in use: " << cpu_kernels() << '\n'
       << "CPU micro-kernel: " << (cpu::F32Format::available() ? "float32" : "none")
       << (cpu::Bf16Format::available() ? ", bfloat16" : "")
       << (cpu::Bf16x3Format::available() ? ", float32 as bf16x3 (AMX)" : "") << '\n';
  return info.str();
}

}  // namespace lltm

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_version", [] { return std::string(lltm::version()); });
  m.impl("_build_info", lltm::build_info);
  m.impl("_cpu_kernels", [] { return std::string(lltm::cpu_kernels()); });
}
