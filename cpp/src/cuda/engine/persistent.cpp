// The persistent engine (persistent.h). Polled words are initialized just before a launch, to be in
// the L2 cache.
//
// As in the per-step engine, h, c and dz are rounded to the tensors' dtype at every step; sums and
// gradients between steps are float32.
#include "cuda/kernel/persistent.h"
#include "aten/row_gradients.h"
#include "cell/cells.h"
#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/gemm/gemm.h"

#include <lltm/backends.h>

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

namespace lltm::cuda {
namespace {

using at::Tensor;

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // of all steps
int32_t narrow(int64_t rows_or_columns) {
  return static_cast<int32_t>(rows_or_columns);
}

// Why the per-step engine is faster, or null. Microseconds per step on an H100, in float16
// (benchmarks/results), persistent and per-step:
//
//     T    B     H    launches for all rows  inference  training
//     1    16    512  1                      116   98   1119  853   LSTM
//     2    16    512  1                       67   75    668  519   GRU
//     100  1024  256  4                       17   23     43   54   LSTM
//     100  512   512  4                       18   17     46   50   GRU
//     100  256   768  4                       22   23     59   51   LSTM
const char* why_slower(int64_t steps, bool training, int64_t hidden, int64_t row_launches) {
  if (steps <= (training ? 2 : 1)) return "too few steps";
  return row_launches > (hidden < 512 ? 4 : 2) ? "B is too large" : nullptr;
}

// The calls for both directions of a layer. The first waits before its launches, within its call,
// for the second, which launches the kernels of both.
struct Pair {
  std::function<void()> second;  // null once called
  Pair*& current;
  Pair* const outer = std::exchange(current, this);  // of a call that checks its kernels
  void* waiting = nullptr;                           // Launches<Args> of the first call
  const std::type_info* args = nullptr;
  bool launched = false;

