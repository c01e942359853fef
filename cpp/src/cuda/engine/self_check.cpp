#include "cuda/engine/self_check.h"

#include "cuda/engine/engine.h"
#include "cuda/kernel/persistent.h"
#include "op/aten_fallback.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace lltm::cuda {
namespace {

using at::Tensor;

// More than a slice of hidden units, less than a tile of rows.
constexpr int64_t kSteps = 4, kBatch = 3, kInput = 5, kHidden = 24;

// Maximum error relative to the largest value, in epsilons of the dtype (TF32 for float32). For
// float64, 2^-42: surrogate gradients amplify rounding.
constexpr double kMostEpsilons = 16;
double epsilon(at::ScalarType dtype) {
  return dtype == at::kDouble ? 0x1p-42 : dtype == at::kBFloat16 ? 0x1p-7 : 0x1p-10;
}

struct Problem {
  const CellInfo& cell;
  const at::TensorOptions options;
  const int64_t of_x = cell.x.count() * kHidden, of_h = cell.h.count() * kHidden;
  const Tensor input = values({kSteps, kBatch, kInput}, 1), first_input = input[0];
  const Tensor h = values({kBatch, kHidden}, 1);
  const Tensor c = values({kBatch, cell.state_columns() * kHidden}, 0.5);
  const Tensor weight_ih = values({of_x, kInput}, 0.2), weight_hh = values({of_h, kHidden}, 0.2);
  const Tensor bias_ih = values({of_x + cell.parameters * kHidden}, 0.2);
  const Tensor bias_hh = values({of_h}, 0.2);
  const Tensor grad_output = values({kSteps, kBatch, kHidden}, 1);
  const OutputMask all = {true, true, true, true, true, true, true};

  // Deterministic, without the user's random generator.
  Tensor values(at::IntArrayRef sizes, double scale) const {
    const Tensor numbers = at::arange(1, c10::multiply_integers(sizes) + 1, at::kDouble);
    return numbers.square().sin().mul(scale).view(sizes).to(options);
  }

  template <typename Forward, typename Backward>
  std::vector<Tensor> run(bool step, const Forward& forward, const Backward& backward) const {
    const Tensor& x = step ? first_input : input;
    const SequenceInputs args = {cell, x, h, c, weight_ih, weight_hh, bias_ih, bias_hh};
    const SequenceResult results = forward({args, /*save=*/true});
    const auto& [output, h_n, c_n, saved] = results;
    const Tensor& grad = step ? output : grad_output;
    return as_list(results, backward({args, output, saved, grad, h, c, all}));
  }

  template <typename Results>
  static std::vector<Tensor> as_list(const Results& results, const Gradients& gradients) {
    return std::apply(
        [](const auto&... tensors) { return std::vector<Tensor>{tensors...}; },
        std::tuple_cat(results, gradients));
  }
};

// Empty if the results match or the persistent engine does not support the problem.
std::string what_is_wrong(const CellInfo& cell, const Tensor& like, Engine engine) {
  const Problem problem{cell, like.options()};
  std::vector<Tensor> ours;
  try {
    if (engine == Engine::step) {
      ours = problem.run(/*step=*/true, step_forward, step_backward);
    } else if (engine == Engine::per_step) {
      ours = problem.run(
          /*step=*/false,
          [](const SequenceArgs& args) { return per_step_forward(args); },
          per_step_backward);
    } else {
      const auto run = [](const auto& attempt) {
        return attempt ? *attempt : throw attempt.why_not;
      };
      ours = problem.run(
          /*step=*/false,
          [&](const SequenceArgs& args) { return run(persistent_forward(args)); },
          [&](const SequenceBackwardArgs& args) { return run(persistent_backward(args)); });
    }
  } catch (const char* /*why_not*/) {
    return "";
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  }
  const std::vector<Tensor> expected = problem.run(
      engine == Engine::step, aten_fallback::sequence_forward, aten_fallback::sequence_backward);
  for (size_t k = 0; k < expected.size(); ++k) {
    // A step has no output, and some cells save nothing.
    if (!expected[k].defined() || expected[k].numel() == 0) continue;
    const Tensor exact = expected[k].to(at::kDouble);
    const double most = exact.abs().max().item<double>();
    const double error = (ours[k].to(at::kDouble) - exact).abs().max().item<double>();
    if (!(error <= kMostEpsilons * epsilon(like.scalar_type()) * most)) {
      return c10::str("result ", k, " differs by ", error, "; its largest value is ", most);
    }
  }
  return "";
}

class Apart {
 public:
  Apart() { state_.set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  ~Apart() { state_.set_sync_debug_mode(before_); }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

 private:
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::cuda::WarningState& state_ = c10::cuda::warning_state();
  const c10::cuda::SyncDebugMode before_ = state_.get_sync_debug_mode();
};

// One error per check, with a stable address.
using Key = std::tuple<const CellInfo*, at::ScalarType, c10::DeviceIndex, Engine>;
std::mutex mutex;
std::map<Key, std::string>& checked = *new std::map<Key, std::string>;

}  // namespace

const char* why_not_kernels(const CellInfo& cell, const Tensor& input, Engine engine) {
  const Key key = {&cell, input.scalar_type(), input.device().index(), engine};
  const auto answer = [](const std::string& wrong) {
    return wrong.empty() ? nullptr : wrong.c_str();
  };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = checked.find(key); found != checked.end()) return answer(found->second);
  }
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return nullptr;
  }
  // Not under the lock: a waiting thread may hold the GIL, which a warning needs. Concurrent checks
  // find the same result.
  const std::string wrong = [&] {
    const Apart apart;
    return what_is_wrong(cell, input, engine);
  }();
  const bool first = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return checked.emplace(key, wrong).second;
  }();
  if (first && !wrong.empty()) {
    if (engine == Engine::persistent)
      take_failure(current_stream());  // reported by the warning below
    TORCH_WARN(
        "lltm: the ",
        engine == Engine::step       ? "single-step kernels"
        : engine == Engine::per_step ? "sequence kernels"
                                     : "persistent kernels",
        " of the cell ",
        cell.title(),
        " in ",
        input.scalar_type(),
        " failed their self-check on ",
        input.device(),
        " and are disabled: ",
        wrong);
  }
  return why_not_kernels(cell, input, engine);
}

void forget_self_checks() {
  const std::lock_guard<std::mutex> lock(mutex);
  checked.clear();
}

}  // namespace lltm::cuda
