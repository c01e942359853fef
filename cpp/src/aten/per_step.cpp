// Pre-activations and the gradients of states have the compute dtype: no rounding before the cell
// reads them. A step's GEMM has only the engine's matrices, with padded rows (device_gemm.h): an
// odd H may need a copy of the weights per sequence. GEMMs over many steps use the caller's input
// and output in place. After pre-activations of only x, h columns are aligned only if H is.
#include "aten/per_step.h"

#include "aten/row_gradients.h"
#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;

// The widths of rows with padding, in elements: for H, and for pre-activations or their gradients.
struct PaddedSizes {
  int64_t alignment, hidden, slots;

  // A single step uses each weight once, in place: padding would copy them.
  PaddedSizes(const DeviceGemm& gemm, int64_t blocks, int64_t units, bool once)
      : alignment(once ? 1 : gemm.alignment()),
        hidden(padded_cols(units, gemm.dtype(), alignment)),
        slots(padded_cols(blocks * units, gemm.dtype(), alignment)) {}
};

// A copy, or zeros if undefined, with rows padded by zeros to `cols` columns.
Tensor padded_copy(
    const Tensor& tensor, at::IntArrayRef sizes, int64_t cols, const at::TensorOptions& options) {
  if (cols == sizes[1]) return copy_or_zeros(tensor, sizes, options);
  const Tensor padded = at::zeros({sizes[0], cols}, options);
  if (tensor.defined()) padded.slice(1, 0, sizes[1]).copy_(tensor);
  return padded;
}

Tensor padded_empty(at::IntArrayRef sizes, bool is_padded, const at::TensorOptions& options) {
  return is_padded ? at::zeros(sizes, options) : at::empty(sizes, options);
}

// The rows of a weight matrix for consecutive slots, and their columns of z. The last slots have
// z's padding.
struct SlotGemm {
  int64_t begin, count;
  Tensor memory;
  GemmOperand weights;  // (count, K)

  SlotGemm(int64_t first, const Tensor& matrix)
      : begin(first), count(matrix.size(0)), memory(matrix), weights(operand(matrix)) {}
};

class SlotWeights {
 public:
  // `matrix` has a block of H rows per slot in `all`; `columns` is K with padding.
  SlotWeights(
      const DeviceGemm& gemm,
      const PaddedSizes& padded,
      const Tensor& matrix,
      SlotRange all,
      const int* blocks,
      int64_t hidden,
      int64_t slots,
      int64_t columns)
      : padded_(padded),
        matrix_(matrix.to(gemm.dtype())),
        all_(all),
        blocks_(blocks),
        hidden_(hidden),
        slots_(slots),
        columns_(columns) {}

  // In the order of slots and padded.
  SlotGemm in_order(SlotRange slots) const {
    if (slots.count() == 0) {
      return {0, as_padded_operand(matrix_.narrow(0, 0, 0), 0, columns_, padded_.alignment)};
    }
    if (!ordered_.defined()) ordered_ = lltm::in_order(matrix_, all_.count(), blocks_ + all_.begin);
    const Tensor rows =
        ordered_.narrow(0, (slots.begin - all_.begin) * hidden_, slots.count() * hidden_);
    const int64_t end = slots.end == slots_ ? padded_.slots : slots.end * hidden_;
    const int64_t begin = slots.begin * hidden_;
    return {begin, as_padded_operand(rows, end - begin, columns_, padded_.alignment)};
  }

  // For one step, a GEMM per run of blocks costs less than reordering.
  std::vector<SlotGemm> for_steps(SlotRange slots, bool once) const {
    if (slots.count() == 0) return {};
    if (!once) return {in_order(slots)};
    std::vector<SlotGemm> gemms;
    for_each_run(slots, blocks_, [&](int slot, int count) {
      const Tensor rows = matrix_.narrow(0, blocks_[slot] * hidden_, count * hidden_);
      gemms.emplace_back(slot * hidden_, as_operand(rows));
    });
    return gemms;
  }

 private:
  const PaddedSizes padded_;
  const Tensor matrix_;
  const SlotRange all_;
  const int* const blocks_;
  const int64_t hidden_, slots_, columns_;
  mutable Tensor ordered_;
};

struct OperandGemms {
  int operand;
  std::vector<SlotGemm> gemms;
};

// The GEMMs of each stage's products.
template <typename GemmsOf>
std::vector<std::vector<OperandGemms>> products_of(
    const CellInfo& cell, const Pass& pass, const GemmsOf& gemms_of) {
  std::vector<std::vector<OperandGemms>> stages(pass.count);
  for (int p = 0; p < cell.operands().count; ++p) {
    OperandGemms products = {p, {}};
    for (const SlotRange slots : cell.operands()[p].gates) {
      for (SlotGemm& gemm : gemms_of(slots)) products.gemms.push_back(std::move(gemm));
    }
    for (size_t s = 0; s < stages.size(); ++s) {
      if ((pass.stages[s].operands >> p & 1) != 0) stages[s].push_back(products);
    }
  }
  return stages;
}

