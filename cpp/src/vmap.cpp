// torch.vmap. Where it maps over inputs and states, V samples of B rows are V * B
// rows of one call, and the fused kernels run as ever. Where it maps over weights
// or biases (ensembles), each sample has products of its own: a sequence is run
// once for each, by the fused kernels, which is several times as fast as the
// composite path; of a single step, and where a transform around this vmap would
// take the composite path for each, that path runs once for all.
//
// A rule runs above autocast and autograd, which see the call that it makes.
#include "autocast.h"
#include "check.h"
#include "composite.h"

#include <lltm/ops.h>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

// How a mapped tensor is taken apart is internal to torch. Without these headers
// torch maps by a loop over the samples.
#if __has_include(<ATen/functorch/PlumbingHelper.h>)
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

// The innermost vmap, and where its samples go among the rows of a call.
class Samples {
 public:
  // In (..., V, B, .) samples lie one after another. A packed sequence needs
  // (..., B, V, .): the rows of a step are the first ones of the state.
  enum class Order { kOuter, kInner };

  explicit Samples(Order order = Order::kOuter) : dim_(order == Order::kOuter ? -3 : -2) {
    const auto layer = at::functorch::maybeCurrentDynamicLayer();
    TORCH_CHECK(layer.has_value(), "lltm: a tensor of torch.vmap was used outside of it");
    level_ = layer->layerId();
    count_ = layer->batchSize();
  }

  const SymInt& count() const { return count_; }

  bool in(const Tensor& tensor) const { return tensor.defined() && dim_of(tensor).has_value(); }
  bool in(const std::optional<Tensor>& tensor) const { return tensor.has_value() && in(*tensor); }

  // What every sample has alike.
  Tensor shared(const Tensor& tensor) const {
    return std::get<0>(at::functorch::unwrapTensorAtLevel(tensor, level_));
  }
  std::optional<Tensor> shared(const std::optional<Tensor>& tensor) const {
    return tensor.has_value() ? std::optional<Tensor>(shared(*tensor)) : std::nullopt;
  }

  // (..., B, .) of each sample as (..., V * B, .).
  Tensor fold(const Tensor& tensor) const {
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    if (dim.has_value()) return value.movedim(*dim, dim_).flatten(-3, -2);
    std::vector<SymInt> sizes(value.dim() + 1, -1);
    sizes[sizes.size() + dim_] = count_;
    return value.unsqueeze(dim_).expand_symint(sizes).flatten(-3, -2);
  }

  // The arguments of one sample.
  Tensor select(const Tensor& tensor, int64_t sample) const {
    const auto [value, dim] = at::functorch::unwrapTensorAtLevel(tensor, level_);
    return dim.has_value() ? value.select(*dim, sample) : value;
  }
  std::optional<Tensor> select(const std::optional<Tensor>& tensor, int64_t sample) const {
    return tensor.has_value() ? std::optional<Tensor>(select(*tensor, sample)) : std::nullopt;
  }

  // What there is of each sample.
  Tensor stack(const std::vector<Tensor>& tensors) const {
    return at::functorch::makeBatched(at::stack(tensors), 0, level_);
  }

  // Back, `rows` to a sample.
  Tensor unfold(const Tensor& tensor, const SymInt& rows) const {
    const bool outer = dim_ == -3;
    const Tensor value =
        tensor.unflatten_symint(-2, {outer ? count_ : rows, outer ? rows : count_});
    return at::functorch::makeBatched(value, value.dim() + dim_, level_);
  }

 private:
  std::optional<int64_t> dim_of(const Tensor& tensor) const {
    return std::get<1>(at::functorch::unwrapTensorAtLevel(tensor, level_));
  }

  int64_t dim_;
  int64_t level_;
  SymInt count_;
};

// What is called now goes on below this vmap.
struct BelowVmap {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::FuncTorchBatched};
};

// A derivative is taken of what this vmap does.
bool is_differentiated() {
  const auto& layers = at::functorch::getDynamicLayerStack();
  return std::any_of(layers.begin(), layers.end(), [](const auto& layer) {
    return layer.key() == at::functorch::TransformType::Grad ||
           layer.key() == at::functorch::TransformType::Jvp;
  });
}

