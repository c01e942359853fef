// Each run per instruction set (tests.cmake) uses the named CPU kernels.
#include "cpu_features.h"

#include <lltm/version.h>

#include <ATen/Version.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

namespace lltm_test {
namespace {

TEST(Isa, KernelsInUseFollowTheEnvironment) {
  const char* const asked = std::getenv("ATEN_CPU_CAPABILITY");
  // The default is libtorch's best instruction set; on other architectures, "default".
  std::string expected = asked != nullptr ? asked : at::get_cpu_capability();
  std::transform(expected.begin(), expected.end(), expected.begin(), [](unsigned char c) {
    return static_cast<char>(std::toupper(c));
  });
  if (asked == nullptr && expected != "AVX2" && expected != "AVX512") {
    expected = "DEFAULT";
  }
  // ATEN_CPU_CAPABILITY has no name for AMX.
  const bool compiled = lltm::build_info().find(", AMX\n") != std::string::npos;
  if (asked == nullptr && expected == "AVX512" && compiled && cpu_has("amx")) {
    expected = "AMX";
  }
#if defined(__aarch64__)
  expected = "NEON";
#endif
  EXPECT_EQ(lltm::cpu_kernels(), expected);
}

}  // namespace
}  // namespace lltm_test
