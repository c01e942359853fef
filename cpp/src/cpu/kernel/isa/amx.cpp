#include "cpu/kernel/isa/table_for.h"

const lltm::cpu::Kernels* lltm::cpu::kernels_amx() {
  return table_for<Isa::kAmx>();
}
