#pragma once

#include "op/argument_checks.h"
#include "op/operators.h"

#include <ATen/autocast_mode.h>

#include <optional>

namespace lltm {

// Turns autocast off for the device, so that the operator does not cast again.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device)
      : device_(device),
        off_(at::autocast::get_autocast_dispatch_key_from_device_type(device)),
        dtype_(at::autocast::get_autocast_dtype(device)) {}

  // Floating-point tensors of the device, except float64.
  template <typename Flat>
  TensorArgument<Flat> operator()(const TensorArgument<Flat>& tensor) const {
    if (!tensor.defined() || !has_elements(tensor)) return tensor;  // the operator reports it
    return at::autocast::cached_cast(dtype_, *tensor, device_);
  }
  template <typename Option>
  Option operator()(const Option& option) const {
    return option;
  }

 private:
  c10::DeviceType device_;
  c10::impl::ExcludeDispatchKeyGuard off_;
  at::ScalarType dtype_;
};

// The device of the input if its autocast is enabled and has a kernel (autocast.cpp).
inline std::optional<c10::DeviceType> autocast_device(const at::Tensor& input) {
  const auto device = input.defined() ? input.device().type() : c10::DeviceType::Meta;
  const bool has_kernel = device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
  return has_kernel && at::autocast::is_autocast_enabled(device) ? std::optional(device)
                                                                 : std::nullopt;
}

// Casts nothing with prepacked weights, which keep their dtype.
template <typename Run>
auto under_autocast(c10::DeviceType device, const SequenceArgs& args, const Run& run) {
  if (args.prepacked()) {
    const c10::impl::ExcludeDispatchKeyGuard off(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return run(args);
  }
  return run_changed(args, Autocast(device), run);
}

}  // namespace lltm
