// The per-step engine. Pre-activations and state gradients have the compute dtype: no rounding
// before the cell reads them.
//
// A step's GEMM has only the engine's matrices, with rows padded to multiples of 16 bytes (gemm.h).
// An odd H needs a copy of the weights per sequence: the element-wise kernel writes h to the padded
// state. GEMMs over many steps use the caller's input and output in place. After pre-activations of
// only x, h columns are aligned to 16 bytes only if H is.
#include "common/step_io.h"
#include "common/steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/sequence_gradients.h"
#include "cuda/gemm/gemm.h"
#include "cuda/kernel/elementwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>

namespace lltm::cuda {
namespace {

using at::Tensor;

// For H, and for pre-activations or their gradients.
struct PaddedSizes {
  int64_t hidden, gates;

  PaddedSizes(int64_t blocks, int64_t hidden, at::ScalarType dtype)
      : hidden(padded_cols(hidden, dtype)), gates(padded_cols(blocks * hidden, dtype)) {}
};

// A copy, or zeros if undefined, with rows padded by zeros to `cols` columns.
Tensor padded_state(
    const Tensor& tensor, at::IntArrayRef sizes, int64_t cols, const at::TensorOptions& options) {
  if (cols == sizes[1]) return copy_or_zeros(tensor, sizes, options);
  const Tensor padded = at::zeros({sizes[0], cols}, options);
  if (tensor.defined()) padded.slice(1, 0, sizes[1]).copy_(tensor);
  return padded;
}

// States (B, H) are updated in place.
struct ForwardTensors : ForwardResults {
  Tensor c;
  Tensor h;      // padded
  Tensor gates;  // for one chunk, padded
};

ForwardTensors allocate(
    const SequenceArgs& args,
    const PaddedSizes& padded,
    const std::vector<Step>& steps,
    const std::vector<Chunk>& chunks) {
  const auto options = args.input->options();
  return {
      ForwardResults(args, steps.size()),
      copy_or_zeros(args.c_0, args.c_0->sizes(), options),
      padded_state(args.h_0, args.h_0->sizes(), padded.hidden, options),
      at::empty({most_rows(chunks), padded.gates}, compute_options(args.input))};
}

template <typename T>
void run_forward(
    const SequenceArgs& args,
    const PaddedSizes& padded,
    const std::vector<Step>& steps,
    const std::vector<Chunk>& chunks,
    const ForwardTensors& t) {
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1);
  // A GEMM over many steps needs a constant row stride: a batch-first input is copied.
  const Tensor x = as_operand(flat_rows(args.input));
  const Tensor gates_x = slot_columns(t.gates, cell, cell.x, hidden);
  const Tensor gates_h = slot_columns(t.gates, cell, cell.h, hidden);
  const Tensor gates_h_alone = t.gates.slice(1, gates_x.size(1));
  const Weights weights = weights_of(args);
  const Tensor weights_h =
      as_padded_operand(h_slots(weights.hh, cell), gates_h.size(1), padded.hidden);
  const Tensor weights_x =
      as_padded_operand(x_slots(weights.ih, cell), gates_x.size(1), args.input->size(-1));
  const GemmOperand weights_h_t = transposed(operand(weights_h));
  const GemmOperand weights_x_t = transposed(operand(weights_x));
  const auto gates = read<compute_t<T>>(t.gates);
  const auto output = write<T>(t.output_h());
  const auto activations = write<T>(t.activations);
  const Gemm gemm(args.input->scalar_type());
  const Stream stream = current_stream();

