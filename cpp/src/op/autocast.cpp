// Autocast: all results, including c, have the autocast dtype.
#include "op/autocast.h"

namespace lltm {
namespace {

template <c10::DeviceType device>
StepOutputs step_autocast(const StepArgs& args) {
  return under_autocast(device, args, op::step);
}

template <c10::DeviceType device>
SequenceOutputs sequence_autocast(const SequenceArgs& args) {
  return under_autocast(device, args, op::sequence);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  implement<step_autocast<device>>(m, "step");
  implement<sequence_autocast<device>>(m, "sequence");
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  register_autocast<c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  register_autocast<c10::DeviceType::CUDA>(m);
}

}  // namespace lltm