SlotWeights recurrent_weights(
    const SequenceInputs& args, const DeviceGemm& gemm, const PaddedSizes& padded, int64_t slots) {
  const CellInfo& cell = *args.cell;
  const Tensor hh = without_heads(weights_of(args).hh);
  return {gemm, padded, hh, cell.h, cell.h_blocks, args.h_0->size(1), slots, padded.hidden};
}

// z = the part of the input, of all rows of a chunk.
class InputProjection {
 public:
  InputProjection(
      const SequenceInputs& args,
      const DeviceGemm& gemm,
      const PaddedSizes& padded,
      Tensor bias,
      bool once)
      : cell_(*args.cell),
        hidden_(args.h_0->size(1)),
        gemm_(gemm),
        bias_(std::move(bias)),
        input_(flat_rows(args.input)),
        // A GEMM over many steps needs a constant row stride: a batch-first input is copied.
        x_(as_operand(
            input_.narrow(1, 0, input_.size(1) - cell_.given * hidden_).to(gemm.dtype()))),
        gemms_(SlotWeights(
                   gemm,
                   padded,
                   weights_of(args).ih,
                   cell_.x,
                   cell_.x_blocks,
                   hidden_,
                   cell_.slots,
                   x_.size(1))
                   .for_steps(cell_.x, once)) {}

  void write(const Tensor& z, const Chunk& chunk) const {
    const GemmOperand rows = operand_rows(x_, chunk.begin, chunk.rows);
    const GemmResult to = result_rows(z, 0, chunk.rows);
    const Tensor of_chunk = z.narrow(0, 0, chunk.rows);
    if (bias_.defined()) of_chunk.copy_(bias_);
    for (const SlotGemm& of : gemms_) {
      gemm_(rows, transposed(of.weights), columns(to, of.begin, of.count), bias_.defined());
    }
    const auto clear = [&](int64_t begin, int64_t end) {
      if (begin < end && !bias_.defined()) of_chunk.slice(1, begin, end).zero_();
    };
    clear(0, cell_.x.begin * hidden_);
    if (cell_.x.end < cell_.slots) clear(cell_.x.end * hidden_, z.size(1));
    for_each_given(cell_, hidden_, input_.size(1), [&](int slot, int64_t column) {
      of_chunk.narrow(1, slot * hidden_, hidden_)
          .add_(input_.narrow(0, chunk.begin, chunk.rows).narrow(1, column, hidden_));
    });
  }

 private:
  const CellInfo& cell_;
  const int64_t hidden_;
  const DeviceGemm& gemm_;
  const Tensor bias_, input_, x_;
  const std::vector<SlotGemm> gemms_;
};

}  // namespace

SequenceResult per_step_forward(
    const SequenceArgs& args, const StepDevice<ForwardStep>& device, int64_t workspace_bytes) {
  const CellInfo& cell = *args.cell;
  const DeviceGemm& gemm = device.gemm();
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const auto options = args.input->options();
  const auto wide = compute_options(args.input), of_operands = options.dtype(gemm.dtype());
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const bool once = steps.size() <= 1;
  const PaddedSizes padded(gemm, cell.slots, hidden, once);
  const int64_t row_bytes =
      padded.slots *
      static_cast<int64_t>(c10::elementSize(compute_dtype(args.input->scalar_type())));
  const std::vector<Chunk> chunks =
      plan_chunks(steps, workspace_bytes / std::max<int64_t>(row_bytes, 1));

  const ForwardResults results(args, steps.size());
  const Tensor output = results.output_h();
  const Tensor z = at::empty({most_rows(chunks), padded.slots}, wide);
  // If not in place, updated in each step.
  const bool in_place = is_in_place(args);
  const Tensor h = in_place ? as_operand(args.h_0->to(gemm.dtype()))
                            : padded_copy(args.h_0, args.h_0->sizes(), padded.hidden, of_operands);
  const Tensor c = in_place ? at::empty({batch, cell.state_columns() * hidden}, options)
                            : copy_or_zeros(args.c_0, args.c_0->sizes(), options);
  const Tensor& c_before = in_place ? *args.c_0 : c;
  const Tensor operands = padded_empty(
      {batch, cell.operands().count * padded.hidden}, padded.hidden != hidden, of_operands);

  const InputProjection input(args, gemm, padded, device.bias(), once);
  const SlotWeights weights_h = recurrent_weights(args, gemm, padded, cell.slots);
  const auto gemms_of = [&](SlotRange slots) { return weights_h.for_steps(slots, once); };
  const std::vector<SlotGemm> recurrent = gemms_of(cell.direct);
  const auto products = products_of(cell, cell.forward(), gemms_of);
  const auto add = [&](const GemmOperand& a, const std::vector<SlotGemm>& gemms, GemmResult to) {
    for (const SlotGemm& of : gemms) {
      gemm(a, transposed(of.weights), columns(to, of.begin, of.count), /*accumulate=*/true);
    }
  };

  for (const Chunk& chunk : chunks) {
    input.write(z, chunk);
    for (size_t k = chunk.first; k < chunk.last; ++k) {
      const auto [offset, rows] = steps[k];
      const int64_t row = offset - chunk.begin;
      const GemmResult step_z = result_rows(z, row, rows);
      if (!in_place) {
        results.save_checkpoint(k, c);
        StepIO(args, steps[k]).enter_in_place(h, c);
      }
      add(operand_rows(h, 0, rows), recurrent, step_z);
      const ForwardStep step = {
          rows,
          view(z, row),
          read_view(c_before),
          view(c),
          view(output, offset),
          in_place ? View() : view(h),
          view(results.activations, offset),
          view(operands),
          padded.hidden};
      for (int s = 0; s < static_cast<int>(products.size()); ++s) {
        device.run(s, step);
        for (const auto& [p, gemms] : products[s]) {
          add(columns(operand_rows(operands, 0, rows), p * padded.hidden, padded.hidden),
              gemms,
              step_z);
        }
        device.average(s, rows);
      }
      if (!in_place) results.leave_states(steps[k], c);
    }
  }
  if (in_place) return {Tensor(), output.contiguous(), c, results.saved()};
  const at::ScalarType dtype = args.input->scalar_type();
  return {results.output, unpadded(h, hidden).to(dtype), c, results.saved()};
}

