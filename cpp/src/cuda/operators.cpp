// The operators on CUDA tensors. prepack and sequence_prepacked: the composite ones serve,
// which call these.
#include "common/schedule_log.h"
#include "common/steps.h"
#include "cuda/engine/engine.h"
#include "cuda/kernel/program_launch.h"
#include "op/backend.h"
#include "op/composite.h"

#include <c10/cuda/CUDAGuard.h>

#include <string>

namespace lltm::cuda {
namespace {

const at::Tensor& h_of(const StepInputs& args) {
  return args.h;
}
const at::Tensor& h_of(const SequenceInputs& args) {
  return args.h_0;
}

void report_composite(const at::Tensor& input, const at::Tensor& h, const char* why) {
  TORCH_WARN_ONCE(
      "lltm: cells of one's own run by PyTorch's operations here, which takes longer: ", why);
  if (!logs_schedules()) return;
  log_schedule(
      flat_size(input),
      h.size(0),
      input.size(-1),
      h.size(1),
      std::string("on CUDA, composite (") + why + ")");
}

// The kernels of cells that users have written need NVRTC.
template <auto engine, auto composite, typename Args>
auto choose(const Args& args) {
  const char* const why_not = args.cell->programs == nullptr ? nullptr : why_no_programs();
  if (why_not == nullptr) return engine(args);
  report_composite(args.input, h_of(args), why_not);
  return composite(args);
}

struct Cuda {
  using DeviceGuard = c10::cuda::CUDAGuard;
  static constexpr at::DeviceType kDevice = at::kCUDA;
  static constexpr auto step_forward =
      choose<cuda::step_forward, composite::step_forward, StepArgs>;
  static constexpr auto step_backward =
      choose<cuda::step_backward, composite::step_backward, StepBackwardArgs>;
  static constexpr auto sequence_forward =
      choose<cuda::sequence_forward, composite::sequence_forward, SequenceArgs>;
  static constexpr auto sequence_backward =
      choose<cuda::sequence_backward, composite::sequence_backward, SequenceBackwardArgs>;
  static constexpr auto sequences_forward = cuda::sequences_forward;
  static constexpr auto sequences_backward = cuda::sequences_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  register_backend<Cuda>(m);
}

}  // namespace lltm::cuda
