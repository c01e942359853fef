// A sequence by persistent kernels (persistent.h): the input's part of the
// pre-activations by a GEMM over many steps, then one launch for all of these steps. Backward: one
// launch, and then the gradients as in the other engine.
//
// Dtypes are those of the stepwise engine: h, c and dz are rounded to the tensors' dtype at every
// step, sums and what is carried from step to step in backward are float32.
//
// The kernels need H to be a multiple of 16 bytes. Where it is none, the problem is that of more
// units whose weights, states and gradients are zero; all cells leave them so.
#include "cuda/kernel/persistent.h"
#include "common/checkpoints.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/sequence_gradients.h"
#include "cuda/gemm/gemm.h"
#include "cuda/tuning_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <variant>

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

// In the 16-bit dtypes, and in float32 where its products may be those of TF32.
bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ||
         (dtype == at::kFloat && Gemm(dtype).uses_tf32());
}

// body of a dtype for which there are kernels.
template <typename Body>
decltype(auto) visit_kernel_dtype(at::ScalarType dtype, const Body& body) {
  if (dtype == at::kFloat) return body(static_cast<float*>(nullptr));
  return dtype == at::kHalf ? body(static_cast<c10::Half*>(nullptr))
                            : body(static_cast<c10::BFloat16*>(nullptr));
}

// How this engine runs a sequence, or why it can't: the one place that decides.
// `hidden` is padded; resident_blocks(T*, tiles) is what the device runs at once of the kernel.
template <typename ResidentBlocks>
std::variant<RowPlan, const char*> plan_rows(
    const SequenceInputs& args,
    int64_t hidden,
    Direction direction,
    std::optional<Tuning> tuning,
    const ResidentBlocks& resident_blocks) {
  const int64_t batch = args.h_0.size(0);
  if (args.cell->programs != nullptr) return "a cell of one's own";
  if (!has_kernels(args.input.scalar_type())) {
    return args.input.scalar_type() == at::kFloat ? "float32, and TF32 is not allowed" : "float64";
  }
  if (flat_size(args.input) == 0 || hidden == 0) return "nothing to compute";
  // The kernels carry the state themselves, from each step to the next.
  if (args.reset.defined()) return "a reset";
  if (args.recurrent_mask.defined()) return "a recurrent mask";
  const auto bytes = static_cast<int64_t>(args.input.element_size());
  if (hidden * bytes > most_row_bytes(*args.cell, direction)) return "H is too large";

  if (!tuning) {
    tuning =
        find_tuning(kTuningTable, current_gpu(), args.cell->name, direction, bytes, hidden, batch);
  }
  // Unless measured: the fewest rows to a thread block with which all run at once; else the most.
  std::optional<RowPlan> plan;
  for (const int tiles : kTileCounts) {
    if (tuning && tuning->tiles != tiles) continue;
    const int64_t blocks = visit_kernel_dtype(
        args.input.scalar_type(), [&](auto* type) { return resident_blocks(type, tiles); });
    const int64_t groups = blocks / divide_up(hidden, kSliceUnits);
    if (groups == 0) continue;
    plan = {tiles, groups, tuning ? tuning->poll_nanoseconds : 0};
    if (plan->rows() >= batch) break;
  }
  if (!plan) {
    return tuning && tuning->tiles == 0 ? "measured to be faster"
                                        : "too few thread blocks run at once on this device";
  }
  if (!tuning && batch > kMostRowLaunches * plan->rows()) return "B is so large";
  return *plan;
}

// body(first row, groups) for each launch, while it returns true; whether it always did.
template <typename Body>
bool for_each_row_launch(const RowPlan& plan, int64_t batch, const Body& body) {
  for (int64_t row = 0; row < batch; row += plan.rows()) {
    if (!body(row, std::min(plan.groups, divide_up(batch - row, plan.tiles * kTileRows)))) {
      return false;
    }
  }
  return true;
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

// ---- H that is no multiple of 16 bytes ---------------------------------------

int64_t padded_hidden(const SequenceInputs& args) {
  return padded_cols(args.h_0.size(1), args.input.scalar_type());
}

// With `to` units in the place of each `from` of a dimension, the others zero; or fewer,
// contiguous.
Tensor with_units(const Tensor& tensor, int64_t dim, int64_t from, int64_t to) {
  if (!tensor.defined()) return tensor;
  const Tensor blocks = tensor.unflatten(dim, {tensor.size(dim) / from, from});
  const int64_t units = dim < 0 ? dim : dim + 1;
  if (to < from) return blocks.narrow(units, 0, to).flatten(units - 1, units).contiguous();
  std::vector<int64_t> sizes = blocks.sizes().vec();
  sizes[units < 0 ? sizes.size() - 1 : units] = to;
  const Tensor padded = at::zeros(sizes, tensor.options());
  padded.narrow(units, 0, from).copy_(blocks);
  return padded.flatten(units - 1, units);
}

// The tensors of such a problem.
struct PaddedInputs {
  Tensor h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh;

  PaddedInputs(const SequenceInputs& args, int64_t to) {
    const int64_t hidden = args.h_0.size(1);
    const Weights weights = weights_of(args);
    h_0 = with_units(args.h_0, -1, hidden, to);
    c_0 = with_units(args.c_0, -1, hidden, to);
    weight_ih = with_units(weights.ih, 0, hidden, to);
    weight_hh = with_units(with_units(weights.hh, 0, hidden, to), -1, hidden, to);
    bias_ih = with_units(args.bias_ih, 0, hidden, to);
    bias_hh = with_units(args.bias_hh, 0, hidden, to);
  }

  SequenceInputs inputs(const SequenceInputs& args) const {
    return {
        args.cell,
        args.input,
        h_0,
        c_0,
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        args.batch_sizes,
        args.reverse,
        args.reset,
        args.checkpoint_steps,
        args.recurrent_mask};
  }
};

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
  Checkpoints checkpoints;
};

