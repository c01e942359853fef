// The ATen fallback. Like the kernels, it rounds each step's states, the activations and the
// gradients to float16 or bfloat16. Does not check arguments.
#pragma once

#include "common/operator_args.h"
#include "op/run_program.h"

#include <string_view>
#include <vector>

namespace lltm::aten_fallback {

SequenceResult sequence_forward(const SequenceArgs& args);
Gradients sequence_backward(const SequenceBackwardArgs& args);

// With a device's kernels for the stages of steps. Not differentiable.
SequenceResult forward_by_stages(const SequenceArgs& args, const StageKernels& kernels);
Gradients backward_by_stages(const SequenceBackwardArgs& args, const StageKernels& kernels);

// Recomputes the activations, so that autograd can differentiate them: saved activations are
// constants. Unlike checkpointed.h, this keeps all activations and writes nothing in place.
Gradients sequence_backward_recomputed(const SequenceBackwardArgs& args);

// The operator _unpack for a concatenated matrix, which it checks.
std::vector<at::Tensor> unpack_concatenated(std::string_view cell, const at::Tensor& concatenated);

// Reports that a call on a GPU runs here: each call in the schedule log, and if `warns`, each cell
// and reason in a warning.
void report(const SequenceInputs& args, const char* why, bool warns = true);

}  // namespace lltm::aten_fallback
