// A sequence by persistent kernels (persistent.h): the input's part of the
// pre-activations by a GEMM over many steps, then one launch for all of these steps. Backward: one
// launch, and then the gradients as in the other engine. The calls of both directions of a layer
// share their launches.
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
#include "cuda/gemm/side_stream.h"
#include "cuda/tuning_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <list>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace lltm::cuda {
namespace {

using at::Tensor;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// ---- whether, and in how many launches --------------------------------------

// The rows of the state in launches of at most `groups` groups to a call, one launch after another.
struct RowPlan {
  int tiles;  // of a group
  int64_t groups;
  int poll_nanoseconds;
  bool leaves_room;  // for other kernels, which run meanwhile

  int64_t rows() const { return groups * tiles * kTileRows; }
};

// A launch takes about as long with one row as with all that it can have, so from this many
// on a GEMM per step is estimated to be faster, where it has not been measured.
constexpr int64_t kMostRowLaunches = 4;

// A launch leaves room for a GEMM where one of so many multiprocessors, or more, has no thread
// block.
constexpr int64_t kRoom = 8;

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

// How this engine runs `calls` calls like `args` at once, or why it can't: the one place that
// decides. `hidden` is padded; resident_blocks(T*, tiles) is what the device runs at once of the
// kernel.
template <typename ResidentBlocks>
std::variant<RowPlan, const char*> plan_rows(
    const SequenceInputs& args,
    int64_t calls,
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
    // Calls at once have as many groups as one of all their rows.
    tuning = find_tuning(
        kTuningTable, current_gpu(), args.cell->name, direction, bytes, hidden, calls * batch);
  }
  // Unless measured: the fewest rows to a thread block with which all run at once; else the most.
  std::optional<RowPlan> plan;
  for (const int tiles : kTileCounts) {
    if (tuning && tuning->tiles != tiles) continue;
    const int64_t blocks = visit_kernel_dtype(
        args.input.scalar_type(), [&](auto* type) { return resident_blocks(type, tiles); });
    const int64_t slices = calls * divide_up(hidden, kSliceUnits);
    const int64_t groups = blocks / slices;
    if (groups == 0) continue;
    const int64_t taken = slices * std::min(groups, divide_up(batch, tiles * kTileRows));
    const int64_t processors = std::min<int64_t>(blocks, current_gpu().multiprocessors);
    const bool leaves_room = taken <= processors - divide_up(processors, kRoom);
    plan = {tiles, groups, tuning ? tuning->poll_nanoseconds : 0, leaves_room};
    if (plan->rows() >= batch) break;
  }
  if (!plan) {
    return tuning && tuning->tiles == 0 ? "measured to be faster"
                                        : "too few thread blocks run at once on this device";
  }
  if (!tuning && batch > kMostRowLaunches * plan->rows()) return "B is so large";
  return *plan;
}

constexpr int32_t kMostSteps = std::numeric_limits<int32_t>::max();  // of a run

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

// ---- launches -----------------------------------------------------------------

// Queues the launches of some calls: the first of each call together, then the second, and so on,
// by launch(calls, groups). False where one was refused. Until a call is done(), next() gives the
// arguments of its next launch; launched() says that this has been queued.
template <typename Call, typename Launch>
bool run_launches(
    std::list<Call>& calls, const RowPlan& plan, int64_t batch, const Launch& launch) {
  for (;;) {
    Calls<typename Call::LaunchArgs> together;
    for (Call& call : calls) {
      if (!call.done()) together.call[together.count++] = call.next();
    }
    if (together.count == 0) return true;
    for (int64_t row = 0; row < batch; row += plan.rows()) {
      for (auto& args : together.call) args.first_row = row;
      if (!launch(together, std::min(plan.groups, divide_up(batch - row, plan.tiles * kTileRows))))
        return false;
    }
    for (Call& call : calls) call.launched();
  }
}

// ---- forward ----------------------------------------------------------------

struct PersistentTensors {
  Tensor output, h, c, activations;
  Checkpoints checkpoints;
};

// The launches of one call, chunk by chunk of steps: they read what a GEMM over the chunk has left
// in a workspace. Where the plan leaves room there are two of these, half as large, and the GEMM of
// the next chunk runs beside the steps of this one.
template <typename T>
class ForwardCall {
 public:
  using LaunchArgs = PersistentForwardArgs<T>;

