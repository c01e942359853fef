// Detects interceptors of an operator call: autograd, dispatch modes, transforms and tracers. They
// determine if a layer may skip the Autograd key, may run two directions concurrently, or must
// compute in ATen operations.
#pragma once

#include "common/device.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lltm {

class Interceptors {
 public:
  // Checks this thread's state; add() checks the call's tensors.
  Interceptors() {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    transform_ = keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
    other_ = !c10::default_included_set.has_all(keys.included_) ||
             !keys.excluded_.has_all(c10::default_excluded_set) ||
             at::impl::torch_function_mode_enabled();
  }
  explicit Interceptors(at::TensorList tensors) : Interceptors() { add(tensors); }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    autograd_ = autograd_ || (grad_mode_ && tensor.requires_grad());
    transform_ = transform_ || tensor._fw_grad(/*level=*/0).defined();
    other_ = other_ || !is_unwrapped(tensor);
  }
  void add(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) add(tensor);
  }

  bool autograd() const { return autograd_; }
  // True in a torch.func transform or forward mode, for which the kernels have no derivatives.
  bool transform() const { return transform_; }
  // False in a transform, dispatch mode, tracer or autocast, or with a Tensor subclass.
  bool at_most_autograd() const { return !transform_ && !other_; }
  bool none() const { return at_most_autograd() && !autograd_; }

 private:
  const bool grad_mode_ = at::GradMode::is_enabled();
  bool autograd_ = false, transform_ = false, other_ = false;
};

}  // namespace lltm
