#include "cuda/context.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <string>

namespace lltm::cuda {

void check_driver(int result) {
  if (result == 0) return;
  const char* text = nullptr;
  functions().cuGetErrorString(result, &text);
  const std::string message =
      std::string("CUDA driver error: ") + (text == nullptr ? "unknown" : text);
  TORCH_CHECK_WITH(OutOfMemoryError, result != kOutOfMemory, message);
  TORCH_CHECK(false, message);
}

void check_cublas(int status) {
  TORCH_CHECK(status == 0, "cuBLAS error: status ", status);
}

c10::DeviceIndex current_device() {
  return c10::impl::VirtualGuardImpl(kDeviceType).getDevice().index();
}

int attribute(DeviceAttribute which) {
  int value = 0;
  check_driver(functions().cuDeviceGetAttribute(&value, static_cast<int>(which), current_device()));
  return value;
}

int compute_capability() {
  return 10 * attribute(DeviceAttribute::kCapabilityMajor) +
         attribute(DeviceAttribute::kCapabilityMinor);
}

// A thread whose first CUDA call is ours has no context, and PyTorch changes devices lazily.
Stream current_stream() {
  const c10::DeviceIndex device = current_device();
  int of_context = -1;
  if (functions().cuCtxGetDevice(&of_context) != 0 || of_context != device) {
    void* context = nullptr;
    check_driver(functions().cuDevicePrimaryCtxRetain(&context, device));
    check_driver(functions().cuCtxSetCurrent(context));
  }
  Stream stream = {nullptr};
  TORCH_CHECK(
      functions().aoti_torch_get_current_cuda_stream(device, &stream.handle) == 0,
      "lltm: PyTorch has no current CUDA stream");
  return stream;
}

bool is_capturing(Stream stream) {
  int status = 0;
  check_driver(functions().cuStreamIsCapturing(stream.handle, &status));
  return status != 0;
}

}  // namespace lltm::cuda
