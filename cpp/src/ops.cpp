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

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::sequence", "")
                             .typed<std::tuple<Tensor, Tensor, Tensor>(
                                 const Tensor&,
                                 const Tensor&,
                                 const Tensor&,
                                 const Tensor&,
                                 const std::optional<Tensor>&,
                                 const std::optional<Tensor>&,
                                 bool)>();
  return op.call(input, h_0, c_0, weights, bias, batch_sizes, reverse);
}

}  // namespace lltm
