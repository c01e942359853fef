// Autocast: all results, including c, have the autocast dtype.
#include "op/autocast.h"

namespace lltm {
namespace {

template <c10::DeviceType device>
SequenceOutputs autocast(const SequenceArgs& args) {
  return under_autocast(device, args, op::call);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  implement<autocast<c10::DeviceType::CPU>>(m, "sequence");
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  implement<autocast<c10::DeviceType::CUDA>>(m, "sequence");
}

}  // namespace lltm
