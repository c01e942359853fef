// No torch header.
#pragma once

#include "cell/cell.h"
#include "cpu/kernel/table.h"

namespace lltm::cpu {

// Kernels of the instruction set that libtorch reports (ATEN_CPU_CAPABILITY overrides it), with
// this CPU's extensions. Selected once.
const Kernels& kernels();

template <typename T, typename Element>
const Elementwise<T, Element>& elementwise(const CellInfo& cell) {
  return elementwise_of<T, Element>(kernels().cells[cell.native]);
}

template <typename B>
const GemmsF32<B>& gemms_f32() {
  return gemms_f32_of<B>(kernels());
}

}  // namespace lltm::cpu
