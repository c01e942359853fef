// The choice of instruction set and of dtype for the CPU kernels.
#pragma once

#include "common/tensor_views.h"
#include "cpu/kernel/table.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"

#include <utility>

namespace lltm::cpu {

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
