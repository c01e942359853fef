// Host properties that schedules depend on. No torch header.
#pragma once

#include <cstdint>

namespace lltm::cpu {

struct Machine {
  int64_t l2 = 1 << 20;  // L2 cache bytes per core
  int64_t threads = 1;
  bool f32 = false, bf16 = false, bf16x3 = false;  // formats with a GEMM kernel on this CPU
  bool matrix_unit = false;                        // AMX, for any call format
  // An L3 cache's bytes, and the cores that share it.
  int64_t l3 = 32 << 20, l3_cores = 8;
  // The bfloat16 GEMM is faster than float32's. If not, only weights that are stored as its operand
  // use it.
  bool fast_bf16 = true;
};

// `threads` is for a parallel region that starts here: at most one per usable CPU.
Machine current_machine();

}  // namespace lltm::cpu
