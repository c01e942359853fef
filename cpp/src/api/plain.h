// Plain tensors and threads: where nothing takes part in an operator but its kernel, the Python
// code and the dispatcher can be skipped.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace lltm {

// Whether this thread is in no mode, transform, trace or autocast.
inline bool is_plain_thread() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return c10::default_included_set.has_all(keys.included_) &&
         keys.excluded_.has_all(c10::default_excluded_set) &&
         !at::impl::torch_function_mode_enabled();
}

// Whether the elements of a tensor are what lies in memory, and no transform has wrapped it.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet plain(
      {DispatchKey::CPU,
       DispatchKey::CUDA,
       DispatchKey::ADInplaceOrView,
       DispatchKey::AutogradCPU,
       DispatchKey::AutogradCUDA,
       DispatchKey::AutocastCPU,
       DispatchKey::AutocastCUDA});
  return tensor.defined() && plain.has_all(tensor.key_set());
}

}  // namespace lltm
