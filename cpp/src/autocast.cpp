// Autocast: every floating argument becomes the autocast dtype, so results are
// of that dtype too (c as well as h). float64 arguments stay as they are.
#include <ATen/autocast_mode.h>
#include <lltm/ops.h>
#include <torch/library.h>

namespace lltm {
namespace {

using at::Tensor;

template <c10::DeviceType device>
class Cast {
 public:
  Tensor operator()(const Tensor& tensor) const {
    return tensor.defined() ? at::autocast::cached_cast(dtype_, tensor, device) : tensor;
  }
  std::optional<Tensor> operator()(const std::optional<Tensor>& tensor) const {
    return tensor.has_value() ? std::optional<Tensor>((*this)(*tensor)) : std::nullopt;
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{
      at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(device);
};

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> cell_autocast(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const Cast<device> cast;
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
  const Cast<device> cast;
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
