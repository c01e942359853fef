#pragma once

#include "common/operator_args.h"
#include "common/tensor_steps.h"
#include "common/weights.h"
#include "cpu/engine/weight_gradient_gemm.h"
#include "cpu/gemm/gemm.h"

#include <memory>
#include <vector>

namespace lltm::cpu {

// Accumulates gradients chunk by chunk, so that dz is never stored for all steps.
class SequenceGradients {
 public:
  // `weights` are in pre-activation order, with dz's dtype.
  SequenceGradients(
      const SequenceBackwardArgs& args,
      const std::vector<Step>& steps,
      const Weights& weights,
      const BackwardSchedule& schedule);

  // dz (rows, S * H) of steps [first, last), in the input's row order. False if values are
  // out of range.
  bool add(size_t first, size_t last, const at::Tensor& dz);

  // dc is the c_0 gradient. parameter_sums: (workers, P * H), undefined without parameters.
  Gradients finish(const at::Tensor& dc, const at::Tensor& parameter_sums);

 private:
  // [h, x, 1]^T dz, only for pre-activations to which the left operand contributes: h and x have
  // separate products if their pre-activations differ. Instead of h,
  // weight_hh may multiply an operand of the step's products, a saved value. With heads, each has
  // a product.
  struct GradientGemm {
    SlotRange slots;
    bool of_x, of_h;    // for weight_ih and bias_ih, for weight_hh and bias_hh
    bool h, x, one;     // wanted
    int operand = -1;   // -1: h
    int64_t head = -1;  // -1: all
    std::unique_ptr<WeightGradientGemm> gemm = {};
  };

  void add_gemm(GradientGemm product, const at::TensorOptions& options);
  void add_initial_state(size_t first, size_t last, const at::Tensor& dz);
  at::Tensor columns(const at::Tensor& dz, SlotRange slots) const;

  const SequenceBackwardArgs& args_;
  const CellInfo& cell_;
  const int64_t hidden_, input_size_, heads_;
  const BackwardSchedule& schedule_;
  const std::vector<Step>& steps_;
  std::vector<int64_t> begun_;  // [k]: rows that started before step k
  at::Tensor weights_h_;
  at::Tensor d_input_;     // (N, I)
  at::Tensor d_h_0_;       // (B, H)
  PackedGemm input_gemm_;  // dz W_x
  std::vector<GradientGemm> gemms_;
};

}  // namespace lltm::cpu
