// The persistent engine (persistent.h). Polled words are initialized just before a launch, to be in
// the L2 cache.
//
// As in the per-step engine, h, c and dz are rounded to the tensors' dtype at every step; sums and
// gradients between steps are float32.
#include "cuda/kernel/persistent.h"
#include "common/step_io.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/sequence_gradients.h"
#include "cuda/gemm/gemm.h"

#include <lltm/backends.h>

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace lltm::cuda {
namespace {

using at::Tensor;

// A launch takes about as long with one row as with all that fit. On an H100, four launches take
// half the time of a GEMM per step with H = 256, and as long with H = 512.
constexpr int64_t kMostRowLaunches = 4;

template <typename Body>
decltype(auto) visit_kernel_dtype(at::ScalarType dtype, const Body& body) {
  return dtype == at::kFloat  ? body(static_cast<float*>(nullptr))
         : dtype == at::kHalf ? body(static_cast<c10::Half*>(nullptr))
                              : body(static_cast<c10::BFloat16*>(nullptr));
}

// Args selects the kernels.
template <template <typename> typename Args>
PersistentPlan plan_rows(const SequenceInputs& args) {
  const CellInfo& cell = *args.cell;
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const at::ScalarType dtype = args.input->scalar_type();
  if (cell.programs != nullptr) return {"no kernels for this cell"};
  if (dtype == at::kDouble) return {"dtype is float64"};
  if (dtype == at::kFloat && cuda_float32() == "ieee") {
    return {"lltm.backends.cuda.float32 is 'ieee'"};
  }
  if (flat_size(args.input) == 0 || hidden == 0) return {"nothing to compute"};
  if (hidden % kHiddenMultiple != 0) return {"H is not a multiple of 8"};
  const PersistentLimits limits = persistent_limits();
  const int64_t groups = limits.multiprocessors / slices_of(hidden);
  if (groups == 0) return {"too few thread blocks run concurrently on this device"};

  // The fewest rows per thread block with which all rows run concurrently, otherwise the most.
  const bool tf32 = Gemm(dtype).uses_tf32();
  PersistentPlan plan = {};
  for (const int tiles : kTileCounts) {
    const bool fits = visit_kernel_dtype(dtype, [&]<typename T>(T*) {
      const PersistentKernel kernel = persistent_kernel<Args<T>>(cell, hidden, tiles, tf32);
      if (shared_bytes<Args<T>>(kernel) > limits.shared_bytes) return false;
      plan = {nullptr, hidden, kernel, groups};
      return true;
    });
    if (!fits || plan.rows() >= batch) break;
  }
  if (plan.groups == 0) return {"H is too large"};
  if (batch > kMostRowLaunches * plan.rows()) return {"B is too large"};
  return plan;
}

// Fewer multiprocessors are available than in the occupancy check.
std::nullopt_t rejected() {
  TORCH_WARN_ONCE(
      "lltm::sequence: the GPU rejected a persistent kernel, because too few multiprocessors are "
      "available to this process (MPS or MIG may reserve some); using the per-step engine");
  return std::nullopt;
}

constexpr int32_t kMostSteps = std::numeric_limits<int32_t>::max();  // per run

// Adds as many steps, in kernel order, as fit in one launch. Returns the first remaining.
size_t take_steps(
    const std::vector<Step>& order, size_t first, size_t last, bool ascending, LaunchSteps& to) {
  to.ascending = ascending;
  to.edge = order[first].offset + (ascending ? 0 : order[first].rows);
  to.time = static_cast<int64_t>(ascending ? first : order.size() - 1 - first);
  to.previous_offset = first == 0 ? 0 : order[first - 1].offset;
  to.previous_rows = first == 0 ? 0 : order[first - 1].rows;
  to.runs = 0;
  for (size_t k = first; k < last; ++k) {
    const auto rows = static_cast<int32_t>(order[k].rows);
    const StepRun* const run = to.runs == 0 ? nullptr : &to.run[to.runs - 1];
    if (run == nullptr || run->rows != rows || run->count == kMostSteps) {
      if (to.runs == kMostRuns) return k;
      to.run[to.runs++] = {0, rows};
    }
    ++to.run[to.runs - 1].count;
  }
  return last;
}

template <typename Args>
bool launch_rows(Args& launch, const PersistentPlan& plan, Stream stream) {
  for (int64_t row = 0; row < launch.batch; row += plan.rows()) {
    launch.first_row = row;
    const int64_t groups = std::min(
        plan.groups, at::ceil_div<int64_t>(launch.batch - row, plan.kernel.tiles * kTileRows));
    launch.words.blocks += static_cast<uint32_t>(groups * slices_of(launch.hidden));
    if (!launch_persistent(plan.kernel, launch, groups, stream)) return false;
  }
  return true;
}

void mark_rows_absent(const Tensor& tensor, const Chunk& chunk, Stream stream) {
  const GemmResult rows = result_rows(tensor, chunk.begin, chunk.rows);
  const int64_t row_bytes = rows.cols * static_cast<int64_t>(tensor.element_size());
  mark_absent(rows.data, chunk.rows * row_bytes, stream);
}

Tensor aligned(const Tensor& tensor) {
  const Tensor contiguous = tensor.contiguous();
  const auto address = reinterpret_cast<std::uintptr_t>(contiguous.const_data_ptr());
  return address % 16 == 0 ? contiguous : contiguous.clone();
}

template <typename T>
const T* data(const Tensor& tensor) {
  return tensor.defined() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}
template <typename T>
T* mutable_data(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// The mask of all rows, which must outlive the kernels' launches, or undefined.
Tensor reset_rows(const SequenceInputs& args) {
  return args.reset.defined() ? args.reset->reshape(-1).contiguous() : Tensor();
}

Tensor mask_rows(const SequenceInputs& args) {
  return args.recurrent_mask.defined() ? args.recurrent_mask->contiguous() : Tensor();
}

template <typename T>
bool launch_forward_steps(
    const SequenceArgs& args,
    const std::vector<Step>& steps,
    const PersistentPlan& plan,
    int64_t workspace_bytes,
    const ForwardResults& results,
    const Tensor& h,
    const Tensor& c) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1), columns = cell.x.count() * hidden;
  const std::vector<Chunk> chunks =
      plan_chunks(steps, workspace_bytes / (columns * static_cast<int64_t>(sizeof(float))));
  const Tensor gates = at::empty({most_rows(chunks), columns}, compute_options(args.input));
  const Weights weights = weights_of(args);
  const Tensor x = as_operand(flat_rows(args.input));
  const Tensor weights_x =
      as_padded_operand(x_slots(weights.ih, cell), columns, args.input->size(-1));
  const Tensor weights_h = aligned(h_slots(weights.hh, cell));
  const Tensor h_0 = aligned(masked_h(args.h_0, args.recurrent_mask)), reset = reset_rows(args);
  const Tensor mask = mask_rows(args), output = flat_rows(results.output);
  const Tensor exchanged = mask.defined() ? at::empty_like(output) : output;
  const Tensor begun = at::zeros({1}, args.input->options().dtype(at::kInt));
  const Gemm gemm(args.input->scalar_type());
  const Stream stream = current_stream();

  PersistentForwardArgs<T> launch;
  launch.hidden = hidden;
  launch.batch = args.h_0->size(0);
  launch.weights = data<T>(weights_h);
  launch.bias_ih = read_row<T>(args.bias_ih);
  launch.bias_hh = read_row<T>(args.bias_hh);
  launch.gates = data<float>(gates);
  launch.h_0 = data<T>(h_0);
  launch.h = mutable_data<T>(h);
  launch.c = mutable_data<T>(c);
  launch.output = mutable_data<T>(results.output);
  launch.recurrent_mask = data<T>(mask);
  launch.operand = mutable_data<T>(exchanged);
  launch.activations = mutable_data<T>(results.activations);
  launch.reset = data<bool>(reset);
  launch.checkpoints = mutable_data<T>(results.checkpoints);
  launch.checkpoint_steps = results.every;
  launch.last_time = static_cast<int64_t>(steps.size()) - 1;
  launch.words = {mutable_data<uint32_t>(begun), 0, failure_word(stream)};
  for (const Chunk& chunk : chunks) {
    gemm(
        operand_rows(x, chunk.begin, chunk.rows),
        transposed(operand(weights_x)),
        result_rows(gates, 0, chunk.rows),
        /*accumulate=*/false);
    mark_rows_absent(exchanged, chunk, stream);
    launch.gates_offset = chunk.begin;
    for (size_t k = chunk.first; k < chunk.last;) {
      k = take_steps(steps, k, chunk.last, !args.reverse, launch.steps);
      if (!launch_rows(launch, plan, stream)) return false;
    }
  }
  return true;
}

template <typename T>
StepMatrix<const T> step_matrix(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (tensor.dim() == 2) {
    return {data<T>(tensor), 0, tensor.stride(0), tensor.stride(0), tensor.stride(1)};
  }
  return {data<T>(tensor), tensor.stride(0), 0, tensor.stride(1), tensor.stride(2)};
}

template <typename T>
bool launch_backward_steps(
    const SequenceBackwardArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes,
    const BackwardTensors& tensors) {
  const CellInfo& cell = *args.cell;
  const std::vector<Step> order = plan_steps(args.input, args.batch_sizes, !args.reverse);
  const Tensor weights = aligned(h_slots(weights_of(args).hh, cell).t());
  const Tensor activations = aligned(args.saved), reset = reset_rows(args);
  const Tensor mask = mask_rows(args);
  const Tensor begun = at::zeros({1}, args.input->options().dtype(at::kInt));
  const Stream stream = current_stream();
  const std::vector<Chunk> chunks =
      plan_chunks(order, workspace_bytes / (tensors.dz.size(1) * static_cast<int64_t>(sizeof(T))));

  PersistentBackwardArgs<T> launch;
  launch.hidden = args.h_0->size(1);
  launch.batch = args.h_0->size(0);
  launch.weights = data<T>(weights);
  launch.activations = data<T>(activations);
  launch.reset = data<bool>(reset);
  launch.recurrent_mask = data<T>(mask);
  launch.grad_output = step_matrix<T>(args.grad_output);
  launch.dz = mutable_data<T>(tensors.dz);
  launch.dh = mutable_data<float>(tensors.dh);
  launch.dc = mutable_data<float>(tensors.dc);
  launch.words = {mutable_data<uint32_t>(begun), 0, failure_word(stream)};
  for (const Chunk& chunk : chunks) {
    mark_rows_absent(tensors.dz, chunk, stream);
    for (size_t k = chunk.first; k < chunk.last;) {
      k = take_steps(order, k, chunk.last, args.reverse, launch.steps);
      const bool wants_h_0 = args.output_mask[1];
      if (k == order.size() && wants_h_0) launch.steps.run[launch.steps.runs++] = {1, 0};
      if (!launch_rows(launch, plan, stream)) return false;
    }
  }
  return true;
}

}  // namespace

