// Two calls at once, the directions of a layer, where nobody follows the operators but autograd: on
// the CPU each on a thread of its own, on a GPU by what its backend has for this.
#pragma once

#include "common/operator_args.h"

#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

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
  return !tensor.defined() || plain.has_all(tensor.key_set());
}

// The checked operators of a backend that runs several calls at once; null in another.
struct OperatorsAtOnce {
  std::vector<SequenceResult> (*forward)(bool save, std::span<const SequenceArgs>) = nullptr;
  std::vector<Gradients> (*backward)(std::span<const SequenceBackwardArgs>) = nullptr;
};
inline OperatorsAtOnce& operators_at_once(at::DeviceType device) {
  static std::array<OperatorsAtOnce, at::COMPILE_TIME_MAX_DEVICE_TYPES> operators;
  return operators.at(static_cast<size_t>(device));
}

// run(0) and run(1) on two threads, below autograd.
template <typename Run>
void run_side_by_side(const Run& run) {
  const at::ThreadLocalState state;  // inference mode and profilers, say
  at::parallel_for(0, 2, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    const at::ThreadLocalStateGuard same(state);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t k = begin; k < end; ++k) run(k);
  });
}

// op::sequence of two calls on a plain thread, whose tensors are plain; on a GPU, of a built-in
// cell. What autograd records of
// them is one node, so that they run side by side in backward too.
std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    const SequenceArgs& first, const SequenceArgs& second);

}  // namespace lltm
