#include "cpu/machine.h"

#include "cpu/gemm/formats.h"
#include "cpu/threads/parallel.h"

#include <algorithm>
#include <fstream>
#include <string>

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
  return Machine{}.l2;
}

// sysconf reports the L3 caches of several CPUs as one.
std::ifstream l3_file(const char* name) {
  return std::ifstream(std::string("/sys/devices/system/cpu/cpu0/cache/index3/") + name);
}

int64_t l3_bytes() {
  int64_t kilobytes = 0;
  l3_file("size") >> kilobytes;  // "32768K"
  return kilobytes > 0 ? kilobytes << 10 : Machine{}.l3;
}

// From "0-7,64-71": hyperthreads count as cores.
int64_t l3_cores() {
  std::ifstream file = l3_file("shared_cpu_list");
  int64_t cores = 0, first = 0;
  while (file >> first) {
    int64_t last = first;
    if (file.peek() == '-') file.ignore() >> last;
    cores += last - first + 1;
    file.ignore();
  }
  return cores > 0 ? cores : Machine{}.l3_cores;
}

}  // namespace

Machine current_machine() {
  static const int64_t l2 = l2_bytes(), l3 = l3_bytes(), cores = l3_cores();
  return {
      l2,
      std::min(available_threads(), usable_cpus()),
      F32Format::available(),
      Bf16Format::available(),
      Bf16x3Format::available(),
      /*matrix_unit=*/Bf16x3Format::available(),
      l3,
      cores,
      kernels().fast_bf16};
}

}  // namespace lltm::cpu
