// The functions of lltm/ops.h: the operators for the LLTM.
#include <lltm/ops.h>

#include "op/operators.h"

namespace lltm {
namespace {

using at::Tensor;

constexpr std::string_view kLltm = "lltm";

}  // namespace

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  return op::step({{kLltm, input, h, c, weights, /*weight_hh=*/{}, bias, /*bias_hh=*/{}}});
}

std::tuple<Tensor, Tensor, Tensor> sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse,
    int64_t checkpoint_steps,
    const std::optional<Tensor>& reset,
    const std::optional<Tensor>& recurrent_mask) {
  return op::sequence(
      {{kLltm,
        input,
        h_0,
        c_0,
        weights,
        /*weight_hh=*/{},
        bias,
        /*bias_hh=*/{},
        batch_sizes,
        reverse,
        reset,
        checkpoint_steps,
        recurrent_mask}});
}

Tensor prepack(const Tensor& weights, std::optional<at::ScalarType> dtype) {
  return op::prepack(kLltm, weights, std::nullopt, dtype);
}

}  // namespace lltm
