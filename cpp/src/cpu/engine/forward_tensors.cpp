// The forward engines on tensors: a ForwardCall of the arguments, whose results are allocated here.
#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "cpu/bias.h"
#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/forward_call.h"
#include "cpu/gemm/gemm.h"
#include "cpu/prepack.h"

#include <optional>
#include <utility>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

struct Needs {
  GemmFormat format = GemmFormat::kF32;
  bool contiguous_input = false, weights_in_place = false;
  // The caller discards the c of a cell without c (backend_call.h), unless int8 falls back.
  bool c_n = true;
};

// Keeps all that `call` refers to, except `args`.
class ForwardTensors {
 public:
  ForwardTensors(const SequenceArgs& args, const Needs& needs)
      : ForwardTensors(args, plan_steps(args.input, args.batch_sizes, args.reverse), needs) {}
  ForwardTensors(const SequenceArgs& args, std::vector<Step> steps, const Needs& needs)
      : dtype_(needs.format == GemmFormat::kBf16 ? at::kBFloat16 : at::kFloat),
        results_(args, steps.size()),
        input_(needs.contiguous_input ? args.input->contiguous() : as_source(args.input)),
        h_0_(as_source(masked_h(args.h_0, args.recurrent_mask))),
        bias_(slot_bias(args, results_.hidden)),
        parameters_(cell_parameters(*args.cell, args.bias_ih)),
        reset_(args.reset.defined() ? args.reset->contiguous() : Tensor()),
        h_n_(new_tensor(args.h_0->sizes(), results_.options)) {
    if (needs.c_n) c_n_ = new_tensor(args.c_0->sizes(), results_.options);
    if (!args.prepacked()) {
      const auto packed_dtype = needs.weights_in_place ? std::nullopt : std::optional(dtype_);
      weights_.emplace(*args.cell, args.weight_ih, args.weight_hh, packed_dtype);
    }
    call_.emplace(
        ForwardCall{
            .cell = *args.cell,
            .batch = args.h_0->size(0),
            .input_size = input_.size(-1),
            .hidden = results_.hidden,
            .steps = std::move(steps),
            .reverse = args.reverse,
            .storage = storage_of(args.input->scalar_type()),
            .input = steps_view(input_),
            .input_is_contiguous = input_.is_contiguous(),
            .h_0 = read_view(h_0_),
            .given = args.cell->given > 0 ? steps_view(args.input) : StepsView(),
            .c_0 = read_view(args.c_0),
            .recurrent_mask = read_view(args.recurrent_mask),
            .reset = data_or_null<bool>(reset_),
            .bias = data_or_null<float>(bias_),
            .parameters = data_or_null<float>(parameters_),
            .packed = args.prepacked() ? bytes_of(args.weight_ih) : PackedBytes(),
            .weights = weights_ ? weights_->views : WeightViews(),
            .output = results_.output.mutable_data_ptr(),
            .h_n = h_n_.mutable_data_ptr(),
            .c_n = c_n_.defined() ? c_n_.mutable_data_ptr() : nullptr,
            .activations =
                args.saves_activations() ? results_.activations.mutable_data_ptr() : nullptr,
            .checkpoints = results_.every > 0 ? results_.checkpoints.mutable_data_ptr() : nullptr,
            .checkpoint_steps = results_.every});
  }

  const ForwardCall& call() const { return *call_; }
  SequenceResult result() const { return {results_.output, h_n_, c_n_, results_.saved()}; }

 private:
  Tensor as_source(const Tensor& tensor) const {
    const Tensor source = converted(tensor, dtype_);
    return source.strides().back() == 1 ? source : source.contiguous();
  }

  const at::ScalarType dtype_;  // from which the format packs operands
  const ForwardResults results_;
  const Tensor input_, h_0_, bias_, parameters_, reset_, h_n_;
  Tensor c_n_;
  std::optional<WeightTensors> weights_;
  std::optional<ForwardCall> call_;
};

bool wants_c_n(const SequenceArgs& args) {
  return args.cell->has_c() || !args.prepacked();
}

}  // namespace

SequenceResult small_batch_forward(const SequenceArgs& args, const SmallBatchSchedule& schedule) {
  const ForwardTensors tensors(
      args, {.weights_in_place = schedule.in_place, .c_n = wants_c_n(args)});
  run_small_batch(tensors.call(), schedule);
  return tensors.result();
}

SequenceResult small_layer_forward(const SequenceArgs& args) {
  const ForwardTensors tensors(args, {}, {.contiguous_input = true, .c_n = wants_c_n(args)});
  run_small_layer(tensors.call(), args.is_step() ? 1 : args.input->size(0));
  return tensors.result();
}

std::optional<SequenceResult> blocked_forward(
    const SequenceArgs& args, const ForwardSchedule& schedule) {
  const ForwardTensors tensors(args, {.format = schedule.format});
  if (!run_blocked(tensors.call(), schedule)) return {};
  return tensors.result();
}

Int8Result blocked_int8_forward(const SequenceArgs& args, const ForwardSchedule& schedule) {
  const ForwardTensors tensors(args, {.format = GemmFormat::kInt8});
  std::vector<int64_t> out_of_range = run_blocked_int8(tensors.call(), schedule);
  return {tensors.result(), std::move(out_of_range)};
}

}  // namespace lltm::cpu
