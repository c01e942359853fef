#include "op/bidirectional.h"

#include "common/device.h"
#include "op/autograd.h"
#include "op/operators.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <array>

namespace lltm {

bool fits_side_by_side(const SequenceArgs& call, const Interceptors& interceptors) {
  const bool training = interceptors.autograd();
  if (!interceptors.at_most_autograd() || (call.prepacked() && training)) return false;
  const auto fits = find_device(call.input->device().type()).fits_side_by_side;
  return fits != nullptr && fits(call, training);
}

void run_side_by_side(const at::Tensor& input, const std::function<void(size_t)>& run) {
  const at::ThreadLocalState state;  // such as inference mode and profilers
  find_device(input.device().type()).run_side_by_side([&](size_t k) {
    const at::ThreadLocalStateGuard same(state);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    run(k);
  });
}

std::pair<SequenceOutputs, SequenceOutputs> sequences_side_by_side(
    SequenceArgs first, SequenceArgs second) {
  const std::array calls = {std::move(first), std::move(second)};
  std::array<SequenceOutputs, 2> outputs;
  if (records_gradients(calls[0]) || records_gradients(calls[1])) {
    outputs = sequences_with_autograd(calls);
  } else {
    run_side_by_side(calls[0].input, [&](size_t k) { outputs[k] = op::call(calls[k]); });
  }
  return {std::move(outputs[0]), std::move(outputs[1])};
}

}  // namespace lltm
