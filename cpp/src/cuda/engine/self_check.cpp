#include "cuda/engine/self_check.h"

#include "aten/fallback.h"
#include "cuda/context.h"
#include "cuda/engine/engine.h"
#include "cuda/gemm/gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace lltm::cuda {
namespace {

using at::Tensor;

constexpr int64_t kSteps = 4, kInput = 5;
// Unless a persistent kernel is checked: more than a slice of hidden units, less than a tile of
// rows.
constexpr int64_t kBatch = 3, kHidden = 24;

// Kernels that are checked once. TF32: PyTorch allows GEMMs in float32 to use it.
struct KernelId {
  const CellInfo* cell;
  at::ScalarType dtype;
  bool tf32;
  c10::DeviceIndex device;
  Engine engine;
  int tiles = 0, units = 0, shared_units = 0, directions = 0;  // PersistentKernel
  bool heads = false;

  auto operator<=>(const KernelId&) const = default;
};

// Maximum error relative to the largest value, and the dtype of the reference. Correct kernels have
// at most half of this error. TF32 products have seven times the limit of float32, and 3xTF32 would
// have a hundred times its limit if mma did not ignore the last bits of its operands
// (persistent_gpu.h). In 16 bits, and TF32 by PyTorch's settings, the ATen fallback rounds like the
// kernels, so that a threshold in a custom cell has the same result.
struct Criterion {
  double most_error;
  at::ScalarType reference;
};
Criterion criterion_of(const KernelId& kernels) {
  const bool is_persistent = kernels.tiles > 0;
  if (kernels.dtype == at::kDouble) return {0x1p-38, at::kDouble};
  if (kernels.dtype == at::kFloat && !kernels.tf32) {
    return {is_persistent ? 0x1p-20 : 0x1p-15, at::kDouble};
  }
  return {kernels.dtype == at::kBFloat16 ? 0x1p-6 : 0x1p-8, kernels.dtype};
}

// The usual call, and a call with everything else: packed, reversed, with resets and a mask.
enum Call { kUsual, kOther };

// The same problem in the kernels' dtype and in the reference's.
struct Problem {
  const CellInfo& cell;
  const at::TensorOptions kernels_options, options;
  const bool is_step;
  const int64_t batch, hidden, head_units;
  const int64_t of_x = cell.x.count() * hidden, of_h = cell.h.count() * hidden;
  const double scale = 1 / std::sqrt(static_cast<double>(hidden));
  const Tensor input = values({kSteps * batch, kInput + cell.given * hidden}, 1);
  const Tensor h = values({batch, hidden}, 1);
  const Tensor c = values({batch, cell.state_columns() * hidden}, 0.5);
  const Tensor weight_ih = values({of_x, kInput}, 0.2);
  const Tensor weight_hh =
      head_units == hidden
          ? values({of_h, hidden}, scale)
          : values({hidden / head_units, cell.h.count() * head_units, head_units}, scale);
  const Tensor bias_ih = values({of_x + cell.parameters * hidden}, 0.2);
  const Tensor bias_hh = values({of_h}, 0.2);
  const Tensor grad_output = values({kSteps * batch, hidden}, 1);
  const Tensor grad_states = values({kSteps * batch, cell.outputs * hidden}, 1);
  const Tensor reset = values({kSteps * batch}, 1).gt(0.8);
  const Tensor mask = values({batch, hidden}, 1.5);
  const Tensor batch_sizes = at::tensor({batch, batch, batch - 1, int64_t{1}}, at::kLong);
  const OutputMask all = {true, true, true, true, true, true, true};

  // Deterministic, without the user's random generator.
  Tensor values(at::IntArrayRef sizes, double factor) const {
    const int64_t count = c10::multiply_integers(sizes);
    const Tensor numbers = at::arange(1, count + 1, options.dtype(at::kDouble));
    return rounded(numbers.square_().sin_().mul_(factor).view(sizes));
  }
  // To the kernels' dtype, and converted to the problem's.
  Tensor rounded(const Tensor& tensor) const {
    return tensor.defined() ? tensor.to(kernels_options).to(options) : tensor;
  }
  // Rows of all steps, as the call has them.
  Tensor steps(const Tensor& rows, Call call) const {
    if (is_step) return rows.narrow(0, 0, batch);
    return call == kOther ? rows.narrow(0, 0, 3 * batch) : rows.view({kSteps, batch, rows.size(1)});
  }