  ~Pair() { current = outer; }
};
thread_local Pair* pair = nullptr;  // of the current call, or null

template <typename Body>
decltype(auto) visit_kernel_dtype(at::ScalarType dtype, const Body& body) {
  return dtype == at::kFloat  ? body(static_cast<float*>(nullptr))
         : dtype == at::kHalf ? body(static_cast<c10::Half*>(nullptr))
                              : body(static_cast<c10::BFloat16*>(nullptr));
}

// Of a head, if its units fill slices; other heads are multiplied as a matrix with zeros.
int64_t units_per_head(const SequenceInputs& args) {
  const int64_t hidden = args.h_0->size(1), units = hidden / heads_of(args.weight_hh);
  return units % kSliceUnits == 0 ? units : hidden;
}
// (heads, Sh * U, U), or (Sh * H, H) without heads.
Tensor recurrent_weights(const SequenceInputs& args) {
  const Tensor& hh = weights_of(args).hh;
  const bool per_head = units_per_head(args) < args.h_0->size(1);
  return h_slots(per_head ? hh : without_heads(hh), *args.cell);
}

// Args selects the kernels.
template <template <typename> typename Args>
PersistentPlan plan_rows(const SequenceInputs& args, bool training, int directions) {
  const CellInfo& cell = *args.cell;
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const int64_t head_units = units_per_head(args);
  const at::ScalarType dtype = args.input->scalar_type();
  if (!cell.is_element_wise()) return {"the step has several stages or given gates"};
  if (cell.outputs > 0) return {"states are part of the output"};
  if (cell.x.count() == 0 || cell.h.count() == 0) return {"no gate depends on x, or none on h"};
  if (cell.h.count() > kMostOutputs) return {"too many gates depend on h"};
  if (dtype == at::kDouble) return {"dtype is float64"};
  if (dtype == at::kFloat && cuda_float32() == "ieee") {
    return {"lltm.backends.cuda.float32 is 'ieee'"};
  }
  const int64_t rows = flat_size(args.input);
  if (rows == 0 || hidden == 0) return {"nothing to compute"};
  if (rows > kMostRows) return {"input has too many rows"};
  if (hidden % kHiddenMultiple != 0) return {"H is not a multiple of 8"};
  const PersistentLimits limits = persistent_limits();
  if (limits.why_not != nullptr) return {limits.why_not};
  if (limits.only_half && dtype != at::kHalf) return {"compute capability is below 8.0"};
  if (limits.multiprocessors < slices_of(hidden)) {
    return {"too few thread blocks run concurrently on this device"};
  }

  // The fewest rows per thread block with which all rows run concurrently, otherwise the most.
  const bool tf32 = Gemm(dtype).uses_tf32();
  const auto plan_directions = [&](int count) {
    PersistentPlan plan;
    for (const int tiles : kTileCounts) {
      const bool fits = visit_kernel_dtype(dtype, [&]<typename T>(T*) {
        PersistentKernel kernel = persistent_kernel<Args<T>>(cell, head_units, tiles, tf32);
        kernel.heads = head_units < hidden;
        kernel.directions = count;
        if (tiles > most_tiles<T>(count)) return false;
        if (shared_bytes<Args<T>>(kernel) > limits.shared_bytes) return false;
        const int64_t groups = limits.multiprocessors / (count * slices_of(hidden));
        plan = {nullptr, hidden, head_units, kernel, groups, count};
        return true;
      });
      if (!fits || plan.rows() >= batch) break;
    }
    return plan;
  };
  PersistentPlan plan = plan_directions(directions);
  if (directions > 1 && plan.rows() < batch) plan = plan_directions(1);
  if (plan.groups == 0) return {"H is too large"};
  const int64_t step_count = (args.batch_sizes.defined() ? *args.batch_sizes : *args.input).size(0);
  const auto spills = [&] {
    return visit_kernel_dtype(
        dtype, [&]<typename T>(T*) { return spills_registers<Args<T>>(plan.kernel); });
  };
  for (;; plan.kernel.tiles /= 2) {
    plan.why_not = why_slower(step_count, training, hidden, at::ceil_div(batch, plan.rows()));
    // The registers that a custom cell needs are known after its compilation.
    if (plan.why_not != nullptr || is_built_in(cell) || !spills()) return plan;
    if (plan.kernel.tiles == 1) {
      plan.why_not = "the cell needs too many registers";
      return plan;
    }
  }
}

// Fewer multiprocessors are available than the device reports.
std::nullopt_t rejected() {
  TORCH_WARN_ONCE(
      "lltm::sequence: the GPU rejected a persistent kernel, because too few multiprocessors are "
      "available to this process (MPS or MIG may reserve some); using the per-step engine");
  return std::nullopt;
}

// Adds as many steps, in kernel order, as fit in one launch. Returns the first remaining.
size_t take_steps(
    const std::vector<Step>& order, size_t first, size_t last, bool ascending, LaunchSteps& to) {
  to.ascending = ascending;
  const Step previous = first == 0 ? Step{} : order[first - 1];
  to.edge = narrow(order[first].offset + (ascending ? 0 : order[first].rows));
  to.time = narrow(static_cast<int64_t>(ascending ? first : order.size() - 1 - first));
  to.previous_offset = narrow(previous.offset);
  to.previous_rows = narrow(previous.rows);
  to.runs = 0;
  for (size_t k = first; k < last; ++k) {
    const int32_t rows = narrow(order[k].rows);
    const StepRun* const run = to.runs == 0 ? nullptr : &to.run[to.runs - 1];
    if (run == nullptr || run->rows != rows) {
      if (to.runs == kMostRuns) return k;
      to.run[to.runs++] = {0, rows};
    }
    ++to.run[to.runs - 1].count;
  }
  return last;
}

// A call's launches, for all its rows.
template <typename Args>
struct Launches {
  Args& args;
  const std::vector<Step>& steps;  // in kernel order
  const std::vector<Chunk>& chunks;
  bool ascending, ends_without_rows;
  std::function<void(const Chunk&)> begin_chunk;
  size_t chunk = 0, step = 0;

