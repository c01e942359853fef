// Autocast: every floating argument becomes the autocast dtype, so results are
// of that dtype too (c as well as h). float64 arguments stay as they are.
#include "autocast.h"

#include <lltm/ops.h>
#include <torch/library.h>

namespace lltm {
namespace {

using at::Tensor;

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> cell_autocast(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const Autocast cast(device);
  return cell(cast(input), cast(h), cast(c), cast(weights), cast(bias));
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor, Tensor> sequence_autocast(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes,
    bool reverse) {
  const Autocast cast(device);
  return sequence(
      cast(input), cast(h_0), cast(c_0), cast(weights), cast(bias), batch_sizes, reverse);
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  m.impl("cell", TORCH_FN(cell_autocast<c10::DeviceType::CPU>));
  m.impl("sequence", TORCH_FN(sequence_autocast<c10::DeviceType::CPU>));
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  m.impl("cell", TORCH_FN(cell_autocast<c10::DeviceType::CUDA>));
  m.impl("sequence", TORCH_FN(sequence_autocast<c10::DeviceType::CUDA>));
}

}  // namespace lltm
