// Host properties that schedules depend on. No torch header.
#pragma once

#include <cstdint>

namespace lltm::cpu {

struct Machine {
  int64_t l2;  // L2 cache bytes per core
  int64_t threads;
  bool f32, bf16, bf16x3;    // formats with a GEMM kernel on this CPU
  bool matrix_unit = false;  // AMX, for any call format
};

// `threads` is for a parallel region that starts here.
Machine current_machine();

}  // namespace lltm::cpu