  SequenceInputs inputs(Call call) const {
    SequenceInputs args = {cell, steps(input, call), h, c, weight_ih, weight_hh, bias_ih, bias_hh};
    if (call == kUsual) return args;
    args.batch_sizes = batch_sizes;
    args.reverse = true;
    args.reset = reset.narrow(0, 0, 3 * batch);
    args.recurrent_mask = mask;
    return args;
  }
  SequenceArgs forward(Call call) const { return {inputs(call), /*save=*/true}; }
  // Of the forward pass with these results.
  SequenceBackwardArgs backward(Call call, const SequenceResult& results) const {
    const auto& [output, h_n, c_n, saved] = results;
    const Tensor of_h = is_step ? h : output.narrow(-1, 0, hidden);
    const Tensor gradient = is_step ? Tensor() : steps(grad_output, call);
    SequenceBackwardArgs args = {inputs(call), rounded(of_h), rounded(saved), gradient, h, c, all};
    if (!is_step && cell.outputs > 0) args.grad_states = steps(grad_states, call);
    return args;
  }
};

// Waits, without PyTorch's warning (torch.cuda.set_sync_debug_mode).
double read(const Tensor& scalar) {
  double value = 0;
  const Stream stream = current_stream();
  check_driver(
      functions().cuMemcpyDtoHAsync_v2(
          &value,
          reinterpret_cast<Functions::Address>(scalar.const_data_ptr<double>()),
          sizeof(value),
          stream.handle));
  check_driver(functions().cuStreamSynchronize(stream.handle));
  return value;
}

// Another process may have occupied the GPU: the next calls use the per-step engine, and a later
// call checks again.
constexpr const char* kRejected = "the GPU rejected a launch";
constexpr int kCallsUntilNextCheck = 100;

// Empty if no error is too large. Allows errors that PyTorch's results `theirs`, computed on
// demand, have too: thresholds and cancellation may cause them. Compares finite values.
template <typename Results>
std::string error_of(
    const std::optional<Results>& results,
    const Results& expected,
    double most_error,
    const std::function<Results()>& compute_theirs) {
  if (!results.has_value()) return kRejected;
  const auto list = [](const auto&... tensors) { return std::vector<Tensor>{tensors...}; };
  const char* const name = std::is_same_v<Results, Gradients> ? "gradient " : "result ";
  const std::vector<Tensor> ours = std::apply(list, *results), exact = std::apply(list, expected);
  std::vector<Tensor> theirs;
  for (size_t k = 0; k < exact.size(); ++k) {
    // A step has no output, and some cells save nothing.
    if (!ours[k].defined() || exact[k].numel() == 0) continue;
    const Tensor value = exact[k].to(at::kDouble), absent = value.isfinite().logical_not_();
    const double most = read(value.masked_fill(absent, 0).abs().max());
    const auto error_in = [&](const Tensor& result) {
      return read((result.to(at::kDouble) - value).masked_fill(absent, 0).abs().max());
    };
    const double error = error_in(ours[k]);
    if (error <= most_error * most) continue;
    if (theirs.empty()) theirs = std::apply(list, compute_theirs());
    if (!(error_in(theirs[k]) <= most_error * most)) continue;
    return c10::str(name, k, " differs by ", error, "; its largest value is ", most);
  }
  return "";
}

// Empty if the results match. A persistent kernel gets a full group of rows and a part of another,
// if both run concurrently; a kernel for two directions gets both calls in the same launches. The
// other call has a launch per step and checkpoints, and without a second direction further launches
// for the rows after the first group.
std::string what_is_wrong(
    const KernelId& kernels, const at::TensorOptions& options, PersistentPlan plan) {
  // A timeout makes the check fail; it is no error of the next call.
  const Tensor failure = at::empty({1}, options.dtype(at::kInt));
  plan.failure = static_cast<std::uint32_t*>(failure.mutable_data_ptr());
  const Engine engine = kernels.engine;
  const bool is_step = engine == Engine::step, is_persistent = plan.groups > 0;
  const int64_t hidden = is_persistent ? plan.hidden : kHidden;
  const int64_t head_units = is_persistent ? plan.head_units : kHidden;
  const int64_t batch =
      is_persistent ? std::min(plan.rows(), plan.kernel.tiles * kTileRows + kBatch) : kBatch;
  const auto [most_error, dtype] = criterion_of(kernels);
  const Problem problem{*kernels.cell, options, options, is_step, batch, hidden, head_units};
  const Problem exact{
      *kernels.cell, options, options.dtype(dtype), is_step, batch, hidden, head_units};
  std::vector<Call> calls = {kUsual};
  if (!is_step) calls.push_back(kOther);
  PersistentPlan plans[] = {plan, plan};
  if (plan.directions == 1) plans[kOther].groups = 1;
  const auto run = [&](const std::function<void(size_t)>& run_call) {
    if (plan.directions == 2) return run_both_directions(run_call);
    for (const Call call : calls) run_call(call);
  };

  std::string wrong;
  // Up to version 15, Clang captures structured bindings only by a name of their own.
  const auto check = [&, most_error = most_error](
                         const auto& args_of, const auto& by_kernels, const auto& by_aten) {
    using Results = decltype(by_aten(args_of(exact, kUsual)));
    std::optional<Results> ours[2];
    run([&](size_t call) { ours[call] = by_kernels(args_of(problem, Call(call)), Call(call)); });
    for (const Call call : calls) {
      if (!wrong.empty()) return;
      wrong = error_of<Results>(ours[call], by_aten(args_of(exact, call)), most_error, [&] {
        return by_aten(args_of(problem, call));
      });
    }
  };
  const auto workspace = [](Call call) { return call == kUsual ? workspace_of_cache() : 0; };
  if (engine != Engine::persistent_backward) {
    check(
        [&](const Problem& of, Call call) {
          SequenceArgs args = of.forward(call);
          if (is_persistent && call == kOther) args.checkpoint_steps = 2;
          return args;
        },
        [&](const SequenceArgs& args, Call call) -> std::optional<SequenceResult> {
          if (!is_persistent) return per_step_forward(args);
          return persistent_forward(args, plans[call], workspace(call));
        },
        aten_fallback::sequence_forward);
  }
  if (engine != Engine::persistent_forward && wrong.empty()) {
    SequenceResult results[2];
    for (const Call call : calls) {
      results[call] = aten_fallback::sequence_forward(exact.forward(call));
    }
    check(
        [&](const Problem& of, Call call) { return of.backward(call, results[call]); },
        [&](const SequenceBackwardArgs& args, Call call) -> std::optional<Gradients> {
          if (!is_persistent) return per_step_backward(args);
          return persistent_backward(args, plans[call], workspace(call));
        },
        aten_fallback::sequence_backward);
  }
  return wrong;
}

// Without the caller's autograd and autocast.
struct Apart {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// One error per check, with a stable address.
std::mutex mutex;
std::map<KernelId, std::string>& checked = *new std::map<KernelId, std::string>;
std::map<KernelId, int>& calls_until_check = *new std::map<KernelId, int>;

constexpr const char* kTitles[] = {
    // in the order of Engine
    "single-step kernels",
    "sequence kernels",
    "persistent forward kernel",
    "persistent backward kernel"};

template <typename Check>
const char* why_not(const KernelId& kernels, at::Device device, const Check& check) {
  const auto answer = [](const std::string& wrong) {
    return wrong.empty() ? nullptr : wrong.c_str();
  };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = checked.find(kernels);
    if (found != checked.end()) return answer(found->second);
    if (int& calls = calls_until_check[kernels]; calls > 0) {
      --calls;
      return kRejected;
    }
  }
  if (is_capturing(current_stream())) return nullptr;
  // Not under the lock: a waiting thread may hold the GIL, which a warning needs. Concurrent checks
  // find the same result.
  const std::string wrong = [&]() -> std::string {
    const Apart apart;
    try {
      return check();
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception& error) {
      return error.what();
    }
  }();
  if (wrong == kRejected) {
    const std::lock_guard<std::mutex> lock(mutex);
    calls_until_check[kernels] = kCallsUntilNextCheck;
    return kRejected;
  }
  const auto [place, is_first] = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return checked.emplace(kernels, wrong);
  }();
  if (is_first && !wrong.empty()) {
    TORCH_WARN(
        "lltm: the ",
        kTitles[static_cast<int>(kernels.engine)],
        " of the cell ",
        kernels.cell->title(),
        " in ",
        kernels.dtype,
        " failed the self-check on ",
        device,
        " and will not be used: ",
        wrong);
  }
  return answer(place->second);
}

}  // namespace

const char* why_not_kernels(
    const CellInfo& cell, const Tensor& input, Engine engine, const PersistentPlan& plan) {
  current_stream();  // before the cuBLAS handle: PyTorch warns if it creates one without a context
  const at::ScalarType dtype = input.scalar_type();
  const bool tf32 = dtype == at::kFloat && Gemm(dtype).uses_tf32();
  const PersistentKernel& kernel = plan.kernel;
  const KernelId kernels = {
      &cell,
      dtype,
      tf32,
      input.device().index(),
      engine,
      kernel.tiles,
      kernel.units,
      kernel.shared_units,
      kernel.directions,
      kernel.heads};
  return why_not(
      kernels, input.device(), [&] { return what_is_wrong(kernels, input.options(), plan); });
}

void forget_self_checks() {
  const std::lock_guard<std::mutex> lock(mutex);
  checked.clear();
  calls_until_check.clear();
}

}  // namespace lltm::cuda
