// The results that all steps contribute to, the same for both engines.
#pragma once

#include "cpu/engine.h"
#include "cpu/products.h"
#include "steps.h"

#include <optional>
#include <vector>

namespace lltm::cpu {

// h_n (B, H): each row of the output (N, H) at its last step, or h_0.
at::Tensor final_states(
    const std::vector<Step>& steps, const at::Tensor& h_0, const at::Tensor& output_rows);

// Sums up the gradients of the arguments from those of the pre-activations,
// given for some steps at a time, so that the latter need never be held for all
// steps at once. Only the gradients that were asked for are computed.
class GradientSums {
 public:
  // `weights` (3H, H+I) is of the dtype that the products are to have; `split` as
  // in products.h.
  GradientSums(
      const BackwardProblem& problem,
      const std::vector<Step>& steps,
      const at::Tensor& weights,
      bool split);

  // Adds what steps [first, last) contribute: dz (rows, 3H) are the gradients
  // of their pre-activations, in the order of the input's rows.
  void add(size_t first, size_t last, const at::Tensor& dz);

  // dc (B, H) is the gradient of c_0.
  Gradients finish(const at::Tensor& dc);

 private:
  Pieces states_before(size_t first, size_t last, at::ScalarType dtype) const;
  void add_initial_state(size_t first, size_t last, const at::Tensor& dz);

  const BackwardProblem& p_;
  const std::vector<Step>& steps_;
  std::vector<int64_t> begun_;  // rows of the state that take part before each step
  at::Tensor weights_h_;
  std::optional<RightOperand> weights_x_;
  std::optional<TransposedSum> products_;
  at::Tensor output_rows_, initial_rows_;
  at::Tensor input_;    // (N, I)
  at::Tensor h_0_;      // (B, H)
  at::Tensor weights_;  // transposed, (H+I, 3H)
  at::Tensor bias_;     // (3H)
};

}  // namespace lltm::cpu
