// The operators for CUDA tensors. prepack uses the ATen fallback.
#include "aten/fallback.h"
#include "common/device.h"
#include "cuda/context.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/compiled.h"
#include "op/aten_backend.h"
#include "op/backend.h"

#include <lltm/backends.h>

#include <c10/core/DeviceGuard.h>

namespace lltm::cuda {
namespace {

template <auto engine, auto fallback, typename Args>
auto choose(const Args& args) {
  const char* const unsupported = why_no_compiled_kernels();
  const Engine kind = args.is_step() ? Engine::step : Engine::per_step;
  const char* const why_not =
      unsupported != nullptr ? unsupported : why_not_kernels(*args.cell, args.input, kind);
  if (why_not == nullptr) return engine(args);
  aten_fallback::report(args, why_not, /*warns=*/unsupported != nullptr);
  return fallback(args);
}

struct Cuda {
  using DeviceGuard = c10::DeviceGuard;
  static constexpr auto forward =
      choose<cuda::sequence_forward, aten_fallback::sequence_forward, SequenceArgs>;
  static constexpr auto backward =
      choose<cuda::sequence_backward, aten_fallback::sequence_backward, SequenceBackwardArgs>;
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
