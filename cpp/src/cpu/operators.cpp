// The operators on CPU tensors.
#include "op/backend.h"
#include "cpu/engine/engine.h"
#include "cpu/packed_weights.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

struct Cpu {
  using DeviceGuard = NoDeviceGuard;
  static constexpr auto cell_forward = cpu::cell_forward;
  static constexpr auto cell_backward = cpu::cell_backward;
  static constexpr auto sequence_forward = cpu::sequence_forward;
  static constexpr auto sequence_backward = cpu::sequence_backward;
  static constexpr auto prepack = cpu::prepack;

  static SequenceResult sequence_prepacked(const SequenceArgs& args) {
    const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, steps] = args;
    check_prepacked(weights, input, h_0);
    // Bytes that were read from a file may lie anywhere.
    const bool aligned = reinterpret_cast<std::uintptr_t>(weights.const_data_ptr()) % 64 == 0;
    const at::Tensor packed = aligned ? weights : weights.clone();
    return sequence_forward({input, h_0, c_0, packed, bias, batch_sizes, reverse, save, steps});
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  register_backend<Cpu>(m);
}

}  // namespace lltm::cpu
