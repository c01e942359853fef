// Typed calls into the dispatcher, whose handles are looked up once.
#include "op/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>

namespace lltm {
namespace {

using at::Tensor;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <typename Result, typename Args>
class Operator {
 public:
  explicit Operator(const char* name) : op_(find_op<Signature<Result, Args>>(name)) {}

  Result operator()(const Args& args) const {
    return std::apply(
        [&](const auto&... members) { return op_.call(to_flat(members)...); }, args.flat());
  }

 private:
  c10::TypedOperatorHandle<Signature<Result, Args>> op_;
};

}  // namespace

namespace op {

SequenceOutputs call(const SequenceArgs& args) {
  static const Operator<SequenceOutputs, SequenceArgs> op("lltm::sequence");
  return op(args);
}

SequenceResult forward(const SequenceArgs& args) {
  static const Operator<SequenceResult, SequenceArgs> op("lltm::sequence_forward");
  return op(args);
}

Gradients backward(const SequenceBackwardArgs& args) {
  static const Operator<Gradients, SequenceBackwardArgs> op("lltm::sequence_backward");
  return op(args);
}

Tensor prepack(
    std::string_view cell,
    const Tensor& weight_ih,
    const std::optional<Tensor>& weight_hh,
    std::optional<at::ScalarType> dtype) {
  static const auto op = find_op<decltype(prepack)>("lltm::prepack");
  return op.call(cell, weight_ih, weight_hh, dtype);
}

}  // namespace op

}  // namespace lltm
