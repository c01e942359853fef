// The current device, its context and its current stream.
#pragma once

#include "cuda/functions.h"
#include "cuda/kernel/elementwise.h"

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

// Native tests register the backend for the CPU, with host versions of CUDA functions.
#if !defined(LLTM_CUDA_KEY)
#define LLTM_CUDA_KEY CUDA
#endif

namespace lltm::cuda {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::LLTM_CUDA_KEY;

// Throw the error's text.
void check_driver(int result);
void check_cublas(int status);

c10::DeviceIndex current_device();
// Of this device.
int attribute(DeviceAttribute which);
int compute_capability();  // 90 for 9.0

bool is_capturing(Stream stream);

// Within a capture, CUDA rejects calls that may wait for other work: loading a kernel's module and
// allocating. They do not affect the captured work.
class OutsideOfCapture {
 public:
  OutsideOfCapture() { exchange(); }
  ~OutsideOfCapture() { exchange(); }
  OutsideOfCapture(const OutsideOfCapture&) = delete;
  OutsideOfCapture& operator=(const OutsideOfCapture&) = delete;

 private:
  void exchange() { functions().cuThreadExchangeStreamCaptureMode(&mode_); }
  int mode_ = kCaptureModeRelaxed;
};

}  // namespace lltm::cuda
