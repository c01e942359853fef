// Features of a device in addition to its operators, which a backend registers from its folder.
#pragma once

#include "common/operator_args.h"

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <functional>
#include <string>

namespace lltm {

// A device may lack features (null).
struct Device {
  // The name of the kernels in use, and lines of build_info (on CUDA the rest of one).
  const char* (*kernels)() = nullptr;
  std::string (*description)() = nullptr;
  // True if the two directions of a layer take less time concurrently. `call`: one of them.
  bool (*fits_side_by_side)(const SequenceArgs& call, bool training) = nullptr;
  // Calls run(0) and run(1), on a CPU concurrently, each for half of the threads. Rethrows errors.
  void (*run_side_by_side)(const std::function<void(size_t)>& run) = nullptr;
};

void register_device(c10::DeviceType type, const Device& device);

const Device& find_device(c10::DeviceType type);

// The keys of tensors whose memory holds the elements and that no transform has wrapped: those of
// registered devices, with autograd and autocast.
extern c10::DispatchKeySet unwrapped_keys;

inline bool is_unwrapped(const at::Tensor& tensor) {
  return !tensor.defined() || unwrapped_keys.has_all(tensor.key_set());
}

}  // namespace lltm
