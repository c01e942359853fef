#include "cpu/machine.h"

#include "cpu/gemm/formats.h"
#include "cpu/parallel.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace lltm::cpu {
namespace {

int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long answer = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (answer > 0) return answer;
#endif
  return 1 << 20;
}

}  // namespace

Machine current_machine() {
  static const int64_t l2 = l2_bytes();
  return {
      l2,
      available_threads(),
      F32Format::available(),
      Bf16Format::available(),
      Bf16x3Format::available(),
      /*matrix_unit=*/Bf16x3Format::available()};
}

}  // namespace lltm::cpu
