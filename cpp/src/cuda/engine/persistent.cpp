// A sequence of the LLTM by persistent kernels (persistent.h): the input's part of the
// pre-activations by a GEMM over many steps, then one launch for all of these steps. Backward: one
// launch, and then the gradients as in the other engine.
//
// Dtypes are those of the stepwise engine: h, c and dz are rounded to the tensors' dtype at every
// step, sums and what is carried from step to step in backward are float32.
#include "cuda/kernel/persistent.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/sequence_gradients.h"
#include "cuda/gemm/gemm.h"
#include "cuda/tuning_table.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace lltm::cuda {
namespace {

using at::Tensor;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// ---- whether, and in how many launches --------------------------------------

// The rows of the state in launches of at most `groups` groups, one launch after another.
struct RowPlan {
  int tiles;  // of a group
  int64_t groups;
  int poll_nanoseconds;

  int64_t rows() const { return groups * tiles * kTileRows; }
};

// A launch takes about as long with one row as with all that it can have, so from this many
// on a GEMM per step is estimated to be faster, where it has not been measured.
constexpr int64_t kMostRowLaunches = 4;

// Of the LLTM in the 16-bit dtypes, and in float32 where its products may be those of TF32.
bool has_kernels(const CellInfo& cell, at::ScalarType dtype) {
  return cell.id == Lltm::kCell.id && (dtype == at::kHalf || dtype == at::kBFloat16 ||
                                       (dtype == at::kFloat && Gemm(dtype).uses_tf32()));
}

// How this engine runs a sequence, or nothing where it can't: the one place that decides.
// resident_blocks(tiles) is what the device runs at once of the kernel.
template <typename ResidentBlocks>
std::optional<RowPlan> plan_rows(
    const SequenceInputs& args,
    Direction direction,
    std::optional<Tuning> tuning,
    const ResidentBlocks& resident_blocks) {
  const int64_t most_row_bytes =
      direction == Direction::forward ? kMostRowBytesForward : kMostRowBytesBackward;
  const int64_t batch = args.h_0.size(0), hidden = args.h_0.size(1);
  if (!has_kernels(*args.cell, args.input.scalar_type())) return std::nullopt;
  if (flat_size(args.input) == 0 || hidden == 0) return std::nullopt;
  // The kernels carry the state themselves, from each step to the next.
  if (args.reset.defined() || args.recurrent_mask.defined()) return std::nullopt;
  const auto bytes = static_cast<int64_t>(args.input.element_size());
  const int64_t row_bytes = hidden * bytes;
  if (row_bytes % kRowBytesMultiple != 0 || row_bytes > most_row_bytes) return std::nullopt;

  if (!tuning) {
    tuning = find_tuning(kTuningTable, current_gpu(), direction, bytes, hidden, batch);
  }
  // Unless measured: the fewest rows to a thread block with which all run at once; else the most.
  std::optional<RowPlan> plan;
  for (const int tiles : kTileCounts) {
    if (tuning && tuning->tiles != tiles) continue;
    const int64_t groups = resident_blocks(tiles) / divide_up(hidden, kSliceUnits);
    if (groups == 0) continue;
    plan = {tiles, groups, tuning ? tuning->poll_nanoseconds : 0};
    if (plan->rows() >= batch) break;
  }
  if (plan && !tuning && batch > kMostRowLaunches * plan->rows()) return std::nullopt;
  return plan;
}

// body(first row, groups) for each launch.
template <typename Body>
void for_each_row_launch(const RowPlan& plan, int64_t batch, const Body& body) {
  for (int64_t row = 0; row < batch; row += plan.rows()) {
    body(row, std::min(plan.groups, divide_up(batch - row, plan.tiles * kTileRows)));
  }
}

// Steps from `first` on in the order of a kernel, which their rows follow up or down: as many
// as fit in one launch, up to `last`. Returns the first that is left.
size_t take_steps(
    const std::vector<Step>& order, size_t first, size_t last, bool ascending, LaunchSteps& to) {
  to.ascending = ascending;
  to.edge = order[first].offset + (ascending ? 0 : order[first].rows);
  to.time = static_cast<int64_t>(ascending ? first : order.size() - 1 - first);
  to.previous_offset = first == 0 ? 0 : order[first - 1].offset;
  to.previous_rows = first == 0 ? 0 : order[first - 1].rows;
  to.runs = 0;
  for (size_t k = first; k < last; ++k) {
    const int64_t rows = order[k].rows;
    if (to.runs == 0 || to.run[to.runs - 1].rows != rows) {
      if (to.runs == kMostRuns) return k;
      to.run[to.runs++] = {0, rows};
    }
    ++to.run[to.runs - 1].count;
  }
  return last;
}

// Contiguous, and beginning at a multiple of 16 bytes.
Tensor aligned(const Tensor& tensor) {
  const Tensor contiguous = tensor.contiguous();
  const auto address = reinterpret_cast<std::uintptr_t>(contiguous.const_data_ptr());
  return address % 16 == 0 ? contiguous : contiguous.clone();
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* mutable_data(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// ---- forward ----------------------------------------------------------------

struct PersistentTensors {
  Tensor output, h, c, activations;
};

template <typename T>
void run_persistent_forward(
    const SequenceArgs& args,
    const RowPlan& plan,
    int64_t workspace_bytes,
    const PersistentTensors& t) {
  const int64_t batch = args.h_0.size(0), hidden = args.h_0.size(1);
  const int64_t columns = Lltm::kSlots * hidden;
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const std::vector<Chunk> chunks = plan_chunks(steps, workspace_bytes / row_bytes);
  const Tensor gates = at::empty({most_rows(chunks), columns}, compute_options(args.input));
  const Tensor x = as_operand(flat_rows(args.input));
  const Weights weights = weights_of(args);
  const Tensor weights_x = as_padded_operand(weights.ih, columns, args.input.size(-1));
  const Operand weights_x_t = transposed(operand(weights_x));
  const Tensor weights_h = aligned(weights.hh);
  const Tensor h_0 = aligned(args.h_0);
  const Gemm gemm(args.input.scalar_type());
  const Stream stream = current_stream();

  PersistentForwardArgs<T> launch;
  launch.hidden = hidden;
  launch.batch = batch;
  launch.weights = data<T>(weights_h);
  launch.bias_ih = read_row<T>(args.bias_ih);
  launch.bias_hh = read_row<T>(args.bias_hh);
  launch.gates = data<float>(gates);
  launch.h_0 = data<T>(h_0);
  launch.h = mutable_data<T>(t.h);
  launch.c = mutable_data<T>(t.c);
  launch.output = mutable_data<T>(t.output);
  launch.activations = mutable_data<T>(t.activations);
  launch.poll_nanoseconds = plan.poll_nanoseconds;
  mark_absent(launch.output, static_cast<int64_t>(t.output.nbytes()), stream);
  for (const Chunk& chunk : chunks) {
    const Operand chunk_x = operand_rows(x, chunk.begin, chunk.rows);
    gemm(chunk_x, weights_x_t, result_rows(gates, 0, chunk.rows), /*accumulate=*/false);
    launch.gates_offset = chunk.begin;
    for (size_t k = chunk.first; k < chunk.last;) {
      k = take_steps(steps, k, chunk.last, /*ascending=*/!args.reverse, launch.steps);
      for_each_row_launch(plan, batch, [&](int64_t first_row, int64_t groups) {
        launch.first_row = first_row;
        launch_persistent_forward(launch, groups, plan.tiles, stream);
      });
    }
  }
}

// ---- backward ---------------------------------------------------------------

template <typename T>
StepMatrix<const T> step_matrix(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (tensor.dim() == 2) {
    return {data<T>(tensor), 0, tensor.stride(0), tensor.stride(0), tensor.stride(1)};
  }
  return {data<T>(tensor), tensor.stride(0), 0, tensor.stride(1), tensor.stride(2)};
}

template <typename T>
void run_persistent_backward(
    const SequenceBackwardArgs& args,
    const RowPlan& plan,
    const std::vector<Step>& steps,
    const BackwardTensors& t) {
  const int64_t batch = args.h_0.size(0), hidden = args.h_0.size(1);
  const Tensor weights = aligned(weights_of(args).hh.t());
  const Tensor activations = aligned(args.saved);
  const Stream stream = current_stream();
  const std::vector<Step> order(steps.rbegin(), steps.rend());

  PersistentBackwardArgs<T> launch;
  launch.hidden = hidden;
  launch.batch = batch;
  launch.weights = data<T>(weights);
  launch.activations = data<T>(activations);
  launch.grad_output = step_matrix<T>(args.grad_output);
  launch.dz = mutable_data<T>(t.dz);
  launch.dh = mutable_data<float>(t.dh);
  launch.dc = mutable_data<float>(t.dc);
  launch.poll_nanoseconds = plan.poll_nanoseconds;
  mark_absent(launch.dz, static_cast<int64_t>(t.dz.nbytes()), stream);
  for (size_t k = 0; k < order.size();) {
    k = take_steps(order, k, order.size(), /*ascending=*/args.reverse, launch.steps);
    if (k == order.size() && args.output_mask[1]) launch.steps.run[launch.steps.runs++] = {1, 0};
    for_each_row_launch(plan, batch, [&](int64_t first_row, int64_t groups) {
      launch.first_row = first_row;
      launch_persistent_backward(launch, groups, plan.tiles, stream);
    });
  }
}

// body of a dtype for which there are kernels.
template <typename Body>
decltype(auto) visit_kernel_dtype(at::ScalarType dtype, const Body& body) {
  if (dtype == at::kFloat) return body(static_cast<float*>(nullptr));
  return dtype == at::kHalf ? body(static_cast<c10::Half*>(nullptr))
                            : body(static_cast<c10::BFloat16*>(nullptr));
}

}  // namespace

std::optional<SequenceResult> persistent_forward(
    const SequenceArgs& args, int64_t workspace_bytes, std::optional<Tuning> tuning) {
  // c of the steps between two launches stays in registers.
  if (args.saves_checkpoints()) return std::nullopt;
  const int64_t hidden = args.h_0.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const auto resident_blocks = [&](int tiles) {
    return visit_kernel_dtype(
        dtype, [&]<typename T>(T*) { return resident_forward_blocks<T>(hidden, tiles); });
  };
  const std::optional<RowPlan> plan = plan_rows(args, Direction::forward, tuning, resident_blocks);
  if (!plan) return std::nullopt;

  const auto options = args.input.options();
  const PersistentTensors t = {
      at::empty(output_sizes(args.input, hidden), options),
      copy_or_zeros(args.h_0, args.h_0.sizes(), options),
      copy_or_zeros(args.c_0, args.h_0.sizes(), options),
      args.saves_activations() ? at::empty({flat_size(args.input), Lltm::kSaved * hidden}, options)
                               : Tensor()};
  visit_kernel_dtype(
      dtype, [&]<typename T>(T*) { run_persistent_forward<T>(args, *plan, workspace_bytes, t); });
  return SequenceResult{t.output, t.h, t.c, t.activations};
}

std::optional<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, std::optional<Tuning> tuning) {
  const int64_t hidden = args.h_0.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const auto resident_blocks = [&](int tiles) {
    return visit_kernel_dtype(
        dtype, [&]<typename T>(T*) { return resident_backward_blocks<T>(hidden, tiles); });
  };
  const std::optional<RowPlan> plan = plan_rows(args, Direction::backward, tuning, resident_blocks);
  if (!plan) return std::nullopt;

  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const BackwardTensors t = {
      copy_or_zeros(args.grad_h_n, args.h_0.sizes(), compute_options(args.input)),
      copy_or_zeros(args.grad_c_n, args.h_0.sizes(), compute_options(args.input)),
      at::empty({flat_size(args.input), Lltm::kSlots * hidden}, args.input.options())};
  visit_kernel_dtype(
      dtype, [&]<typename T>(T*) { run_persistent_backward<T>(args, *plan, steps, t); });
  return sequence_gradients(args, steps, Gemm(dtype), t);
}

}  // namespace lltm::cuda
