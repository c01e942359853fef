// What both engines compute when all steps are done: results that depend on
// all of them, or on none in particular.
#pragma once

#include "cpu/engine.h"
#include "steps.h"

#include <vector>

namespace lltm::cpu {

// h_n (B, H): each row of the output (N, H) at its last step, or h_0.
at::Tensor final_states(
    const std::vector<Step>& steps, const at::Tensor& h_0, const at::Tensor& output_rows);

// The gradients that were asked for, from those of all pre-activations, dz
// (N, 3H), and of c_0, dc (B, H). `weights` (3H, H+I) is of dz's dtype.
Gradients gradients_of_arguments(
    const BackwardProblem& problem,
    const std::vector<Step>& steps,
    const at::Tensor& dz,
    const at::Tensor& weights,
    const at::Tensor& dc);

}  // namespace lltm::cpu
