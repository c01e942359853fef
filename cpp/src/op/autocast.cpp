// Autocast: floating-point arguments are cast to the autocast dtype, so all results
// have that dtype (c as well as h). float64 arguments are not cast.
#include "op/autocast.h"

#include "op/operators.h"

#include <torch/library.h>

namespace lltm {
namespace {

template <c10::DeviceType device>
auto cell_autocast(const CellArgs& args) {
  return call(under_autocast(device, cell), args);
}

template <c10::DeviceType device>
auto sequence_autocast(const SequenceArgs& args) {
  return call(under_autocast(device, sequence), args);
}

template <c10::DeviceType device>
auto sequence_checkpointed_autocast(const SequenceArgs& args) {
  return call_checkpointed(under_autocast(device, sequence_checkpointed), args);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("cell", TORCH_FN(cell_op<cell_autocast<device>>));
  m.impl("sequence", TORCH_FN(sequence_op<sequence_autocast<device>>));
  m.impl(
      "sequence_checkpointed",
      TORCH_FN(sequence_checkpointed_op<sequence_checkpointed_autocast<device>>));
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  register_autocast<c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  register_autocast<c10::DeviceType::CUDA>(m);
}

}  // namespace lltm
