#include "common/schedule_log.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/persistent.h"

#include <lltm/backends.h>

#include <c10/util/Exception.h>

#include <string>
#include <utility>

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

template <typename Args, typename Persistent, typename Otherwise>
auto run(
    Engine engine, const Args& args, const Persistent& persistent, const Otherwise& otherwise) {
  check_earlier_calls(args.input->device());
  PersistentPlan plan = cuda_persistent()
                            ? plan_persistent(args, concurrent_directions())
                            : PersistentPlan{"lltm.backends.cuda.persistent is False"};
  if (plan.why_not == nullptr) {
    plan.why_not = why_not_kernels(*args.cell, args.input, engine, plan);
  }
  decltype(persistent(plan)) result;
  if (plan.why_not == nullptr) {
    result = persistent(plan);
    plan.why_not = "the GPU rejected a launch";
  }
  if (logs_schedules()) {
    const char* const direction = engine == Engine::persistent_forward ? "forward" : "backward";
    const std::string rows = std::to_string(plan.kernel.tiles * kTileRows) + " rows";
    const std::string chosen =
        result ? "persistent, " + std::to_string(plan.groups) + " groups of " + rows
               : std::string("per-step (") + plan.why_not + ")";
    log_schedule(args, std::string("on CUDA, ") + direction + ": " + chosen);
  }
  return result ? *std::move(result) : otherwise();
}

}  // namespace

SequenceResult sequence_forward(const SequenceArgs& args) {
  if (args.is_step()) return per_step_forward(args);
  return run(
      Engine::persistent_forward,
      args,
      [&](const PersistentPlan& plan) { return persistent_forward(args, plan); },
      [&] { return per_step_forward(args); });
}

Gradients sequence_backward(const SequenceBackwardArgs& args) {
  if (args.is_step()) return per_step_backward(args);
  return run(
      Engine::persistent_backward,
      args,
      [&](const PersistentPlan& plan) { return persistent_backward(args, plan); },
      [&] { return per_step_backward(args); });
}

}  // namespace lltm::cuda