  ForwardCall(
      const SequenceArgs& args,
      const RowPlan& plan,
      int64_t workspace_bytes,
      const PersistentTensors& tensors)
      : steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        ascending_(!args.reverse),
        tensors_(tensors),
        dtype_(args.input.scalar_type()) {
    const CellInfo& cell = *args.cell;
    const int64_t hidden = args.h_0.size(1), columns = cell.x.count() * hidden;
    const int64_t rows = workspace_bytes / (columns * static_cast<int64_t>(sizeof(float)));
    chunks_ = plan_chunks(steps_, rows);
    if (plan.leaves_room && chunks_.size() > 1 && SideStream::is_available()) {
      chunks_ = plan_chunks(steps_, rows / 2);
      side_.emplace();
    }
    for (Tensor& gates : gates_) {
      gates = at::empty({most_rows(chunks_), columns}, compute_options(args.input));
      if (!side_) break;
    }
    const Weights weights = weights_of(args);
    x_ = as_operand(flat_rows(args.input));
    weights_x_ = as_padded_operand(x_slots(weights.ih, cell), columns, args.input.size(-1));
    weights_h_ = aligned(h_slots(weights.hh, cell));
    h_0_ = aligned(args.h_0);

    launch_.hidden = hidden;
    launch_.batch = args.h_0.size(0);
    launch_.weights = data<T>(weights_h_);
    launch_.bias_ih = read_row<T>(args.bias_ih);
    launch_.bias_hh = read_row<T>(args.bias_hh);
    launch_.h_0 = data<T>(h_0_);
    launch_.h = mutable_data<T>(tensors_.h);
    launch_.c = mutable_data<T>(tensors_.c);
    launch_.output = mutable_data<T>(tensors_.output);
    launch_.activations = mutable_data<T>(tensors_.activations);
    launch_.poll_nanoseconds = plan.poll_nanoseconds;
    launch_.failure = failure_word();
    const auto bytes = static_cast<int64_t>(tensors_.output.nbytes());
    mark_absent(launch_.output, bytes, current_stream());
  }

  bool done() const { return step_ == steps_.size(); }

  const LaunchArgs& next() {
    if (step_ == chunks_[chunk_].last) ++chunk_;
    const Chunk& chunk = chunks_[chunk_];
    if (step_ == chunk.first) begin_chunk();
    // c, which is rounded at every step, leaves a kernel only at its end.
    if (tensors_.checkpoints.has(step_)) tensors_.checkpoints.save(step_, tensors_.c);
    const size_t last = std::min(chunk.last, tensors_.checkpoints.next(step_));
    step_ = take_steps(steps_, step_, last, ascending_, launch_.steps);
    return launch_;
  }

  // The GEMM comes behind the launch, which begins only where it finds all its multiprocessors
  // free. The GPU may still begin with the GEMM: then the launch waits for it, as it would for a
  // GEMM before it.
  void launched() {
    if (!std::exchange(projects_next_, false)) return;
    side_->run([&] { project(chunk_ + 1); });
  }

 private:
  // Before the next chunk's GEMM on the side come the steps that read the same workspace, those of
  // the chunk before this one.
  void begin_chunk() {
    if (chunk_ == 0 || !side_) {
      project(chunk_);
    } else {
      side_->join();
    }
    projects_next_ = side_ && chunk_ + 1 < chunks_.size();
    if (projects_next_) side_->follow();
    launch_.gates = data<float>(gates_of(chunk_));
    launch_.gates_offset = chunks_[chunk_].begin;
  }

  void project(size_t k) const {
    const auto [first, last, begin, rows] = chunks_[k];
    const Gemm gemm(dtype_);  // of the stream that is current now
    gemm(
        operand_rows(x_, begin, rows),
        transposed(operand(weights_x_)),
        result_rows(gates_of(k), 0, rows),
        /*accumulate=*/false);
  }

  const Tensor& gates_of(size_t chunk) const { return gates_[side_ ? chunk % 2 : 0]; }

  std::vector<Step> steps_;
  bool ascending_;
  const PersistentTensors& tensors_;
  at::ScalarType dtype_;
  std::vector<Chunk> chunks_;
  Tensor gates_[2], x_, weights_x_, weights_h_, h_0_;
  LaunchArgs launch_;
  size_t step_ = 0, chunk_ = 0;
  bool projects_next_ = false;
  std::optional<SideStream> side_;  // destroyed before the tensors that it uses
};

