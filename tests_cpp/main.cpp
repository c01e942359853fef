// Runs the tests, unless the environment asks for an instruction set that this
// CPU does not have: libtorch takes ATEN_CPU_CAPABILITY at its word, and would
// die of an illegal instruction.
#include "cpu_features.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* const capability = std::getenv("ATEN_CPU_CAPABILITY");
  if (capability != nullptr && !lltm_test::cpu_has(capability)) {
    std::cout << "skipped: this CPU has no " << capability << '\n';
    return 77;  // SKIP_RETURN_CODE in CMakeLists.txt
  }
  return RUN_ALL_TESTS();
}
