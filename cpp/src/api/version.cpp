#include <lltm/version.h>

#include "common/device.h"

#include <torch/library.h>
#include <torch/version.h>

#include <sstream>
#include <string>

namespace lltm {

const char* version() {
  return LLTM_VERSION;
}

const char* cpu_kernels() {
  return find_device(c10::DeviceType::CPU).kernels();
}

std::string build_info() {
  const auto cuda = find_device(c10::DeviceType::CUDA).description;
  std::ostringstream info;
  info << "lltm: " << LLTM_VERSION << '\n'
       << "torch: " << TORCH_VERSION << '\n'
       << "compiler: " <<
#if defined(__clang__)
      "clang " << __clang_version__
#elif defined(__GNUC__)
      "gcc " << __VERSION__
#else
      "unknown"
#endif
       << '\n'
       << "CUDA kernels: " << (cuda == nullptr ? "none (LLTM_CUDA is OFF)\n" : cuda())
       << find_device(c10::DeviceType::CPU).description();
  return info.str();
}

}  // namespace lltm

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl("_version", [] { return std::string(lltm::version()); });
  m.impl("_build_info", lltm::build_info);
  m.impl("_cpu_kernels", [] { return std::string(lltm::cpu_kernels()); });
}
