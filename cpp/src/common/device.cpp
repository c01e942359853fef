#include "common/device.h"

#include <ATen/autocast_mode.h>
#include <c10/core/TensorOptions.h>

#include <array>

namespace lltm {
namespace {

constexpr auto kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

// Backends register while the library is loaded.
std::array<Device, kTypes>& devices() {
  static std::array<Device, kTypes> all = {};
  return all;
}

}  // namespace

constinit c10::DispatchKeySet unwrapped_keys;

void register_device(c10::DeviceType type, const Device& device) {
  devices()[static_cast<size_t>(type)] = device;
  const c10::DispatchKey key = at::TensorOptions(type).computeDispatchKey();
  unwrapped_keys = unwrapped_keys.add(key) |
                   c10::getAutogradRelatedKeySetFromBackend(c10::toBackendComponent(key));
  if (at::autocast::is_autocast_available(type)) {
    unwrapped_keys =
        unwrapped_keys.add(at::autocast::get_autocast_dispatch_key_from_device_type(type));
  }
}

const Device& find_device(c10::DeviceType type) {
  return devices()[static_cast<size_t>(type)];
}

}  // namespace lltm
