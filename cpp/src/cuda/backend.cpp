// The operators for CUDA tensors. prepack uses the ATen fallback.
#include "op/backend.h"
#include "common/device.h"
#include "common/schedule_log.h"
#include "common/weights.h"
#include "cuda/context.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/compiled.h"
#include "op/aten_fallback.h"

#include <lltm/backends.h>

#include <c10/core/DeviceGuard.h>

namespace lltm::cuda {
namespace {

// Products, means, given gates, states as output, and heads of single steps.
template <typename Args>
bool needs_stages(const Args& args) {
  const CellInfo& cell = *args.cell;
  const bool steps_with_heads = args.is_step() && has_heads(args.weight_hh);
  return !cell.is_element_wise() || steps_with_heads || cell.outputs > 0;
}

template <auto engine, auto by_stages, typename Args>
auto choose(const Args& args) {
  const char* const unsupported = why_no_compiled_kernels();
  if (unsupported == nullptr && needs_stages(args)) {
    if (logs_schedules()) log_schedule(args, "on CUDA, a kernel per stage");
    return by_stages(args, stage_kernels());
  }
  const Engine kind = args.is_step() ? Engine::step : Engine::per_step;
  const char* const why_not =
      unsupported != nullptr ? unsupported : why_not_kernels(*args.cell, args.input, kind);
  if (why_not == nullptr) return engine(args);
  aten_fallback::report(args, why_not, /*warns=*/unsupported != nullptr);
  return by_stages(args, {});
}

struct Cuda {
  using DeviceGuard = c10::DeviceGuard;
  static constexpr auto forward =
      choose<cuda::sequence_forward, aten_fallback::forward_by_stages, SequenceArgs>;
  static constexpr auto backward =
      choose<cuda::sequence_backward, aten_fallback::backward_by_stages, SequenceBackwardArgs>;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, LLTM_CUDA_KEY, m) {
  const auto fits = [](const SequenceArgs& /*call*/, bool /*training*/) {
    return cuda_persistent();
  };
  register_device(
      kDeviceType,
      {.description = describe_compiled_kernels,
       .fits_side_by_side = fits,
       .run_side_by_side = run_both_directions});
  register_backend<Cuda>(m);
}

}  // namespace lltm::cuda
