#include "cpu/kernel/isa/table_for.h"

const lltm::cpu::Kernels* lltm::cpu::kernels_avx512() {
  return table_for<Isa::kAvx512>();
}
