// The machine that schedules are made for. No header of torch.
#pragma once

#include <cstdint>

namespace lltm::cpu {

// What a schedule depends on besides the sizes.
struct Machine {
  int64_t l2;  // bytes of the cache, as one core sees it
  int64_t threads;
  bool f32, bf16, bf16x3;    // the formats that have a GEMM kernel here
  bool matrix_unit = false;  // of whatever formats a call has
};

// This machine, with the threads that a parallel region may have here.
Machine current_machine();

}  // namespace lltm::cpu