// The steps of problems whose H the kernels take; nothing where a launch was refused.
std::optional<std::vector<SequenceResult>> forward_steps(
    std::span<const SequenceArgs> calls, const RowPlan& plan, int64_t workspace_bytes) {
  std::vector<PersistentTensors> tensors;
  for (const SequenceArgs& args : calls) {
    const int64_t hidden = args.h_0.size(1), rows = flat_size(args.input);
    const auto options = args.input.options();
    const auto steps = static_cast<size_t>(
        args.batch_sizes.defined() ? args.batch_sizes->size(0) : args.input.size(0));
    tensors.push_back(
        {at::empty(output_sizes(args.input, hidden), options),
         copy_or_zeros(args.h_0, args.h_0.sizes(), options),
         copy_or_zeros(args.state_c(), args.h_0.sizes(), options),
         args.saves_activations() ? at::empty({rows, args.cell->saved * hidden}, options)
                                  : Tensor(),
         Checkpoints(args.saved_checkpoint_steps(), steps, args.h_0)});
  }
  const SequenceArgs& args = calls.front();
  const bool launched = visit_kernel_dtype(args.input.scalar_type(), [&]<typename T>(T*) {
    std::list<ForwardCall<T>> chains;
    const auto count = static_cast<int64_t>(calls.size());
    for (size_t k = 0; k < calls.size(); ++k) {
      chains.emplace_back(calls[k], plan, workspace_bytes / count, tensors[k]);
    }
    const Stream stream = current_stream();
    const auto launch = [&](const ForwardCalls<T>& together, int64_t groups) {
      return launch_persistent_forward(*args.cell, together, groups, plan.tiles, stream);
    };
    return run_launches(chains, plan, args.h_0.size(0), launch);
  });
  if (!launched) return std::nullopt;
  std::vector<SequenceResult> results;
  for (size_t k = 0; k < calls.size(); ++k) {
    const auto& [output, h, c, activations, checkpoints] = tensors[k];
    const bool checkpointed = calls[k].saves_checkpoints();
    results.emplace_back(output, h, c, checkpointed ? checkpoints.tensor() : activations);
  }
  return results;
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

// The launches of one call: as a rule, one.
template <typename T>
class BackwardCall {
 public:
  using LaunchArgs = PersistentBackwardArgs<T>;

  BackwardCall(
      const SequenceBackwardArgs& args, const RowPlan& plan, const BackwardTensors& tensors)
      : order_(plan_steps(args.input, args.batch_sizes, !args.reverse)),
        ascending_(args.reverse),
        wants_h_0_(args.output_mask[1]),
        weights_(aligned(h_slots(weights_of(args).hh, *args.cell).t())),
        activations_(aligned(args.saved)) {
    launch_.hidden = args.h_0.size(1);
    launch_.batch = args.h_0.size(0);
    launch_.weights = data<T>(weights_);
    launch_.activations = data<T>(activations_);
    launch_.grad_output = step_matrix<T>(args.grad_output);
    launch_.dz = mutable_data<T>(tensors.dz);
    launch_.dh = mutable_data<float>(tensors.dh);
    launch_.dc = mutable_data<float>(tensors.dc);
    launch_.poll_nanoseconds = plan.poll_nanoseconds;
    launch_.failure = failure_word();
    mark_absent(launch_.dz, static_cast<int64_t>(tensors.dz.nbytes()), current_stream());
  }

  bool done() const { return step_ == order_.size(); }

  const LaunchArgs& next() {
    step_ = take_steps(order_, step_, order_.size(), ascending_, launch_.steps);
    if (done() && wants_h_0_) launch_.steps.run[launch_.steps.runs++] = {1, 0};
    return launch_;
  }

  void launched() {}

 private:
  std::vector<Step> order_;
  bool ascending_, wants_h_0_;
  Tensor weights_, activations_;
  LaunchArgs launch_;
  size_t step_ = 0;
};

std::optional<std::vector<BackwardTensors>> backward_steps(
    std::span<const SequenceBackwardArgs> calls, const RowPlan& plan) {
  std::vector<BackwardTensors> tensors;
  for (const SequenceBackwardArgs& args : calls) {
    const int64_t columns = args.cell->slots * args.h_0.size(1);
    tensors.push_back(
        {copy_or_zeros(args.grad_h_n, args.h_0.sizes(), compute_options(args.input)),
         copy_or_zeros(args.grad_c_n, args.h_0.sizes(), compute_options(args.input)),
         at::empty({flat_size(args.input), columns}, args.input.options())});
  }
  const SequenceBackwardArgs& args = calls.front();
  const bool launched = visit_kernel_dtype(args.input.scalar_type(), [&]<typename T>(T*) {
    std::list<BackwardCall<T>> chains;
    for (size_t k = 0; k < calls.size(); ++k) chains.emplace_back(calls[k], plan, tensors[k]);
    const Stream stream = current_stream();
    const auto launch = [&](const BackwardCalls<T>& together, int64_t groups) {
      return launch_persistent_backward(*args.cell, together, groups, plan.tiles, stream);
    };
    return run_launches(chains, plan, args.h_0.size(0), launch);
  });
  return launched ? std::optional(std::move(tensors)) : std::nullopt;
}

// The check before said that all would fit, and the GPU knows better.
const char* refused() {
  TORCH_WARN_ONCE(
      "lltm::sequence: the GPU refused a persistent kernel, for want of multiprocessors that this "
      "process may use (MPS, MIG or a green context may hold some back); going on without it");
  return "the GPU refused a launch";
}

}  // namespace