bool is_given(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// The device whose autocast is on, if it is that of the call.
std::optional<c10::DeviceType> autocast_device(const Tensor& input) {
  const auto device = input.defined() ? input.device().type() : c10::DeviceType::Meta;
  const bool has_kernel = device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
  return has_kernel && at::autocast::is_autocast_enabled(device) ? std::optional(device)
                                                                 : std::nullopt;
}

std::tuple<Tensor, Tensor> cell_of_samples(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  if (const auto device = autocast_device(input)) {
    const Autocast cast(*device);
    return cell(cast(input), cast(h), cast(c), cast(weights), cast(bias));
  }
  // Here, where an error names the sizes of one sample.
  check_cell(input, h, c, weights, bias);
  const Samples samples;
  if (samples.in(weights) || samples.in(bias)) {
    const auto [h_next, c_next, activations] = composite::cell_forward(input, h, c, weights, bias);
    return {h_next, c_next};
  }
  const bool any = samples.in(input) || samples.in(h) || samples.in(c);
  const SymInt rows = input.sym_size(0);
  const BelowVmap below;
  if (!any) return cell(input, h, c, weights, bias);
  const auto [h_next, c_next] = cell(
      samples.fold(input),
      samples.fold(h),
      samples.fold(c),
      samples.shared(weights),
      samples.shared(bias));
  return {samples.unfold(h_next, rows), samples.unfold(c_next, rows)};
}

using Sequence = decltype(sequence);

// sequence and sequence_prepacked.
std::tuple<Tensor, Tensor, Tensor> fold_sequence(
    const Sequence& run,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  const bool packed = is_given(batch_sizes);
  const Samples samples(packed ? Samples::Order::kInner : Samples::Order::kOuter);
  const bool any = samples.in(input) || samples.in(h_0) || samples.in(c_0);
  const SymInt rows = input.sym_size(-2);
  const SymInt batch = h_0.sym_size(0);
  const BelowVmap below;
  if (!any) return run(input, h_0, c_0, weights, bias, batch_sizes, reverse);
  const auto [output, h_n, c_n] = run(
      samples.fold(input),
      samples.fold(h_0),
      samples.fold(c_0),
      samples.shared(weights),
      samples.shared(bias),
      packed ? std::optional<Tensor>(*batch_sizes * samples.count().guard_int(__FILE__, __LINE__))
             : std::nullopt,
      reverse);
  return {samples.unfold(output, rows), samples.unfold(h_n, batch), samples.unfold(c_n, batch)};
}

std::tuple<Tensor, Tensor, Tensor> sequence_for_each(
    const Samples& samples,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  const BelowVmap below;
  std::vector<Tensor> outputs, h_ns, c_ns;
  const int64_t count = samples.count().guard_int(__FILE__, __LINE__);
  for (int64_t k = 0; k < count; ++k) {
    auto [output, h_n, c_n] = sequence(
        samples.select(input, k),
        samples.select(h_0, k),
        samples.select(c_0, k),
        samples.select(weights, k),
        samples.select(bias, k),
        samples.shared(batch_sizes),
        reverse);
    outputs.push_back(std::move(output));
    h_ns.push_back(std::move(h_n));
    c_ns.push_back(std::move(c_n));
  }
  return {samples.stack(outputs), samples.stack(h_ns), samples.stack(c_ns)};
}

std::tuple<Tensor, Tensor, Tensor> sequence_of_samples(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  if (const auto device = autocast_device(input)) {
    const Autocast cast(*device);
    return sequence(
        cast(input), cast(h_0), cast(c_0), cast(weights), cast(bias), batch_sizes, reverse);
  }
  check_sequence(input, h_0, c_0, weights, bias, batch_sizes);
  const Samples samples;
  if (samples.in(weights) || samples.in(bias)) {
    // Without samples there is no result to take the shape from.
    if (!is_differentiated() && samples.count() > 0) {
      return sequence_for_each(samples, input, h_0, c_0, weights, bias, batch_sizes, reverse);
    }
    const auto [output, h_n, c_n, activations] =
        composite::sequence_forward(input, h_0, c_0, weights, bias, batch_sizes, reverse);
    return {output, h_n, c_n};
  }
  return fold_sequence(sequence, input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked_of_samples(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  const Samples samples;
  TORCH_CHECK(
      !samples.in(weights) && !samples.in(bias),
      "lltm::sequence_prepacked: expected one set of weights for all samples of vmap, got one for"
      " each: lltm::sequence takes such");
  check_sequence_prepacked(input, h_0, c_0, weights, bias, batch_sizes);
  return fold_sequence(sequence_prepacked, input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

Tensor prepack_of_samples(const Tensor& weights) {
  TORCH_CHECK(
      !Samples().in(weights),
      "lltm::prepack: expected one set of weights for all samples of vmap, got one for each:"
      " lltm::sequence takes such");
  const BelowVmap below;
  return prepack(weights);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl("cell", TORCH_FN(cell_of_samples));
  m.impl("sequence", TORCH_FN(sequence_of_samples));
  m.impl("prepack", TORCH_FN(prepack_of_samples));
  m.impl("sequence_prepacked", TORCH_FN(sequence_prepacked_of_samples));
}

}  // namespace lltm
#endif
