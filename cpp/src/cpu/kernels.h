// No torch header.
#pragma once

#include "cell/cell.h"
#include "cpu/kernel/table.h"

namespace lltm::cpu {

// Kernels of the instruction set that libtorch reports (ATEN_CPU_CAPABILITY overrides it), with
// this CPU's extensions. Selected once.
const Kernels& kernels();

// Otherwise the GEMM widens bfloat16.
inline bool multiplies_bf16() {
  const Kernels* const widening = kernels_avx512();
  const GemmBf16 chosen = kernels().gemm_bf16_operands;
  return chosen != nullptr && (widening == nullptr || chosen != widening->gemm_bf16_operands);
}

template <typename T, typename Element>
const Elementwise<T, Element>& elementwise(const CellInfo& cell) {
  return elementwise_of<T, Element>(kernels().cells[cell.native]);
}

template <typename B>
const GemmsF32<B>& gemms_f32() {
  return gemms_f32_of<B>(kernels());
}

}  // namespace lltm::cpu
