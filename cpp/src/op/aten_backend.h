#pragma once

#include "common/operator_args.h"

#include <string_view>
#include <vector>

namespace lltm::aten_fallback {

// Recomputes the activations, so that autograd can differentiate them: saved activations are
// constants. Unlike checkpointed.h, this keeps all activations and writes nothing in place.
Gradients sequence_backward_recomputed(const SequenceBackwardArgs& args);

// The operator _unpack for a concatenated matrix, which it checks.
std::vector<at::Tensor> unpack_concatenated(std::string_view cell, const at::Tensor& concatenated);

// Reports that a call on a GPU runs as ATen operations: each call in the schedule log, and if
// `warns`, each cell and reason in a warning.
void report(const SequenceInputs& args, const char* why, bool warns = true);

}  // namespace lltm::aten_fallback
