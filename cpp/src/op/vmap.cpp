// torch.vmap. If it maps only inputs and states, V samples become a single call with batch size V *
// B. If it maps weights or biases (ensembles), each sample needs separate GEMMs: a sequence runs
// the fused kernels per sample, several times as fast as the ATen fallback. A single step, or a
// sequence that another transform differentiates, runs the fallback once for all samples.
//
// vmap rules run before autocast and autograd, which handle the resulting call.
#include "aten/fallback.h"
#include "common/backend_call.h"
#include "op/argument_checks.h"
#include "op/autocast.h"
#include "op/check.h"
#include "op/operators.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <vector>

// Unwrapping requires internal headers. Without them, PyTorch loops over samples.
#if __has_include(<ATen/functorch/PlumbingHelper.h>)
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

class Samples {
 public:
  // kOuter is (..., V, B, .). Packed sequences need kInner, (..., B, V, .): a step's rows are the
  // state's first rows.
  enum class Order { kOuter, kInner };

  explicit Samples(Order order = Order::kOuter) : dim_(order == Order::kOuter ? -3 : -2) {
    const auto layer = at::functorch::maybeCurrentDynamicLayer();
    TORCH_CHECK(layer.has_value(), "lltm: a tensor of torch.vmap was used outside of vmap");
    level_ = layer->layerId();
    count_ = layer->batchSize();
  }

  const SymInt& count() const { return count_; }

  bool in(const Tensor& tensor) const { return std::get<1>(unwrap(tensor)).has_value(); }

  // (..., B, .) to (..., V * B, .).
  Tensor fold(const Tensor& tensor) const {
    if (!tensor.defined()) return tensor;  // the cell has no c
    const auto [value, dim] = unwrap(tensor);
    return fold(value, dim);
  }
  Tensor fold_mask(const Tensor& mask) const {
    if (!mask.defined()) return mask;
    const auto [value, dim] = unwrap(mask);
    return fold(value.unsqueeze(-1), dim).squeeze(-1);
  }

  Tensor select(const Tensor& tensor, int64_t sample) const {
    if (!tensor.defined()) return tensor;
    const auto [value, dim] = unwrap(tensor);
    return dim.has_value() ? value.select(*dim, sample) : value;
  }

  Tensor stack(const std::vector<Tensor>& tensors) const {
    return at::functorch::makeBatched(at::stack(tensors), 0, level_);
  }

  Tensor unfold(const Tensor& tensor, const SymInt& rows) const {
    const bool outer = dim_ == -3;
    const Tensor value =
        tensor.unflatten_symint(-2, {outer ? count_ : rows, outer ? rows : count_});
    return at::functorch::makeBatched(value, value.dim() + dim_, level_);
  }

 private:
  Tensor fold(const Tensor& value, std::optional<int64_t> dim) const {
    if (!has_elements(value)) return value;  // the operator reports it
    if (dim.has_value()) return value.movedim(*dim, dim_).flatten(-3, -2);
    std::vector<SymInt> sizes(value.dim() + 1, -1);
    sizes[sizes.size() + dim_] = count_;
    return value.unsqueeze(dim_).expand_symint(sizes).flatten(-3, -2);
  }

  std::tuple<Tensor, std::optional<int64_t>> unwrap(const Tensor& tensor) const {
    if (!tensor.defined()) return {};
    return at::functorch::unwrapTensorAtLevel(tensor, level_);
  }

  int64_t dim_;
  int64_t level_;
  SymInt count_;
};

// Operators are called below this vmap.
struct BelowVmap {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::FuncTorchBatched};
};

// True if a transform outside this vmap differentiates.
bool is_differentiated() {
  const auto& layers = at::functorch::getDynamicLayerStack();
  return std::any_of(layers.begin(), layers.end(), [](const auto& layer) {
    return layer.key() == at::functorch::TransformType::Grad ||
           layer.key() == at::functorch::TransformType::Jvp;
  });
}

