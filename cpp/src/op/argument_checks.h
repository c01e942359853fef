// Checks of one argument of an operator or a module. Messages begin with "lltm::" and `where`, the
// operator or the module's class.
#pragma once

#include "common/device.h"
#include "common/format.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace lltm {

// The form of all messages: "lltm::step: expected h of shape (16, 128), got (16, 64)".
template <typename Where, typename Got>
std::string expected(const Where& where, const std::string& value, const Got& got) {
  return c10::str("lltm::", where, ": expected ", value, ", got ", got);
}

// ---- numbers -------------------------------------------------------------------

// Largest size for which products with other sizes and the element size do not overflow.
constexpr int64_t kLargestSize = int64_t{1} << 27;
constexpr int64_t kMostLayers = int64_t{1} << 16;

inline void check_size(const char* where, const char* name, int64_t value, int64_t largest) {
  TORCH_CHECK_VALUE(value > 0, expected(where, c10::str(name, " to be positive"), value));
  TORCH_CHECK_VALUE(
      value <= largest, expected(where, c10::str(name, " of at most ", largest), value));
}

inline void check_probability(const char* where, const char* name, double value) {
  TORCH_CHECK_VALUE(
      value >= 0 && value <= 1, expected(where, c10::str(name, " to be in [0, 1]"), value));
}

inline void check_checkpoint_steps(const char* where, int64_t steps) {
  TORCH_CHECK_VALUE(steps >= 0, expected(where, "checkpoint_steps to be at least 0", steps));
}

// ---- tensors -------------------------------------------------------------------

// Inlined, because a single step makes dozens of these checks.

C10_ALWAYS_INLINE void check_defined(
    const char* where, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.defined(), expected(where, c10::str(name, " to be a tensor"), "an undefined tensor"));
}

// The bytes of the storage up to the last element.
inline int64_t needed_bytes(const at::Tensor& tensor) {
  int64_t elements = tensor.storage_offset() + 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    elements += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return tensor.numel() == 0 ? 0 : elements * tensor.element_size();
}
// True for tensors without memory: meta tensors, wrappers of transforms, Tensor subclasses.
C10_ALWAYS_INLINE bool has_elements(const at::Tensor& tensor) {
  if (!is_unwrapped(tensor)) return true;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.unsafe_storage()) return true;
  const auto bytes = static_cast<int64_t>(impl.unsafe_storage().nbytes());
  const auto of_contiguous = (impl.storage_offset() + impl.numel()) * tensor.element_size();
  return (impl.is_contiguous() && of_contiguous <= bytes) || needed_bytes(tensor) <= bytes;
}

// Strides, and elements in the storage, which FSDP and others may resize.
C10_ALWAYS_INLINE void check_memory(const char* where, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(  // a nested tensor may report the strided layout
      tensor.layout() == at::kStrided && !tensor.is_nested(),
      expected(
          where,
          c10::str(name, " of layout Strided"),
          tensor.is_nested() ? "a nested tensor" : c10::str(tensor.layout())));
  TORCH_CHECK(
      has_elements(tensor),
      expected(
          where,
          c10::str(name, " with storage of at least ", needed_bytes(tensor), " bytes"),
          tensor.storage().nbytes()));
}

// The owner of an expected dtype or device, or null.
inline std::string owner_text(const char* property, const char* owner) {
  return owner == nullptr ? "" : c10::str(", the ", property, " of the ", owner);
}
C10_ALWAYS_INLINE void check_dtype(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    at::ScalarType dtype,
    const char* owner = nullptr) {
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == dtype,
      expected(
          where,
          c10::str(name, " of dtype ", dtype_text(dtype), owner_text("dtype", owner)),
          dtype_text(tensor.scalar_type())));
}
C10_ALWAYS_INLINE void check_device(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    const at::Device& device,
    const char* owner = nullptr) {
  TORCH_CHECK(
      tensor.device() == device,
      expected(
          where,
          c10::str(name, " on device ", device, owner_text("device", owner)),
          tensor.device()));
}

C10_ALWAYS_INLINE bool equal(const c10::SymInt& a, const c10::SymInt& b) {
  if (!a.is_heap_allocated() && !b.is_heap_allocated()) {  // numbers
    return a.as_int_unchecked() == b.as_int_unchecked();
  }
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

inline void check_shape(
    const char* where, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef shape) {
  const c10::SymIntArrayRef actual = tensor.sym_sizes();
  TORCH_CHECK_VALUE(
      std::equal(
          actual.begin(),
          actual.end(),
          shape.begin(),
          shape.end(),
          [](const c10::SymInt& a, const c10::SymInt& b) { return equal(a, b); }),
      expected(where, c10::str(name, " of shape ", shape_text(shape)), shape_text(actual)));
}

// ---- tensors of modules, which the operators do not see ------------------------

inline bool autocasts(const at::Tensor& tensor) {
  const c10::DeviceType device = tensor.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

inline void check_tensor(const char* where, const char* name, const at::Tensor& tensor) {
  check_defined(where, name, tensor);
  check_memory(where, name, tensor);
}

// Checks a tensor for concatenation. at::cat would promote another dtype and, under autocast, also
// integers.
inline void check_kind_of_concatenated(
    const char* where, const char* name, const at::Tensor& tensor, const at::Tensor& input) {
  check_device(where, name, tensor, input.device(), "input");
  const bool casts = autocasts(input) && at::isFloatingType(tensor.scalar_type());
  if (!casts) check_dtype(where, name, tensor, input.scalar_type(), "input");
}
inline void check_concatenated(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    c10::SymIntArrayRef shape,
    const at::Tensor& input) {
  check_tensor(where, name, tensor);
  check_shape(where, name, tensor, shape);
  check_kind_of_concatenated(where, name, tensor, input);
}

}  // namespace lltm
