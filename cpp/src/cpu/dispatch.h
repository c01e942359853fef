#pragma once

#include "common/tensor_views.h"
#include "cpu/kernel/table.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"

#include <utility>

namespace lltm::cpu {

template <typename Body>
decltype(auto) visit_dtype(at::ScalarType dtype, const Body& body) {
  return lltm::visit_dtype<Half, BFloat16>(dtype, body);
}

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

template <typename T>
constexpr at::ScalarType kDtype = at::kFloat;
template <>
inline constexpr at::ScalarType kDtype<BFloat16> = at::kBFloat16;

}  // namespace lltm::cpu
