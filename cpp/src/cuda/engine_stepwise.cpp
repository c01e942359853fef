// A sequence by a product and a pointwise kernel per step; what does not depend
// on the state, the input's part of the pre-activations and the gradients of
// weights and input, by products over many steps at once.
//
// Pre-activations and the gradients of the state are of the compute dtype, as on
// the CPU: 16-bit products add up to float32, which is kept until it has passed
// through the cell.
#include "cuda/dispatch.h"
#include "cuda/engine.h"
#include "cuda/pointwise.h"
#include "cuda/products.h"
#include "steps.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace lltm::cuda {
namespace {

using at::Tensor;

// `count` rows of the gates' gradients from `row` on, and the rows of the state
// that they began with: of the output from `source` on, or of h_0.
struct Span {
  int64_t row, source, count;
  bool initial;
};

// Spans that cover all rows of all steps. Steps of equal size make one span.
std::vector<Span> states_before(const std::vector<Step>& steps) {
  std::vector<Span> spans;
  const auto append = [&](const Span& span) {
    if (span.count == 0) return;
    if (!spans.empty() && spans.back().initial == span.initial) {
      Span& last = spans.back();
      const bool after =
          span.row == last.row + last.count && span.source == last.source + last.count;
      const bool before =
          last.row == span.row + span.count && last.source == span.source + span.count;
      if (before) last = {span.row, span.source, last.count, last.initial};
      if (before || after) {
        last.count += span.count;
        return;
      }
    }
    spans.push_back(span);
  };
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    const int64_t carried = carried_rows(steps, k);
    if (carried > 0) append({offset, steps[k - 1].offset, carried, /*initial=*/false});
    append({offset + carried, carried, rows - carried, /*initial=*/true});
  }
  return spans;
}

// Rows of (T, B, .), or packed ones (N, .), as the steps read them: with any
// strides, where flat rows of a (T, B, .) that lies batch first would be a copy.
// Absent where undefined.
template <typename T>
struct StepRows {
  Matrix<const T> first;
  int64_t batch = 1;  // the rows of a step, all its own; packed rows are steps of one
  int64_t step_stride = 0;

  explicit StepRows(const Tensor& tensor) {
    if (!tensor.defined()) return;
    const int64_t rows = tensor.dim() - 2;
    first = {tensor.const_data_ptr<T>(), tensor.stride(rows), tensor.stride(rows + 1)};
    step_stride = tensor.stride(0);
    if (tensor.dim() == 3) batch = std::max<int64_t>(tensor.size(1), 1);
  }

  // Those of the step whose first row is `offset`, as plan_steps counts.
  Matrix<const T> from(int64_t offset) const {
    if (first.data == nullptr) return {};
    return {first.data + offset / batch * step_stride, first.row_stride, first.col_stride};
  }
};

// A copy of the state, contiguous and of the given dtype; zero where undefined.
Tensor state(const Tensor& tensor, at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensor.defined() ? at::empty(sizes, options).copy_(tensor) : at::zeros(sizes, options);
}

}  // namespace

ForwardResult stepwise_forward(const ForwardProblem& p, int64_t workspace_bytes) {
  const int64_t hidden = p.h_0.size(1);
  const at::ScalarType dtype = p.input.scalar_type();
  const auto options = p.input.options();
  const auto compute_options = options.dtype(compute_dtype(dtype));
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);
  const int64_t row_bytes =
      std::max<int64_t>(3 * hidden * c10::elementSize(compute_dtype(dtype)), 1);
  const std::vector<Chunk> chunks = plan_chunks(steps, workspace_bytes / row_bytes);
  int64_t most_rows = 0;
  for (const Chunk& chunk : chunks) most_rows = std::max(most_rows, chunk.rows);

  // A product over many steps needs one stride for all of its rows: an input that
  // lies batch first is copied.
  const Tensor x = as_operand(flat_rows(p.input));
  const Tensor weights_h = as_operand(p.weights.slice(1, 0, hidden));
  const Tensor weights_x = as_operand(p.weights.slice(1, hidden));
  std::vector<int64_t> output_shape = p.input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = at::empty(output_shape, options);
  const Tensor output_rows = flat_rows(output);
  const Tensor activations = p.save ? at::empty({x.size(0), 4 * hidden}, options) : Tensor();
  const Tensor gates = at::empty({most_rows, 3 * hidden}, compute_options);
  // The state, each step renewing its own rows, and at last the results.
  const Tensor h = state(p.h_0, p.h_0.sizes(), options);
  const Tensor c = state(p.c_0, p.h_0.sizes(), options);

  const Products products(dtype);
  const Stream stream = current_stream();
  const Operand weights_h_t = transposed(operand(weights_h));
  const Operand weights_x_t = transposed(operand(weights_x));
  visit_dtype(dtype, [&]<typename T>(T*) {
    const auto chunk_gates = read<compute_t<T>>(gates);
    const auto all_output = write<T>(output_rows);
    const auto all_activations = write<T>(activations);
    ForwardArgs<T> args;
    args.hidden = hidden;
    args.bias = read_row<T>(p.bias.value_or(Tensor()));
    args.c = read<T>(c);
    args.c_next = write<T>(c);
    args.h_state = write<T>(h);
    for (const Chunk& chunk : chunks) {
      products.multiply(
          rows_of(x, chunk.begin, chunk.rows),
          weights_x_t,
          result_rows(gates, 0, chunk.rows),
          /*accumulate=*/false);
      for (size_t k = chunk.first; k < chunk.last; ++k) {
        const auto [offset, rows] = steps[k];
        products.multiply(
            rows_of(h, 0, rows),
            weights_h_t,
            result_rows(gates, offset - chunk.begin, rows),
            /*accumulate=*/true);
        args.rows = rows;
        args.gates = chunk_gates.from(offset - chunk.begin);
        args.h_next = all_output.from(offset);
        args.activations = all_activations.from(offset);
        launch_forward(args, stream);
      }
    }
  });
  return {output, h, c, activations};
}

