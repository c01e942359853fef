// The kernels for the baseline instruction set.
#include "cpu/kernel/elementwise_kernels.h"

namespace lltm::cpu {

const Kernels* kernels_default() {
  static constexpr Kernels kernels = make_kernels("DEFAULT");
  return &kernels;
}

}  // namespace lltm::cpu