  ForwardArgs<T> step;
  step.hidden = hidden;
  step.bias_ih = read_row<T>(args.bias_ih);
  step.bias_hh = read_row<T>(args.bias_hh);
  step.parameters = step.bias_ih.from(0, cell.x.count() * hidden);
  step.c = read<T>(t.c);
  step.c_next = write<T>(t.c);
  step.h_operand = write<T>(t.h);
  for (const Chunk& chunk : chunks) {
    const GemmOperand chunk_x = operand_rows(x, chunk.begin, chunk.rows);
    gemm(chunk_x, weights_x_t, result_rows(gates_x, 0, chunk.rows), /*accumulate=*/false);
    zero(result_rows(gates_h_alone, 0, chunk.rows));
    for (size_t k = chunk.first; k < chunk.last; ++k) {
      const auto [offset, rows] = steps[k];
      t.save_checkpoint(k, t.c);
      StepIO(args, steps[k]).enter_in_place(t.h, t.c);
      const GemmOperand step_h = operand_rows(t.h, 0, rows);
      const GemmResult step_gates = result_rows(gates_h, offset - chunk.begin, rows);
      gemm(step_h, weights_h_t, step_gates, /*accumulate=*/true);
      step.rows = rows;
      step.gates = gates.from(offset - chunk.begin);
      step.h_next = output.from(offset);
      step.activations = activations.from(offset);
      launch_forward(cell, step, stream);
    }
  }
}

template <typename T>
void run_backward(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const BackwardTensors& t,
    const Gemm& gemm) {
  using C = compute_t<T>;
  const CellInfo& cell = *args.cell;
  const int64_t hidden = args.h_0->size(1);
  const bool want_h_0 = args.output_mask[1];
  const Tensor dz_h = slot_columns(t.dz, cell, cell.h, hidden);
  const Tensor weights_h =
      as_padded_operand(h_slots(weights_of(args).hh, cell), dz_h.size(1), t.dh.size(1));
  const GemmOperand weights_h_operand = operand(weights_h);
  const auto activations = read<T>(args.saved);
  const StepRows<T> grad_output(args.grad_output);
  const auto dz = write<T>(t.dz);
  const Stream stream = current_stream();

  BackwardArgs<T, C> step;
  step.hidden = hidden;
  step.parameters = read_row<T>(args.bias_ih).from(0, cell.x.count() * hidden);
  step.grad_h_state = read<C>(t.dh);
  step.grad_c = read<C>(t.dc);
  step.grad_c_prev = write<C>(t.dc);
  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    step.rows = rows;
    step.activations = activations.from(offset);
    step.grad_h = grad_output.of(offset);
    step.grad_gates = dz.from(offset);
    launch_backward(cell, step, stream);
    if (k > 0 || want_h_0) {
      const GemmOperand step_dz = operand_rows(dz_h, offset, rows);
      gemm(step_dz, weights_h_operand, result_rows(t.dh, 0, rows), /*accumulate=*/false);
    }
    StepIO(args, steps[k]).enter_backward_in_place(t.dh, t.dc);
  }
}

}  // namespace

SequenceResult per_step_forward(const SequenceArgs& args, int64_t workspace_bytes) {
  const at::ScalarType dtype = args.input->scalar_type();
  const int64_t hidden = args.h_0->size(1);
  const PaddedSizes padded(args.cell->slots, hidden, dtype);
  const int64_t row_bytes =
      padded.gates * static_cast<int64_t>(c10::elementSize(compute_dtype(dtype)));
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const std::vector<Chunk> chunks =
      plan_chunks(steps, workspace_bytes / std::max<int64_t>(row_bytes, 1));
  const ForwardTensors t = allocate(args, padded, steps, chunks);
  visit_dtype<c10::Half, c10::BFloat16>(
      dtype, [&]<typename T>(T*) { run_forward<T>(args, padded, steps, chunks, t); });
  return {t.output, unpadded(t.h, hidden), t.c, t.saved()};
}

Gradients per_step_backward(const SequenceBackwardArgs& args) {
  const at::ScalarType dtype = args.input->scalar_type();
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const int64_t hidden = args.h_0->size(1), columns = args.cell->grad_columns();
  const PaddedSizes padded(columns, hidden, dtype);
  const bool is_padded = padded.gates != columns * hidden;
  const std::array<int64_t, 2> dz_sizes = {flat_size(args.input), padded.gates};
  const auto options = args.input->options();
  const BackwardTensors t = {
      padded_state(args.grad_h_n, args.h_0->sizes(), padded.hidden, compute_options(args.input)),
      copy_or_zeros(
          args.grad_c_n,
          {args.h_0->size(0), args.cell->state_columns() * hidden},
          compute_options(args.input)),
      is_padded ? at::zeros(dz_sizes, options) : at::empty(dz_sizes, options)};
  // In an autograd thread, the first kernel creates the CUDA context. Without a context, PyTorch
  // warns when it creates the handle.
  const Gemm gemm(dtype);
  visit_dtype<c10::Half, c10::BFloat16>(
      dtype, [&]<typename T>(T*) { run_backward<T>(args, steps, t, gemm); });
  return sequence_gradients(args, steps, gemm, t);
}

}  // namespace lltm::cuda
