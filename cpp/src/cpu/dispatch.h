// The choice of instruction set and of dtype for the CPU kernels.
#pragma once

#include "cell/cell.h"
#include "common/tensor_views.h"
#include "cpu/kernel/table.h"
#include "cpu/schedule.h"

#include <utility>

namespace lltm::cpu {

// The kernels for the instruction set that libtorch reports, so that
// ATEN_CPU_CAPABILITY selects them, and for what this CPU has besides; chosen once.
const Kernels& kernels();

// Whether the CPU has products of bfloat16; elsewhere the GEMM widens its operands.
inline bool multiplies_bf16() {
  const Kernels* const widening = kernels_avx512();
  const GemmBf16 chosen = kernels().gemm_bf16_operands;
  return chosen != nullptr && (widening == nullptr || chosen != widening->gemm_bf16_operands);
}

template <typename T, typename Operand>
const Elementwise<T, Operand>& elementwise(const CellInfo& cell) {
  return kernels().cells[cell.id].*kElementwise<T, Operand>;
}

template <typename B>
const GemmsF32<B>& gemms_f32() {
  return kernels().*kGemmsF32<B>;
}

// visit_dtype of tensor_views.h with the 16-bit types of the kernels.
template <typename Body>
decltype(auto) visit_dtype(at::ScalarType dtype, const Body& body) {
  return lltm::visit_dtype<Half, BFloat16>(dtype, body);
}

// The dtype as schedule_step takes it.
inline Storage storage_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Storage::kF64;
    case at::kHalf:
      return Storage::kF16;
    case at::kBFloat16:
      return Storage::kBf16;
    default:
      return Storage::kF32;
  }
}

// The dtype of a storage type that a GEMM takes.
template <typename T>
constexpr at::ScalarType kDtype = at::kFloat;
template <>
inline constexpr at::ScalarType kDtype<BFloat16> = at::kBFloat16;

}  // namespace lltm::cpu
