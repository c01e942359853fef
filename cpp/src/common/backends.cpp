#include <lltm/backends.h>

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <iterator>

namespace lltm {
namespace {

std::atomic<bool> persistent_setting = true;

constexpr const char* kPrecisions[] = {"ieee", "tf32x3", "tf32"};
std::atomic<const char*> float32_setting = nullptr;

}  // namespace

bool cuda_persistent() {
  return persistent_setting.load(std::memory_order_relaxed);
}

void set_cuda_persistent(bool enabled) {
  persistent_setting.store(enabled, std::memory_order_relaxed);
}

std::optional<std::string> cuda_float32() {
  const char* const precision = float32_setting.load(std::memory_order_relaxed);
  return precision == nullptr ? std::nullopt : std::optional<std::string>(precision);
}

void set_cuda_float32(const std::optional<std::string>& precision) {
  const char* setting = nullptr;
  if (precision.has_value()) {
    const auto* const found = std::find(std::begin(kPrecisions), std::end(kPrecisions), *precision);
    TORCH_CHECK_VALUE(
        found != std::end(kPrecisions),
        "lltm.backends.cuda.float32: expected 'ieee', 'tf32x3', 'tf32' or None, got '",
        *precision,
        "'");
    setting = *found;
  }
  float32_setting.store(setting, std::memory_order_relaxed);
}

}  // namespace lltm

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_cuda_persistent", lltm::cuda_persistent);
  m.impl("_set_cuda_persistent", lltm::set_cuda_persistent);
  m.impl("_cuda_float32", lltm::cuda_float32);
  m.impl("_set_cuda_float32", lltm::set_cuda_float32);
}
