// The per-step engine of every device: any cell and dtype, step by step and stage by stage
// (program.h), in place. A device supplies GEMMs (device_gemm.h) and a StepDevice.
//
// T is the tensors' dtype, C its compute dtype, O that of the device's GEMMs.
#pragma once

#include "aten/device_gemm.h"
#include "common/matrix.h"
#include "common/operator_args.h"
#include "common/step_io.h"

#include <cstdint>

namespace lltm {

// Of `rows` rows. H columns per pre-activation, state, saved value or operand (cell.h). c_next may
// be c.
struct ForwardStep {
  std::int64_t rows;
  View z;                       // C, with biases only if the device returns them
  View c, c_next;               // T
  View h_next;                  // T
  View h_operand;               // O: h_next for the next step's GEMM, or null
  View saved;                   // T, or null
  View operands;                // O, of products
  std::int64_t operand_stride;  // columns between operands
};

// D is C between steps, and O if `is_in_place`. A null gradient is zero. grad_c_prev may be grad_c.
struct BackwardStep {
  std::int64_t rows;
  View saved;          // T
  View grad_h;         // T, with any strides; or null
  View grad_h_state;   // D, added to grad_h; or null
  View grad_c;         // D, or null
  View grad_c_prev;    // D
  View dz;             // O: gradients of pre-activations, then of parameters
  View grad_operands;  // C, of products
  std::int64_t operand_stride;
};

// A single step reads its states, or their gradients, and writes the new ones without copies.
inline bool is_in_place(const SequenceArgs& args) {
  return args.is_step() && changes_states(args) == nullptr && !args.saves_checkpoints();
}
inline bool is_in_place(const SequenceBackwardArgs& args) {
  return args.is_step() && changes_states(args) == nullptr && !args.has_wide_gradients();
}

// Kernels for the steps of a call, with its biases and parameters.
template <typename Step>
class StepDevice {
 public:
  StepDevice() = default;
  StepDevice(const StepDevice&) = delete;
  StepDevice& operator=(const StepDevice&) = delete;
  virtual ~StepDevice() = default;

  virtual const DeviceGemm& gemm() const = 0;
  // (S * H) in C and the order of pre-activations, if the engine adds the biases to z, which then
  // has no padding.
  virtual at::Tensor bias() const { return {}; }
  // Stage 0 of a cell without stages.
  virtual void run(int stage, const Step& step) const = 0;
  // The means that follow the stage.
  virtual void average(int stage, std::int64_t rows) const = 0;
};

// Pre-activations of all steps whose z fits in `workspace_bytes`, at least of one, come from one
// GEMM with the input.
SequenceResult per_step_forward(
    const SequenceArgs& args, const StepDevice<ForwardStep>& device, std::int64_t workspace_bytes);
Gradients per_step_backward(
    const SequenceBackwardArgs& args, const StepDevice<BackwardStep>& device);

}  // namespace lltm
