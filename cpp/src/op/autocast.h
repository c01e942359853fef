// The arguments of an operator under autocast.
#pragma once

#include <ATen/autocast_mode.h>

#include <cstdint>
#include <optional>

namespace lltm {

// Casts arguments. While it exists, autocast is off for the device, so that an
// operator called with the cast arguments does not cast them again.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device)
      : device_(device),
        off_(at::autocast::get_autocast_dispatch_key_from_device_type(device)),
        dtype_(at::autocast::get_autocast_dtype(device)) {}

  // Casts floating-point tensors of the device, except float64 ones.
  at::Tensor operator()(const at::Tensor& tensor) const {
    return tensor.defined() ? at::autocast::cached_cast(dtype_, tensor, device_) : tensor;
  }
  std::optional<at::Tensor> operator()(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() ? std::optional<at::Tensor>((*this)(*tensor)) : std::nullopt;
  }
  bool operator()(bool flag) const { return flag; }
  int64_t operator()(int64_t number) const { return number; }

 private:
  c10::DeviceType device_;
  c10::impl::ExcludeDispatchKeyGuard off_;
  at::ScalarType dtype_;
};

// A function that calls `op` with its arguments cast.
template <typename Op>
auto under_autocast(c10::DeviceType device, const Op& op) {
  return [device, &op](const auto&... args) {
    const Autocast cast(device);
    return op(cast(args)...);
  };
}

}  // namespace lltm