Attempt<SequenceResult> persistent_forward(
    std::span<const SequenceArgs> calls, int64_t workspace_bytes, std::optional<Tuning> tuning) {
  const SequenceArgs& args = calls.front();
  const int64_t hidden = args.h_0.size(1), padded = padded_hidden(args);
  const auto resident_blocks = [&]<typename T>(T*, int tiles) {
    return resident_forward_blocks<T>(*args.cell, padded, tiles);
  };
  const auto planned = plan_rows(
      args,
      static_cast<int64_t>(calls.size()),
      padded,
      Direction::forward,
      tuning,
      resident_blocks);
  if (const auto* why_not = std::get_if<const char*>(&planned)) return {{}, *why_not};
  const RowPlan& plan = std::get<RowPlan>(planned);

  std::optional<std::vector<SequenceResult>> results;
  if (padded == hidden) {
    results = forward_steps(calls, plan, workspace_bytes);
  } else {
    std::vector<PaddedInputs> inputs;
    for (const SequenceArgs& call : calls) inputs.emplace_back(call, padded);
    std::vector<SequenceArgs> padded_calls;
    for (size_t k = 0; k < calls.size(); ++k) {
      padded_calls.push_back({inputs[k].inputs(calls[k]), calls[k].save});
    }
    results = forward_steps(padded_calls, plan, workspace_bytes);
    if (results) {
      for (auto& [output, h_n, c_n, saved] : *results) {
        for (Tensor* const tensor : {&output, &h_n, &c_n, &saved}) {
          *tensor = with_units(*tensor, -1, padded, hidden);
        }
      }
    }
  }
  if (!results) return {{}, refused()};
  return {std::move(results), nullptr, plan.tiles, plan.groups};
}

Attempt<Gradients> persistent_backward(
    std::span<const SequenceBackwardArgs> calls, std::optional<Tuning> tuning) {
  const SequenceBackwardArgs& args = calls.front();
  const at::ScalarType dtype = args.input.scalar_type();
  const int64_t hidden = args.h_0.size(1), padded = padded_hidden(args);
  const auto resident_blocks = [&]<typename T>(T*, int tiles) {
    return resident_backward_blocks<T>(*args.cell, padded, tiles);
  };
  const auto planned = plan_rows(
      args,
      static_cast<int64_t>(calls.size()),
      padded,
      Direction::backward,
      tuning,
      resident_blocks);
  if (const auto* why_not = std::get_if<const char*>(&planned)) return {{}, *why_not};
  const RowPlan& plan = std::get<RowPlan>(planned);

  std::optional<std::vector<BackwardTensors>> tensors;
  if (padded == hidden) {
    tensors = backward_steps(calls, plan);
  } else {
    const auto pad = [&](const Tensor& tensor) { return with_units(tensor, -1, hidden, padded); };
    std::vector<PaddedInputs> inputs;
    std::vector<Tensor> saved;
    for (const SequenceBackwardArgs& call : calls) {
      inputs.emplace_back(call, padded);
      saved.push_back(pad(call.saved));
    }
    std::vector<SequenceBackwardArgs> padded_calls;
    for (size_t k = 0; k < calls.size(); ++k) {
      const SequenceBackwardArgs& call = calls[k];
      padded_calls.push_back(
          {inputs[k].inputs(call),
           call.output,
           saved[k],
           pad(call.grad_output),
           pad(call.grad_h_n),
           pad(call.grad_c_n),
           call.output_mask,
           call.segment});
    }
    tensors = backward_steps(padded_calls, plan);
    if (tensors) {
      for (auto& [dh, dc, dz] : *tensors) {
        for (Tensor* const tensor : {&dh, &dc, &dz}) {
          *tensor = with_units(*tensor, -1, padded, hidden);
        }
        dz = as_padded_operand(dz, dz.size(0), padded_cols(dz.size(1), dtype));
      }
    }
  }
  if (!tensors) return {{}, refused()};
  std::vector<Gradients> gradients;
  for (size_t k = 0; k < calls.size(); ++k) {
    const SequenceBackwardArgs& call = calls[k];
    const std::vector<Step> steps = plan_steps(call.input, call.batch_sizes, call.reverse);
    gradients.push_back(sequence_gradients(call, steps, Gemm(dtype), (*tensors)[k]));
  }
  return {std::move(gradients), nullptr, plan.tiles, plan.groups};
}

}  // namespace lltm::cuda
