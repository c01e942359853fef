// The kernel table for a file in this folder, which CMakeLists.txt compiles for its instruction
// set; otherwise (another architecture, or a build with a single set of flags) null.
#pragma once

#if defined(__AMX_BF16__)
#include "cpu/kernel/amx_kernels.h"  // its store_operand overload must come first
#endif
#include "cpu/kernel/elementwise_kernels.h"
#if defined(__AMX_BF16__)
#include "cpu/kernel/amx_int8_kernels.h"
#endif
#include "cpu/kernel/program_cell.h"
#include "cpu/kernel/table.h"

namespace lltm::cpu {
namespace {

enum class Isa { kDefault, kAvx2, kAvx512, kAmx };

#if defined(__AMX_BF16__)
constexpr Isa kIsa = Isa::kAmx;
#elif defined(__AVX512F__)
constexpr Isa kIsa = Isa::kAvx512;
#elif defined(__AVX2__)
constexpr Isa kIsa = Isa::kAvx2;
#else
constexpr Isa kIsa = Isa::kDefault;
#endif

#if defined(__AMX_BF16__)
template <typename Definition, typename T>
constexpr void add_bf16x3(Elementwise<T, BFloat16x3>& cell) {
  cell = {forward<Definition, T, BFloat16x3>, backward<Definition, T, BFloat16x3>};
}
#endif

template <Isa isa>
constexpr Kernels make_table() {
#if defined(__aarch64__)
  constexpr const char* kNames[] = {"NEON"};
#else
  constexpr const char* kNames[] = {"DEFAULT", "AVX2", "AVX512", "AMX"};
#endif
  Kernels kernels = make_kernels(kNames[static_cast<int>(isa)]);
  kernels.cells[0] = kProgramKernels;
#if defined(__AMX_BF16__)
  if constexpr (isa == Isa::kAmx) {
    Cells::for_each([&]<typename Definition>(Definition) {
      add_bf16x3<Definition, float>(kernels.cells[Cells::native<Definition>()]);
      add_bf16x3<Definition, Half>(kernels.cells[Cells::native<Definition>()]);
    });
    kernels.bf16x3 = kBf16x3Kernels;
    kernels.gemm_bf16_operands = gemm_bf16_amx;
    kernels.fast_bf16 = true;
    kernels.int8 = kInt8AmxKernels;
  }
#endif
  return kernels;
}

template <Isa isa>
const Kernels* table_for() {
  if constexpr (kIsa >= isa) {
    static constexpr Kernels kernels = make_table<isa>();
    return &kernels;
  } else {
    return nullptr;
  }
}

}  // namespace
}  // namespace lltm::cpu
