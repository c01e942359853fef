#include "common/schedule_log.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/persistent.h"

#include <lltm/backends.h>

#include <c10/util/Exception.h>

#include <string>

namespace lltm::cuda {
namespace {

// Called later, because no call waits for its kernels.
void check_earlier_calls(c10::Device device) {
  TORCH_CHECK(
      !take_failure(current_stream()),
      "lltm::sequence: the persistent kernel timed out in an earlier call on this stream of ",
      device,
      ", and its results are NaN; set lltm.backends.cuda.persistent = False");
}

template <typename Result, typename Args>
Result run(
    const char* direction,
    const Args& args,
    Attempt<Result> (*persistent)(const Args&),
    Result (*per_step)(const Args&)) {
  check_earlier_calls(args.input->device());
  const char* const why_not = cuda_persistent()
                                  ? why_not_kernels(*args.cell, args.input, Engine::persistent)
                                  : "lltm.backends.cuda.persistent is False";
  Attempt<Result> attempt = why_not == nullptr ? persistent(args) : Attempt<Result>{{}, why_not};
  if (logs_schedules()) {
    const std::string engine = attempt ? "persistent, " + std::to_string(attempt.groups) +
                                             " groups of " +
                                             std::to_string(attempt.tiles * kTileRows) + " rows"
                                       : std::string("per-step (") + attempt.why_not + ")";
    log_schedule(args, std::string("on CUDA, ") + direction + engine);
  }
  return attempt ? *std::move(attempt) : per_step(args);
}

}  // namespace

SequenceResult sequence_forward(const SequenceArgs& args) {
  if (args.is_step()) return step_forward(args);
  return run<SequenceResult, SequenceArgs>(
      "forward: ",
      args,
      [](const SequenceArgs& args) { return persistent_forward(args); },
      [](const SequenceArgs& args) { return per_step_forward(args); });
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  if (args.is_step()) return step_backward(args);
  return run<Gradients, SequenceBackwardArgs>(
      "backward: ",
      args,
      [](const SequenceBackwardArgs& args) { return persistent_backward(args); },
      per_step_backward);
}

}  // namespace lltm::cuda