// False where a launch was refused, and then the tensors mean nothing.
template <typename T>
bool run_persistent_forward(
    const SequenceArgs& args,
    const RowPlan& plan,
    const std::vector<Step>& steps,
    int64_t workspace_bytes,
    const PersistentTensors& t) {
  const CellInfo& cell = *args.cell;
  const int64_t batch = args.h_0.size(0), hidden = args.h_0.size(1);
  const int64_t columns = cell.x.count() * hidden;
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
  const std::vector<Chunk> chunks = plan_chunks(steps, workspace_bytes / row_bytes);
  const Tensor gates = at::empty({most_rows(chunks), columns}, compute_options(args.input));
  const Tensor x = as_operand(flat_rows(args.input));
  const Weights weights = weights_of(args);
  const Tensor weights_x =
      as_padded_operand(x_slots(weights.ih, cell), columns, args.input.size(-1));
  const Operand weights_x_t = transposed(operand(weights_x));
  const Tensor weights_h = aligned(h_slots(weights.hh, cell));
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
  launch.failure = failure_word();
  mark_absent(launch.output, static_cast<int64_t>(t.output.nbytes()), stream);
  for (const Chunk& chunk : chunks) {
    const Operand chunk_x = operand_rows(x, chunk.begin, chunk.rows);
    gemm(chunk_x, weights_x_t, result_rows(gates, 0, chunk.rows), /*accumulate=*/false);
    launch.gates_offset = chunk.begin;
    for (size_t k = chunk.first; k < chunk.last;) {
      // c, which is rounded at every step, leaves a kernel only at its end.
      if (t.checkpoints.has(k)) t.checkpoints.save(k, t.c);
      const size_t last = std::min(chunk.last, t.checkpoints.next(k));
      k = take_steps(steps, k, last, /*ascending=*/!args.reverse, launch.steps);
      const bool launched = for_each_row_launch(plan, batch, [&](int64_t row, int64_t groups) {
        launch.first_row = row;
        return launch_persistent_forward(cell, launch, groups, plan.tiles, stream);
      });
      if (!launched) return false;
    }
  }
  return true;
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
bool run_persistent_backward(
    const SequenceBackwardArgs& args,
    const RowPlan& plan,
    const std::vector<Step>& steps,
    const BackwardTensors& t) {
  const int64_t batch = args.h_0.size(0), hidden = args.h_0.size(1);
  const Tensor weights = aligned(h_slots(weights_of(args).hh, *args.cell).t());
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
  launch.failure = failure_word();
  mark_absent(launch.dz, static_cast<int64_t>(t.dz.nbytes()), stream);
  for (size_t k = 0; k < order.size();) {
    k = take_steps(order, k, order.size(), /*ascending=*/args.reverse, launch.steps);
    if (k == order.size() && args.output_mask[1]) launch.steps.run[launch.steps.runs++] = {1, 0};
    const bool launched = for_each_row_launch(plan, batch, [&](int64_t row, int64_t groups) {
      launch.first_row = row;
      return launch_persistent_backward(*args.cell, launch, groups, plan.tiles, stream);
    });
    if (!launched) return false;
  }
  return true;
}

// The check before said that all would fit, and the GPU knows better.
const char* refused() {
  TORCH_WARN_ONCE(
      "lltm::sequence: the GPU refused a persistent kernel, for want of multiprocessors that this "
      "process may use (MPS, MIG or a green context may hold some back); running step by step");
  return "the GPU refused a launch";
}

// The steps of a problem whose H the kernels take; nothing where a launch was refused.
std::optional<SequenceResult> forward_steps(
    const SequenceArgs& args, const RowPlan& plan, int64_t workspace_bytes) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0.size(1);
  const auto options = args.input.options();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const PersistentTensors t = {
      at::empty(output_sizes(args.input, hidden), options),
      copy_or_zeros(args.h_0, args.h_0.sizes(), options),
      copy_or_zeros(args.state_c(), args.h_0.sizes(), options),
      args.saves_activations() ? at::empty({flat_size(args.input), cell.saved * hidden}, options)
                               : Tensor(),
      Checkpoints(args.saved_checkpoint_steps(), steps.size(), args.h_0)};
  const bool launched = visit_kernel_dtype(args.input.scalar_type(), [&]<typename T>(T*) {
    return run_persistent_forward<T>(args, plan, steps, workspace_bytes, t);
  });
  if (!launched) return std::nullopt;
  return SequenceResult{
      t.output, t.h, t.c, args.saves_checkpoints() ? t.checkpoints.tensor() : t.activations};
}

