// Runs the tests, or skips them if ATEN_CPU_CAPABILITY requests an instruction set that the CPU
// lacks: libtorch does not check it and would crash.
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* const capability = std::getenv("ATEN_CPU_CAPABILITY");
  if (capability != nullptr && !lltm_test::cpu_has(capability)) {
    std::cout << "skipped: this CPU has no " << capability << '\n';
    return 77;  // SKIP_RETURN_CODE in tests.cmake
  }
  return RUN_ALL_TESTS();
}