Gradients per_step_backward(
    const SequenceBackwardArgs& args, const StepDevice<BackwardStep>& device) {
  const CellInfo& cell = *args.cell;
  const DeviceGemm& gemm = device.gemm();
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const int64_t blocks = cell.grad_columns(), states = cell.state_columns() * hidden;
  const auto wide = compute_options(args.input), of_operands = wide.dtype(gemm.dtype());
  const std::vector<Step> steps = plan_steps(args.input, args.batch_sizes, args.reverse);
  const bool in_place = is_in_place(args);
  const bool want_h_0 = args.output_mask[1];
  const PaddedSizes padded(gemm, blocks, hidden, steps.size() <= 1);
  const Tensor dz = padded_empty(
      {flat_size(args.input), padded.slots}, padded.slots != blocks * hidden, of_operands);
  const auto gradient = [&](const Tensor& of_state, int64_t size, int64_t padded_size) {
    return in_place ? at::empty({batch, size}, of_operands)
                    : padded_copy(of_state, {batch, size}, padded_size, wide);
  };
  const Tensor dh = gradient(args.grad_h_n, hidden, padded.hidden);
  const Tensor dc = gradient(args.grad_c_n, states, states);
  const Tensor grad_c = !in_place                 ? dc
                        : args.grad_c_n.defined() ? args.grad_c_n->to(gemm.dtype())
                                                  : Tensor();
  const Tensor grad_operands = at::zeros({batch, cell.operands().count * padded.hidden}, wide);
  const Tensor grad_states =
      args.grad_states.defined() ? flat_rows(args.grad_states) : args.grad_states;

  const SlotWeights weights_h = recurrent_weights(args, gemm, padded, blocks);
  const SlotGemm recurrent = weights_h.in_order(cell.direct);
  const auto products = products_of(cell, cell.backward(), [&](SlotRange slots) {
    return slots.count() == 0 ? std::vector<SlotGemm>() : std::vector{weights_h.in_order(slots)};
  });
  const auto multiply = [&](int64_t row, const SlotGemm& of, GemmResult to, bool accumulate) {
    const GemmOperand rows = operand_rows(dz, row, to.rows);
    gemm(columns(rows, of.begin, of.count), of.weights, to, accumulate);
  };

  for (size_t k = steps.size(); k-- > 0;) {
    const auto [offset, rows] = steps[k];
    const BackwardStep step = {
        rows,
        read_view(args.saved, offset),
        in_place ? read_view(args.grad_h_n) : steps_view(args.grad_output).of(offset),
        in_place ? View() : view(dh),
        read_view(grad_c),
        view(dc),
        view(dz, offset),
        view(grad_operands),
        padded.hidden};
    if (grad_states.defined()) {
      leave_states_backward(cell, grad_states.narrow(0, offset, rows), dc);
    }
    for (int s = 0; s < static_cast<int>(products.size()); ++s) {
      device.run(s, step);
      for (const auto& [p, gemms] : products[s]) {
        const GemmResult all = result_rows(grad_operands, 0, rows);
        const GemmResult to = columns(all, p * padded.hidden, padded.hidden);
        for (const SlotGemm& of : gemms) multiply(offset, of, to, &of != &gemms.front());
      }
      device.average(s, rows);
    }
    if (k > 0 || want_h_0) {
      multiply(offset, recurrent, result_rows(dh, 0, rows), /*accumulate=*/false);
    }
    if (!in_place) StepIO(args, steps[k]).enter_backward_in_place(dh, dc);
  }
  return row_gradients(args, steps, gemm, {dh, dc, dz});
}

}  // namespace lltm