  // Prepares args for the next launch, or returns false after the last.
  bool next() {
    if (step == steps.size()) return false;
    const Chunk& current = chunks[chunk];
    if (step == current.first) begin_chunk(current);
    if (step > 0) args.continue_from_here();
    step = take_steps(steps, step, current.last, ascending, args.steps);
    if (step == current.last) ++chunk;
    if (step == steps.size() && ends_without_rows) args.steps.run[args.steps.runs++] = {1, 0};
    return true;
  }
};

template <typename Args>
bool launch_all(
    std::initializer_list<Launches<Args>*> calls, const PersistentPlan& plan, Stream stream) {
  for (;;) {
    Args* next[2] = {};
    DirectionArgs<Args> launch;
    for (Launches<Args>* const call : calls) {
      if (call->next()) next[launch.count++] = &call->args;
    }
    if (launch.count == 0) return true;
    const int64_t batch = next[0]->batch, slices = slices_of(next[0]->hidden);
    for (int64_t row = 0; row < batch; row += plan.rows()) {
      const int64_t groups =
          std::min(plan.groups, at::ceil_div<int64_t>(batch - row, plan.kernel.tiles * kTileRows));
      for (int n = 0; n < launch.count; ++n) {
        next[n]->first_row = narrow(row);
        next[n]->words.blocks += static_cast<uint32_t>(groups * slices);
        launch.of[n] = *next[n];
      }
      if (!launch_persistent(plan.kernel, launch, groups, stream)) return false;
    }
  }
}

template <typename Args>
bool launch(Launches<Args> call, const PersistentPlan& plan, Stream stream) {
  if (plan.directions == 2 && pair->second != nullptr) {
    pair->waiting = &call;
    pair->args = &typeid(Args);
    std::exchange(pair->second, nullptr)();
    if (pair->waiting == nullptr) return pair->launched;
    pair->waiting = nullptr;
  } else if (plan.directions == 2 && pair->waiting != nullptr && *pair->args == typeid(Args)) {
    auto* const first = static_cast<Launches<Args>*>(std::exchange(pair->waiting, nullptr));
    return pair->launched = launch_all({first, &call}, plan, stream);
  }
  return launch_all({&call}, plan, stream);
}

constexpr int64_t kCounterBytes = 16;  // keeps the alignment of memory that follows the counter

// The chunk's rows, and the counter of blocks if it is given. One fill if it precedes the rows.
void mark_rows_absent(
    const Tensor& tensor, const Chunk& chunk, std::uint32_t* begun, Stream stream) {
  const GemmResult rows = result_rows(tensor, chunk.begin, chunk.rows);
  auto* begin = static_cast<char*>(rows.data);
  char* const end = begin + rows.rows * rows.cols * static_cast<int64_t>(tensor.element_size());
  auto* const counter = reinterpret_cast<char*>(begun);
  if (counter != nullptr && counter + kCounterBytes == begin) {
    begin = counter;
  } else if (counter != nullptr) {
    mark_absent(counter, kCounterBytes, stream);
  }
  mark_absent(begin, end - begin, stream);
}

Tensor aligned(const Tensor& tensor) {
  const Tensor contiguous = tensor.contiguous();
  const auto address = reinterpret_cast<std::uintptr_t>(contiguous.const_data_ptr());
  return address % 16 == 0 ? contiguous : contiguous.clone();
}

// Undefined if zero.
Tensor carried_gradient(const Tensor& gradient) {
  return gradient.defined() ? gradient.to(at::kFloat).contiguous() : gradient;
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
  const Gemm gemm(args.input->scalar_type());
  const Tensor x = as_operand(flat_rows(args.input));
  const Tensor weights_x = as_padded_operand(
      x_slots(weights_of(args).ih, cell), columns, args.input->size(-1), gemm.alignment());
  const Tensor weights_h = aligned(recurrent_weights(args));
  const Tensor initial_h = aligned(args.h_0), c_0 = args.c_0->contiguous();
  const Tensor mask = mask_rows(args), h_0 = aligned(masked_h(initial_h, mask));
  const Tensor output = flat_rows(results.output), reset = reset_rows(args);
  const Tensor exchanged = mask.defined() ? at::empty_like(output) : output;
  const Tensor begun = at::empty({kCounterBytes}, args.input->options().dtype(at::kByte));
  const Stream stream = current_stream();

  PersistentForwardArgs<T> a;
  a.hidden = narrow(hidden);
  a.head_units = narrow(plan.head_units);
  a.batch = narrow(args.h_0->size(0));
  a.weights = data<T>(weights_h);
  a.bias_ih = read_row<T>(args.bias_ih);
  a.bias_hh = read_row<T>(args.bias_hh);
  a.parameters = a.bias_ih.from(0, columns);
  a.gates = data<float>(gates);
  a.h_0 = data<T>(h_0);
  a.h_before = data<T>(initial_h);
  a.c_before = data<T>(c_0);
  a.h = mutable_data<T>(h);
  a.c = mutable_data<T>(c);
  a.output = mutable_data<T>(results.output);
  a.recurrent_mask = data<T>(mask);
  a.operand = mutable_data<T>(exchanged);
  a.activations = mutable_data<T>(results.activations);
  a.reset = data<bool>(reset);
  a.checkpoints = mutable_data<T>(results.checkpoints);
  a.checkpoint_steps = narrow(std::min(results.every, kMostRows));
  a.last_time = narrow(static_cast<int64_t>(steps.size()) - 1);
  a.words.begun = mutable_data<uint32_t>(begun);
  a.words.failure = plan.failure != nullptr ? plan.failure : failure_word(stream);
  const auto begin_chunk = [&](const Chunk& chunk) {
    gemm(
        operand_rows(x, chunk.begin, chunk.rows),
        transposed(operand(weights_x)),
        result_rows(gates, 0, chunk.rows),
        /*accumulate=*/false);
    mark_rows_absent(exchanged, chunk, chunk.first == 0 ? a.words.begun : nullptr, stream);
    a.gates_offset = narrow(chunk.begin);
  };
  return launch<PersistentForwardArgs<T>>(
      {a, steps, chunks, !args.reverse, /*ends_without_rows=*/false, begin_chunk}, plan, stream);
}

Tensor with_narrow_strides(const Tensor& tensor) {
  const bool fits = !tensor.defined() || std::ranges::all_of(tensor.strides(), [](int64_t stride) {
    return stride <= kMostRows;
  });
  return fits ? tensor : tensor.contiguous();
}

template <typename T>
StepMatrix<const T> step_matrix(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto stride = [&](int64_t dimension) { return narrow(tensor.stride(dimension)); };
  if (tensor.dim() == 2) return {data<T>(tensor), 0, stride(0), stride(0), stride(1)};
  return {data<T>(tensor), stride(0), 0, stride(1), stride(2)};
}

template <typename T>
bool launch_backward_steps(
    const SequenceBackwardArgs& args,
    const PersistentPlan& plan,
    int64_t workspace_bytes,
    const Tensor& dz_memory,
    const BackwardTensors& tensors) {
  const CellInfo& cell = *args.cell;
  const std::vector<Step> order = plan_steps(args.input, args.batch_sizes, !args.reverse);
  const Tensor weights = aligned(recurrent_weights(args).transpose(-2, -1));
  const Tensor activations = aligned(args.saved), reset = reset_rows(args);
  const Tensor dh_before = carried_gradient(args.grad_h_n);
  const Tensor dc_before = carried_gradient(args.grad_c_n), mask = mask_rows(args);
  const Tensor grad_output = with_narrow_strides(args.grad_output);
  const Stream stream = current_stream();
  const std::vector<Chunk> chunks =
      plan_chunks(order, workspace_bytes / (tensors.dz.size(1) * static_cast<int64_t>(sizeof(T))));

  PersistentBackwardArgs<T> a;
  a.hidden = narrow(args.h_0->size(1));
  a.head_units = narrow(plan.head_units);
  a.batch = narrow(args.h_0->size(0));
  a.weights = data<T>(weights);
  a.activations = data<T>(activations);
  a.parameters = read_row<T>(args.bias_ih).from(0, cell.x.count() * a.hidden);
  a.reset = data<bool>(reset);
  a.recurrent_mask = data<T>(mask);
  a.grad_output = step_matrix<T>(grad_output);
  a.dz = mutable_data<T>(tensors.dz);
  a.dh_before = data<float>(dh_before);
  a.dc_before = data<float>(dc_before);
  a.dh = mutable_data<float>(tensors.dh);
  a.dc = mutable_data<float>(tensors.dc);
  a.words.begun = mutable_data<uint32_t>(dz_memory);
  a.words.failure = plan.failure != nullptr ? plan.failure : failure_word(stream);
  const auto begin_chunk = [&](const Chunk& chunk) {
    mark_rows_absent(tensors.dz, chunk, chunk.first == 0 ? a.words.begun : nullptr, stream);
  };
  const bool wants_h_0 = args.output_mask[1];
  return launch<PersistentBackwardArgs<T>>(
      {a, order, chunks, args.reverse, wants_h_0, begin_chunk}, plan, stream);
}

}  // namespace

void run_both_directions(const std::function<void(size_t)>& run) {
  Pair both = {[&run] { run(1); }, pair};
  run(0);
  if (both.second != nullptr) std::exchange(both.second, nullptr)();
}

int concurrent_directions() {
  return pair != nullptr && (pair->second != nullptr || pair->waiting != nullptr) ? 2 : 1;
}

PersistentPlan plan_persistent(const SequenceArgs& args, int directions) {
  return plan_rows<PersistentForwardArgs>(args, args.save, directions);
}
PersistentPlan plan_persistent(const SequenceBackwardArgs& args, int directions) {
  return plan_rows<PersistentBackwardArgs>(args, /*training=*/true, directions);
}

std::optional<SequenceResult> persistent_forward(
    const SequenceArgs& args, const PersistentPlan& plan, int64_t workspace_bytes) {
  const auto options = args.input->options();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const ForwardResults results(args, steps.size());
  const Tensor h = at::empty(args.h_0->sizes(), options), c = at::empty(args.c_0->sizes(), options);
  const bool launched = visit_kernel_dtype(args.input->scalar_type(), [&]<typename T>(T*) {
    return launch_forward_steps<T>(args, steps, plan, workspace_bytes, results, h, c);
  });
  if (!launched) return rejected();
  return SequenceResult(results.output, h, c, results.saved());
}

std::optional<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, const PersistentPlan& plan, int64_t workspace_bytes) {
  const at::ScalarType dtype = args.input->scalar_type();
  const int64_t rows = flat_size(args.input), hidden = args.h_0->size(1);
  const int64_t columns = args.cell->grad_columns() * hidden;
  const auto options = args.input->options(), wide = compute_options(args.input);
  const int64_t counter = kCounterBytes / static_cast<int64_t>(args.input->element_size());
  const Tensor dz_memory = at::empty({counter + rows * columns}, options);
  const BackwardTensors tensors = {
      at::empty(args.h_0->sizes(), wide),
      at::empty({args.h_0->size(0), args.cell->state_columns() * hidden}, wide),
      dz_memory.slice(0, counter).view({rows, columns})};
  const bool launched = visit_kernel_dtype(dtype, [&]<typename T>(T*) {
    return launch_backward_steps<T>(args, plan, workspace_bytes, dz_memory, tensors);
  });
  if (!launched) return rejected();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  return row_gradients(args, steps, Gemm(dtype), tensors);
}

}  // namespace lltm::cuda