int64_t PersistentPlan::rows() const {
  return groups * kernel.tiles * kTileRows;
}

PersistentPlan plan_persistent(const SequenceArgs& args) {
  return plan_rows<PersistentForwardArgs>(args);
}
PersistentPlan plan_persistent(const SequenceBackwardArgs& args) {
  return plan_rows<PersistentBackwardArgs>(args);
}

std::optional<SequenceResult> persistent_forward(
    const SequenceArgs& args, const PersistentPlan& plan, int64_t workspace_bytes) {
  const auto options = args.input->options();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const ForwardResults results(args, steps.size());
  const Tensor h = copy_or_zeros(args.h_0, args.h_0->sizes(), options);
  const Tensor c = copy_or_zeros(args.c_0, args.h_0->sizes(), options);
  const bool launched = visit_kernel_dtype(args.input->scalar_type(), [&]<typename T>(T*) {
    return launch_forward_steps<T>(args, steps, plan, workspace_bytes, results, h, c);
  });
  if (!launched) return rejected();
  return SequenceResult(results.output, h, c, results.saved());
}

std::optional<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, const PersistentPlan& plan, int64_t workspace_bytes) {
  const at::ScalarType dtype = args.input->scalar_type();
  const int64_t columns = args.cell->slots * args.h_0->size(1);
  const auto wide = compute_options(args.input);
  const BackwardTensors tensors = {
      copy_or_zeros(args.grad_h_n, args.h_0->sizes(), wide),
      copy_or_zeros(args.grad_c_n, args.h_0->sizes(), wide),
      at::empty({flat_size(args.input), columns}, args.input->options())};
  const bool launched = visit_kernel_dtype(dtype, [&]<typename T>(T*) {
    return launch_backward_steps<T>(args, plan, workspace_bytes, tensors);
  });
  if (!launched) return rejected();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  return sequence_gradients(args, steps, Gemm(dtype), tensors);
}

}  // namespace lltm::cuda
