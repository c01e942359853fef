#include "common/schedule_log.h"
#include "common/steps.h"
#include "cuda/engine/engine.h"
#include "cuda/kernel/persistent.h"

#include <lltm/backends.h>

#include <c10/util/Exception.h>

#include <string>

namespace lltm::cuda {
namespace {

// Nothing waits for a kernel, so what it could not do is known later.
void check_earlier_calls() {
  TORCH_CHECK(
      !take_failure(),
      "lltm::sequence: the persistent engine waited in vain in an earlier call, whose results are "
      "NaN; lltm.backends.cuda.persistent = False avoids it");
}

// By the persistent engine where it can run, else step by step.
template <typename Result, typename Args, typename Persistent>
Result run(
    const char* direction,
    const Args& args,
    const Persistent& persistent,
    Result (*stepwise)(const Args&)) {
  check_earlier_calls();
  Attempt<Result> attempt = cuda_persistent()
                                ? persistent()
                                : Attempt<Result>{{}, "lltm.backends.cuda.persistent is off"};
  if (logs_schedules()) {
    std::string schedule = direction;
    if (attempt) {
      schedule += "persistent, " + std::to_string(attempt.groups) + " groups of " +
                  std::to_string(attempt.tiles * kTileRows) + " rows";
    } else {
      schedule += std::string("stepwise (") + attempt.why_not + ")";
    }
    log_schedule(
        flat_size(args.input),
        args.h_0.size(0),
        args.input.size(-1),
        args.h_0.size(1),
        "on CUDA, " + schedule);
  }
  return attempt ? *std::move(attempt) : stepwise(args);
}

}  // namespace

SequenceResult sequence_forward(const SequenceArgs& args) {
  return run<SequenceResult, SequenceArgs>(
      "forward: ",
      args,
      [&] { return persistent_forward(args); },
      [](const SequenceArgs& args) { return stepwise_forward(args); });
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  return run<Gradients, SequenceBackwardArgs>(
      "backward: ", args, [&] { return persistent_backward(args); }, stepwise_backward);
}

}  // namespace lltm::cuda
