// The gradients that the steps of a sequence share: of weights, bias, input and initial state.
#pragma once

#include "common/steps.h"
#include "cpu/engine/weight_gradients.h"
#include "cpu/gemm/gemm.h"
#include "op/operator_args.h"

#include <memory>
#include <vector>

namespace lltm::cpu {

// Accumulates the gradients of the arguments from those of the pre-activations, chunk by
// chunk, so that the latter are never held for all steps. Computes only what was asked for.
class SequenceGradients {
 public:
  // `weights` (G * H, H + I) are of the dtype of dz.
  SequenceGradients(
      const SequenceBackwardArgs& args,
      const std::vector<Step>& steps,
      const at::Tensor& weights,
      GemmFormat format);

  // Adds what steps [first, last) contribute: dz (rows, G * H), in the order of the input's
  // rows. False where values are out of range of the format.
  bool add(size_t first, size_t last, const at::Tensor& dz);

  // dc (B, H) is the gradient of c_0.
  Gradients finish(const at::Tensor& dc);

 private:
  void add_initial_state(size_t first, size_t last, const at::Tensor& dz);

  const SequenceBackwardArgs& args_;
  const std::vector<Step>& steps_;
  std::vector<int64_t> begun_;  // [k]: rows of the state that started before step k
  at::Tensor weights_h_;
  at::Tensor output_rows_;
  at::Tensor d_input_;                                // (N, I)
  at::Tensor d_h_0_;                                  // (B, H)
  std::unique_ptr<PackedGemm> input_gemm_;            // dz W_x
  std::unique_ptr<WeightGradientGemm> weights_gemm_;  // [h, x, 1]^T dz
};

}  // namespace lltm::cpu
