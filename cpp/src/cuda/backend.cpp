// The operators for CUDA tensors. prepack uses the ATen fallback.
#include "op/backend.h"
#include "common/device.h"
#include "common/schedule_log.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/program_launch.h"
#include "op/aten_fallback.h"

#include <lltm/backends.h>

#include <c10/cuda/CUDAGuard.h>

#include <string>

namespace lltm::cuda {
namespace {

const char* why_no_nvrtc_for(const CellInfo& cell) {
  const char* const why_not = cell.programs == nullptr ? nullptr : why_no_programs();
  if (why_not != nullptr) {
    TORCH_WARN_ONCE("lltm: custom cells use slower ATen operations on CUDA devices: ", why_not);
  }
  return why_not;
}

template <auto engine, auto fallback, typename Args>
auto choose(const Args& args) {
  const CellInfo& cell = *args.cell;
  const Engine kind = args.is_step() ? Engine::step : Engine::per_step;
  const bool supported = cell.is_element_wise() && !has_heads(args.weight_hh) && cell.outputs == 0;
  const char* why_not = supported ? why_no_nvrtc_for(cell)
                                  : "products, means, given gates, heads or states as output";
  if (why_not == nullptr) why_not = why_not_kernels(*args.cell, args.input, kind);
  if (why_not == nullptr) return engine(args);
  if (logs_schedules())
    log_schedule(args, std::string("on CUDA, ATen operations (") + why_not + ")");
  return fallback(args);
}

struct Cuda {
  using DeviceGuard = c10::cuda::CUDAGuard;
  static constexpr auto forward =
      choose<cuda::sequence_forward, aten_fallback::sequence_forward, SequenceArgs>;
  static constexpr auto backward =
      choose<cuda::sequence_backward, aten_fallback::sequence_backward, SequenceBackwardArgs>;
};

}  // namespace

// Native tests register this backend for the CPU, with host versions of CUDA functions.
#if !defined(LLTM_CUDA_KEY)
#define LLTM_CUDA_KEY CUDA
#endif
TORCH_LIBRARY_IMPL(lltm, LLTM_CUDA_KEY, m) {
  const auto fits = [](const SequenceArgs& /*call*/, bool /*training*/) {
    return cuda_persistent();
  };
  register_device(
      c10::DeviceType::LLTM_CUDA_KEY,
      {.fits_side_by_side = fits, .run_side_by_side = run_both_directions});
  register_backend<Cuda>(m);
}

}  // namespace lltm::cuda
