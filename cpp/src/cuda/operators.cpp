// The operators on CUDA tensors. prepack and sequence_prepacked: the composite ones serve,
// which call these.
#include "cuda/engine/engine.h"
#include "op/backend.h"
#include "op/composite.h"

#include <c10/cuda/CUDAGuard.h>

namespace lltm::cuda {
namespace {

// Cells that users have written have no kernels here.
template <auto kernel, auto composite, typename Args>
auto choose(const Args& args) {
  return args.cell->programs == nullptr ? kernel(args) : composite(args);
}

struct Cuda {
  using DeviceGuard = c10::cuda::CUDAGuard;
  static constexpr auto step_forward =
      choose<cuda::step_forward, composite::step_forward, StepArgs>;
  static constexpr auto step_backward =
      choose<cuda::step_backward, composite::step_backward, StepBackwardArgs>;
  static constexpr auto sequence_forward =
      choose<cuda::sequence_forward, composite::sequence_forward, SequenceArgs>;
  static constexpr auto sequence_backward =
      choose<cuda::sequence_backward, composite::sequence_backward, SequenceBackwardArgs>;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  register_backend<Cuda>(m);
}

}  // namespace lltm::cuda
