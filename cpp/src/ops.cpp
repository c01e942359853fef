// The C++ API: a typed call into the dispatcher for each operator.
#include <lltm/ops.h>

#include <ATen/core/dispatch/Dispatcher.h>

namespace lltm {

using at::Tensor;

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::cell", "")
                             .typed<std::tuple<Tensor, Tensor>(
                                 const Tensor&,
                                 const Tensor&,
                                 const Tensor&,
                                 const Tensor&,
                                 const std::optional<Tensor>&)>();
  return op.call(input, h, c, weights, bias);
}

namespace {

using Sequence = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    const std::optional<Tensor>&,
    bool);

}  // namespace

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("lltm::sequence", "").typed<Sequence>();
  return op.call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

Tensor prepack(const Tensor& weights) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::prepack", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(weights);
}

std::tuple<Tensor, Tensor, Tensor> sequence_prepacked(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::sequence_prepacked", "")
                             .typed<Sequence>();
  return op.call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

}  // namespace lltm
