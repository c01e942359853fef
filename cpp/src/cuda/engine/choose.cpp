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

template <typename Args>
void log(const char* direction, const Args& args, const std::string& engine) {
  log_schedule(
      flat_size(args.input),
      args.h_0.size(0),
      args.input.size(-1),
      args.h_0.size(1),
      std::string("on CUDA, ") + direction + engine);
}

// By the persistent engine where it can run, at once or one after another; else step by step.
template <typename Result, typename Args>
std::vector<Result> run(
    const char* direction,
    std::span<const Args> calls,
    Attempt<Result> (*persistent)(std::span<const Args>),
    Result (*stepwise)(const Args&)) {
  check_earlier_calls();
  Attempt<Result> attempt = cuda_persistent()
                                ? persistent(calls)
                                : Attempt<Result>{{}, "lltm.backends.cuda.persistent is off"};
  if (attempt) {
    if (logs_schedules()) {
      const std::string at_once =
          calls.size() > 1 ? ", " + std::to_string(calls.size()) + " calls at once" : "";
      for (const Args& args : calls) {
        log(direction,
            args,
            "persistent, " + std::to_string(attempt.groups) + " groups of " +
                std::to_string(attempt.tiles * kTileRows) + " rows" + at_once);
      }
    }
    return *std::move(attempt);
  }
  std::vector<Result> results;
  if (calls.size() > 1) {
    for (const Args& args : calls) {
      results.push_back(run(direction, std::span(&args, 1), persistent, stepwise).front());
    }
    return results;
  }
  const Args& args = calls.front();
  if (logs_schedules()) log(direction, args, std::string("stepwise (") + attempt.why_not + ")");
  results.push_back(stepwise(args));
  return results;
}

}  // namespace

std::vector<SequenceResult> sequences_forward(std::span<const SequenceArgs> calls) {
  return run<SequenceResult, SequenceArgs>(
      "forward: ",
      calls,
      [](std::span<const SequenceArgs> calls) { return persistent_forward(calls); },
      [](const SequenceArgs& args) { return stepwise_forward(args); });
}

std::vector<Gradients> sequences_backward(std::span<const SequenceBackwardArgs> calls) {
  return run<Gradients, SequenceBackwardArgs>(
      "backward: ",
      calls,
      [](std::span<const SequenceBackwardArgs> calls) { return persistent_backward(calls); },
      stepwise_backward);
}

}  // namespace lltm::cuda
