// The operators on CUDA tensors. prepack and sequence_prepacked: the composite ones serve,
// which call these.
#include "cuda/engine/engine.h"
#include "op/backend.h"

#include <c10/cuda/CUDAGuard.h>

namespace lltm::cuda {
namespace {

struct Cuda {
  using DeviceGuard = c10::cuda::CUDAGuard;
  static constexpr auto step_forward = cuda::step_forward;
  static constexpr auto step_backward = cuda::step_backward;
  static constexpr auto sequence_forward = cuda::sequence_forward;
  static constexpr auto sequence_backward = cuda::sequence_backward;
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  register_backend<Cuda>(m);
}

}  // namespace lltm::cuda