std::optional<BackwardTensors> backward_steps(
    const SequenceBackwardArgs& args, const RowPlan& plan, const std::vector<Step>& steps) {
  const int64_t columns = args.cell->slots * args.h_0.size(1);
  const BackwardTensors t = {
      copy_or_zeros(args.grad_h_n, args.h_0.sizes(), compute_options(args.input)),
      copy_or_zeros(args.grad_c_n, args.h_0.sizes(), compute_options(args.input)),
      at::empty({flat_size(args.input), columns}, args.input.options())};
  const bool launched = visit_kernel_dtype(args.input.scalar_type(), [&]<typename T>(T*) {
    return run_persistent_backward<T>(args, plan, steps, t);
  });
  return launched ? std::optional(t) : std::nullopt;
}

}  // namespace

Attempt<SequenceResult> persistent_forward(
    const SequenceArgs& args, int64_t workspace_bytes, std::optional<Tuning> tuning) {
  const int64_t hidden = args.h_0.size(1), padded = padded_hidden(args);
  const auto resident_blocks = [&]<typename T>(T*, int tiles) {
    return resident_forward_blocks<T>(*args.cell, padded, tiles);
  };
  const auto planned = plan_rows(args, padded, Direction::forward, tuning, resident_blocks);
  if (const auto* why_not = std::get_if<const char*>(&planned)) return {{}, *why_not};
  const RowPlan& plan = std::get<RowPlan>(planned);

  std::optional<SequenceResult> result;
  if (padded == hidden) {
    result = forward_steps(args, plan, workspace_bytes);
  } else {
    const PaddedInputs tensors(args, padded);
    result = forward_steps({tensors.inputs(args), args.save}, plan, workspace_bytes);
    if (result) {
      auto& [output, h_n, c_n, saved] = *result;
      for (Tensor* const tensor : {&output, &h_n, &c_n, &saved}) {
        *tensor = with_units(*tensor, -1, padded, hidden);
      }
    }
  }
  if (!result) return {{}, refused()};
  return {std::move(result), nullptr, plan.tiles, plan.groups};
}

Attempt<Gradients> persistent_backward(
    const SequenceBackwardArgs& args, std::optional<Tuning> tuning) {
  const at::ScalarType dtype = args.input.scalar_type();
  const int64_t hidden = args.h_0.size(1), padded = padded_hidden(args);
  const auto resident_blocks = [&]<typename T>(T*, int tiles) {
    return resident_backward_blocks<T>(*args.cell, padded, tiles);
  };
  const auto planned = plan_rows(args, padded, Direction::backward, tuning, resident_blocks);
  if (const auto* why_not = std::get_if<const char*>(&planned)) return {{}, *why_not};
  const RowPlan& plan = std::get<RowPlan>(planned);

  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  std::optional<BackwardTensors> tensors;
  if (padded == hidden) {
    tensors = backward_steps(args, plan, steps);
  } else {
    const auto pad = [&](const Tensor& tensor) { return with_units(tensor, -1, hidden, padded); };
    const PaddedInputs inputs(args, padded);
    const Tensor saved = pad(args.saved);
    tensors = backward_steps(
        {inputs.inputs(args),
         args.output,
         saved,
         pad(args.grad_output),
         pad(args.grad_h_n),
         pad(args.grad_c_n),
         args.output_mask,
         args.segment},
        plan,
        steps);
    if (tensors) {
      auto& [dh, dc, dz] = *tensors;
      for (Tensor* const tensor : {&dh, &dc, &dz}) {
        *tensor = with_units(*tensor, -1, padded, hidden);
      }
      dz = as_padded_operand(dz, dz.size(0), padded_cols(dz.size(1), dtype));
    }
  }
  if (!tensors) return {{}, refused()};
  return {sequence_gradients(args, steps, Gemm(dtype), *tensors), nullptr, plan.tiles, plan.groups};
}

}  // namespace lltm::cuda
