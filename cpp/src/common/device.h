// Features of a device in addition to its operators, which a backend registers from its folder.
#pragma once

#include "common/operator_args.h"

#include <c10/core/DeviceType.h>

#include <cstddef>
#include <functional>
#include <string>

namespace lltm {

struct Device {
  // The name of the kernels in use, and lines of build_info.
  const char* (*kernels)();
  std::string (*description)();
  // True if the two directions of a layer take less time concurrently. `call`: one of them.
  bool (*fits_side_by_side)(const SequenceArgs& call, bool training);
  // Calls run(0) and run(1) concurrently, each for half of the threads. Rethrows errors.
  void (*run_side_by_side)(const std::function<void(size_t)>& run);
};

void register_device(c10::DeviceType type, const Device& device);

// Null for devices without such features.
const Device* find_device(c10::DeviceType type);

}  // namespace lltm
