#include "cpu/kernel/isa/table_for.h"

const lltm::cpu::Kernels* lltm::cpu::kernels_avx2() {
  return table_for<Isa::kAvx2>();
}