bool maps_parameters(const Samples& samples, const SequenceInputs& args) {
  return samples.in(args.weight_ih) || samples.in(args.weight_hh) || samples.in(args.bias_ih) ||
         samples.in(args.bias_hh);
}

SequenceOutputs fold_samples(const SequenceArgs& args) {
  const Tensor& batch_sizes = args.batch_sizes;
  const bool packed = batch_sizes.defined();
  const Samples samples(packed ? Samples::Order::kInner : Samples::Order::kOuter);
  const auto in = [&](const auto&... tensors) { return (samples.in(tensors) || ...); };
  const bool any = std::apply(in, args.batched()) || std::apply(in, args.batched_elements());
  const SymInt rows = args.input->sym_size(-2);
  const SymInt batch = args.h_0->sym_size(0);
  const BelowVmap below;
  if (!any) return op::call(args);
  SequenceArgs folded = args;
  std::apply([&](auto&... t) { ((t = samples.fold(t)), ...); }, folded.batched());
  std::apply([&](auto&... t) { ((t = samples.fold_mask(t)), ...); }, folded.batched_elements());
  if (packed) {
    folded.batch_sizes = batch_sizes * samples.count().guard_int(__FILE__, __LINE__);
  }
  const auto [output, h_n, c_n] = op::call(folded);
  return {
      args.is_step() ? output : samples.unfold(output, rows),
      samples.unfold(h_n, batch),
      args.cell->has_c() ? samples.unfold(c_n, batch) : c_n};
}

SequenceOutputs call_for_each(const Samples& samples, const SequenceArgs& args) {
  const BelowVmap below;
  std::vector<Tensor> outputs, h_ns, c_ns;
  const int64_t count = samples.count().guard_int(__FILE__, __LINE__);
  for (int64_t k = 0; k < count; ++k) {
    const auto of_sample = [&](const auto& member) {
      if constexpr (TensorMember<decltype(member)>)
        return samples.select(member, k);
      else
        return member;
    };
    auto [output, h_n, c_n] = run_changed(args, of_sample, op::call);
    outputs.push_back(std::move(output));
    h_ns.push_back(std::move(h_n));
    c_ns.push_back(std::move(c_n));
  }
  return {
      samples.stack(outputs),
      samples.stack(h_ns),
      args.cell->has_c() ? samples.stack(c_ns) : c_ns.front()};
}

SequenceOutputs call_of_samples(const SequenceArgs& args) {
  if (const auto device = autocast_device(args.input)) {
    return under_autocast(*device, args, op::call);
  }
  check(args);  // here, for messages with a single sample's sizes
  const Samples samples;
  if (!maps_parameters(samples, args)) return fold_samples(args);
  TORCH_CHECK(
      !args.prepacked(),
      "lltm::sequence: expected the same prepacked weights for all samples of vmap, got weights"
      " per sample; map over unpacked weights");
  // call_for_each cannot stack results if there are no samples.
  if (!args.is_step() && !is_differentiated() && samples.count() > 0) {
    return call_for_each(samples, args);
  }
  return without_saved(call_forward(args, aten_fallback::sequence_forward));
}

Tensor prepack_of_samples(
    std::string_view cell,
    const Tensor& weight_ih,
    const std::optional<Tensor>& weight_hh,
    std::optional<at::ScalarType> dtype) {
  const Samples samples;
  TORCH_CHECK(
      !samples.in(weight_ih) && !samples.in(or_undefined(weight_hh)),
      "lltm::prepack: expected the same weights for all samples of vmap, got weights per sample;"
      " pass unpacked weights to lltm::sequence");
  const BelowVmap below;
  return op::prepack(cell, weight_ih, weight_hh, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  implement<call_of_samples>(m, "sequence");
  m.impl("prepack", TORCH_FN(prepack_of_samples));
}

}  // namespace lltm
#endif
