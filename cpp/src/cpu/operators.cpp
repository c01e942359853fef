// The operators on CPU tensors.
#include "cpu/engine/engine.h"
#include "cpu/packed_weights.h"
#include "op/backend.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

struct Cpu {
  using DeviceGuard = NoDeviceGuard;
  static constexpr auto step_forward = cpu::step_forward;
  static constexpr auto step_backward = cpu::step_backward;
  static constexpr auto sequence_forward = cpu::sequence_forward;
  static constexpr auto sequence_backward = cpu::sequence_backward;
  static constexpr auto prepack = cpu::prepack;

  static SequenceResult sequence_prepacked(const SequenceArgs& args) {
    check_prepacked(args);
    // Bytes that were read from a file may lie anywhere.
    const auto address = reinterpret_cast<std::uintptr_t>(args.weight_ih.const_data_ptr());
    if (address % 64 == 0) return sequence_forward(args);
    return sequence_forward(with_weights(args, args.weight_ih.clone()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  register_backend<Cpu>(m);
}

}  // namespace lltm::cpu
