// The choice of CPU kernels follows the environment. The tests of the
// operators run once per instruction set (see CMakeLists.txt); this one makes
// sure that each of those runs used the kernels it is named after.
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

TEST(Isa, KernelsInUseAreThoseThatTheEnvironmentAsksFor) {
  const char* const asked = std::getenv("ATEN_CPU_CAPABILITY");
  // Without being asked, the best that libtorch sees; it knows instruction
  // sets of other architectures, for which there is the default.
  std::string expected = asked != nullptr ? asked : at::get_cpu_capability();
  std::transform(expected.begin(), expected.end(), expected.begin(), [](unsigned char c) {
    return static_cast<char>(std::toupper(c));
  });
  if (asked == nullptr && expected != "AVX2" && expected != "AVX512") {
    expected = "DEFAULT";
  }
  // libtorch's best has no name for the matrix unit.
  const bool compiled = lltm::build_info().find(", AMX\n") != std::string::npos;
  if (asked == nullptr && expected == "AVX512" && compiled && cpu_has("amx")) {
    expected = "AMX";
  }
#if defined(__aarch64__)
  expected = "NEON";
#endif
  EXPECT_EQ(lltm::cpu_kernels(), expected);
}

TEST(Isa, BuildInfoNamesTheKernelsInUse) {
  EXPECT_NE(
      lltm::build_info().find(std::string("CPU kernels in use: ") + lltm::cpu_kernels() + '\n'),
      std::string::npos)
      << lltm::build_info();
}

TEST(Isa, VersionOfTheLibraryIsThatOfItsHeaders) {
  EXPECT_STREQ(lltm::version(), LLTM_VERSION);
}

}  // namespace
}  // namespace lltm_test
