// The arguments of an operator under autocast.
#pragma once

#include <ATen/autocast_mode.h>

#include <optional>

namespace lltm {

// While it lives, autocast is off for the device, so what is called with the
// arguments that it has cast is not cast again.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device)
      : device_(device),
        off_(at::autocast::get_autocast_dispatch_key_from_device_type(device)),
        dtype_(at::autocast::get_autocast_dtype(device)) {}

  // float64, and what is not a floating tensor of the device, stays as it is.
  at::Tensor operator()(const at::Tensor& tensor) const {
    return tensor.defined() ? at::autocast::cached_cast(dtype_, tensor, device_) : tensor;
  }
  std::optional<at::Tensor> operator()(const std::optional<at::Tensor>& tensor) const {
    return tensor.has_value() ? std::optional<at::Tensor>((*this)(*tensor)) : std::nullopt;
  }

 private:
  c10::DeviceType device_;
  c10::impl::ExcludeDispatchKeyGuard off_;
  at::ScalarType dtype_;
};

}  // namespace lltm
