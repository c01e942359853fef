#include "common/device.h"

#include <array>

namespace lltm {
namespace {

constexpr auto kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

// Backends register while the library is loaded.
std::array<const Device*, kTypes>& devices() {
  static std::array<const Device*, kTypes> all = {};
  return all;
}

}  // namespace

void register_device(c10::DeviceType type, const Device& device) {
  devices()[static_cast<size_t>(type)] = &device;
}

const Device* find_device(c10::DeviceType type) {
  return devices()[static_cast<size_t>(type)];
}

}  // namespace lltm
