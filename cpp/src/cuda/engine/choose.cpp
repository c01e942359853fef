#include "cuda/engine/engine.h"

#include <lltm/backends.h>

namespace lltm::cuda {

SequenceResult sequence_forward(const SequenceArgs& args) {
  if (cuda_persistent()) {
    if (auto result = persistent_forward(args)) return *std::move(result);
  }
  return stepwise_forward(args);
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  if (cuda_persistent()) {
    if (auto result = persistent_backward(args)) return *std::move(result);
  }
  return stepwise_backward(args);
}

}  // namespace lltm::cuda
