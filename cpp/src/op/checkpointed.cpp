#include "op/checkpointed.h"

#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;

// Arguments of each segment, as a separate sequence.
class Segments {
 public:
  explicit Segments(const SequenceBackwardArgs& args)
      : args_(args),
        steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        chunks_(plan_chunks(
            steps_,
            std::numeric_limits<int64_t>::max(),
            static_cast<size_t>(args.checkpoint_steps))),
        output_rows_(flat_rows(args.output)) {}

  size_t count() const { return chunks_.size(); }

  // State rows that segment s updates: the rows of its largest step, the first or, in reverse,
  // where sequences join, the last.
  int64_t batch(size_t s) const {
    return std::max(steps_[chunks_[s].first].rows, steps_[chunks_[s].last - 1].rows);
  }

  // The segment's part of the input, the output, its gradient, or reset.
  Tensor rows(const Tensor& tensor, size_t s) const {
    if (args_.is_step()) return tensor;
    if (args_.batch_sizes.defined()) return tensor.narrow(0, chunks_[s].begin, chunks_[s].rows);
    return tensor.narrow(0, first_time(s), length(s));
  }

  // Without gradients of the states, and saved values.
  SequenceBackwardArgs arguments(size_t s) const {
    SequenceBackwardArgs part = args_;
    part.checkpoint_steps = 0;
    part.h_0 = h(s);
    part.c_0 = args_.saved->select(0, static_cast<int64_t>(s)).narrow(0, 0, batch(s));
    part.batch_sizes = batch_sizes(s);
    const auto select = [&](auto& argument) {
      if (argument.defined()) argument = rows(argument, s);
    };
    select(part.input);
    select(part.output);
    select(part.grad_output);
    select(part.grad_states);
    select(part.reset);
    if (part.recurrent_mask.defined()) {
      part.recurrent_mask = args_.recurrent_mask->narrow(0, 0, batch(s));
    }
    return part;
  }

 private:
  Tensor batch_sizes(size_t s) const {
    const Tensor& sizes = args_.batch_sizes;
    return sizes.defined() ? sizes.narrow(0, first_time(s), length(s)) : sizes;
  }

  // h before the segment: the previous step's output, and h_0 for sequences that join.
  Tensor h(size_t s) const {
    const size_t first = chunks_[s].first;
    const int64_t carried = std::min(carried_rows(steps_, first), batch(s));
    const Tensor joining = args_.h_0->narrow(0, carried, batch(s) - carried);
    if (carried == 0) return joining;
    const Tensor last = output_rows_.narrow(0, steps_[first - 1].offset, carried);
    return carried == batch(s) ? last : at::cat({last, joining});
  }

  int64_t length(size_t s) const {
    return static_cast<int64_t>(chunks_[s].last - chunks_[s].first);
  }
  int64_t first_time(size_t s) const {
    return static_cast<int64_t>(args_.reverse ? steps_.size() - chunks_[s].last : chunks_[s].first);
  }

  const SequenceBackwardArgs& args_;
  const std::vector<Step> steps_;
  const std::vector<Chunk> chunks_;
  const Tensor output_rows_;
};

// Summed over segments in the compute dtype.
class ParameterGradients {
 public:
  explicit ParameterGradients(const SequenceBackwardArgs& args) {
    const Tensor* const parameters[] = {
        &*args.weight_ih, &*args.weight_hh, &*args.bias_ih, &*args.bias_hh};
    for (size_t k = 0; k < sums_.size(); ++k) {
      if (!args.output_mask[3 + k]) continue;
      sums_[k] = at::zeros(parameters[k]->sizes(), compute_options(args.input));
    }
  }

  void add(const std::array<Tensor, 4>& of_segment) {
    for (size_t k = 0; k < sums_.size(); ++k) {
      if (sums_[k].defined()) sums_[k].add_(of_segment[k]);
    }
  }

  const Tensor& operator[](size_t k) const { return sums_[k]; }

 private:
  std::array<Tensor, 4> sums_;
};

}  // namespace

Gradients checkpointed_backward(
    const SequenceBackwardArgs& args,
    SequenceResult (*forward)(const SequenceArgs&),
    Gradients (*backward)(const SequenceBackwardArgs&)) {
  const auto wide = compute_options(args.input);
  const OutputMask& mask = args.output_mask;
  const Segments segments(args);

  // Gradients of the state before the completed segments. A row is final after the segment with its
  // first step.
  const Tensor dh = copy_or_zeros(args.grad_h_n, args.h_0->sizes(), wide);
  const Tensor dc = copy_or_zeros(args.grad_c_n, args.saved->sizes().slice(1), wide);
  const Tensor d_input = mask[0] ? at::empty(args.input->sizes(), args.input->options()) : Tensor();
  ParameterGradients parameters(args);

  for (size_t s = segments.count(); s-- > 0;) {
    const int64_t batch = segments.batch(s);
    const Tensor segment_dh = dh.narrow(0, 0, batch);
    const Tensor segment_dc = dc.narrow(0, 0, batch);
    SequenceBackwardArgs of_segment = segments.arguments(s);
    of_segment.saved = std::get<3>(forward({of_segment, /*save=*/true}));
    of_segment.grad_h_n = segment_dh;
    of_segment.grad_c_n = segment_dc;
    of_segment.output_mask[1] |= s > 0;
    of_segment.output_mask[2] |= s > 0;
    const auto [dx, next_dh, next_dc, d_ih, d_hh, d_bias_ih, d_bias_hh] = backward(of_segment);
    if (next_dh.defined()) segment_dh.copy_(next_dh);
    if (next_dc.defined()) segment_dc.copy_(next_dc);
    if (mask[0]) segments.rows(d_input, s).copy_(dx);
    parameters.add({d_ih, d_hh, d_bias_ih, d_bias_hh});
  }
  return {
      d_input,
      mask[1] ? dh : Tensor(),
      mask[2] ? dc : Tensor(),
      parameters[0],
      parameters[1],
      parameters[2],
      parameters[3]};
}

}  // namespace lltm