Gradients stepwise_backward(const BackwardProblem& p) {
  const int64_t hidden = p.h_0.size(1);
  const at::ScalarType dtype = p.input.scalar_type();
  const auto options = p.input.options();
  const auto compute_options = options.dtype(compute_dtype(dtype));
  const auto [want_input, want_h_0, want_c_0, want_weights, want_bias] = p.wanted;
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);
  const Tensor weights_h = as_operand(p.weights.slice(1, 0, hidden));

  // Gradients of the state; a row's are final once its first step is done.
  const Tensor dh = state(p.grad_h_n, p.h_0.sizes(), compute_options);
  const Tensor dc = state(p.grad_c_n, p.h_0.sizes(), compute_options);
  // Of the dtype of the products' operands. The activations are the caller's, who
  // may want them again, so nothing is written over them.
  const Tensor dz = at::empty({p.activations.size(0), 3 * hidden}, options);

  const Products products(dtype);
  const Stream stream = current_stream();
  const Operand weights_h_operand = operand(weights_h);
  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    const auto all_activations = read<T>(p.activations);
    const StepRows<T> all_grad_h(p.grad_output);
    const auto all_grad_gates = write<T>(dz);
    BackwardArgs<T, C> args;
    args.hidden = hidden;
    args.grad_h_state = read<C>(dh);
    args.grad_c = read<C>(dc);
    args.grad_c_prev = write<C>(dc);
    for (size_t k = steps.size(); k-- > 0;) {
      const auto [offset, rows] = steps[k];
      args.rows = rows;
      args.activations = all_activations.from(offset);
      args.grad_h = all_grad_h.from(offset);
      args.grad_gates = all_grad_gates.from(offset);
      launch_backward(args, stream);
      // Overwrites the gradients that were just used.
      if (k > 0 || want_h_0) {
        products.multiply(
            rows_of(dz, offset, rows),
            weights_h_operand,
            result_rows(dh, 0, rows),
            /*accumulate=*/false);
      }
    }
  });

  Tensor d_input, d_weights;
  const Tensor x = want_weights ? as_operand(flat_rows(p.input)) : Tensor();
  if (want_input) {
    const Tensor weights_x = as_operand(p.weights.slice(1, hidden));
    d_input = at::empty(p.input.sizes(), options);
    products.multiply(
        operand(dz), operand(weights_x), result(flat_rows(d_input)), /*accumulate=*/false);
  }
  if (want_weights) {
    const Tensor output_rows = as_operand(flat_rows(p.output));
    const Tensor initial_rows = as_operand(p.h_0);
    const Tensor sums = at::empty(p.weights.sizes(), compute_options);
    const Result weights_h_sums = result(sums.slice(1, 0, hidden));
    const std::vector<Span> spans = states_before(steps);
    if (spans.empty()) sums.zero_();
    bool accumulate = false;
    for (const auto [row, source, count, initial] : spans) {
      products.multiply(
          transposed(rows_of(dz, row, count)),
          rows_of(initial ? initial_rows : output_rows, source, count),
          weights_h_sums,
          accumulate);
      accumulate = true;
    }
    products.multiply(
        transposed(operand(dz)),
        operand(x),
        result(sums.slice(1, hidden)),
        /*accumulate=*/false);
    d_weights = sums.to(dtype);
  }
  return {
      d_input,
      want_h_0 ? dh.to(dtype) : Tensor(),
      want_c_0 ? dc.to(dtype) : Tensor(),
      d_weights,
      // ATen's sum adds in a fixed order, in float32.
      want_bias ? dz.sum(0) : Tensor()};
}

}  // namespace lltm::cuda
