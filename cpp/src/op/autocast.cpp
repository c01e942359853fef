// Autocast: all results, including c, have the autocast dtype.
#include "op/autocast.h"

namespace lltm {
namespace {

template <c10::DeviceType device, typename Args>
SequenceOutputs autocast(const Args& args) {
  return under_autocast(device, args, op::call<Args>);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  implement<autocast<device, StepArgs>>(m, "step");
  implement<autocast<device, SequenceArgs>>(m, "sequence");
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  register_autocast<c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  register_autocast<c10::DeviceType::CUDA>(m);
}

}  // namespace lltm
