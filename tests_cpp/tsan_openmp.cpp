// Reports OpenMP's parallel regions to the thread sanitizer: libgomp is not instrumented.
//
// GOMP_parallel replaces libgomp's in the test programs, calls it, and reports which writes are
// visible to which threads.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdlib>

namespace {

struct Region {
  void (*body)(void*);
  void* data;
  char begin, end;
};

void run(void* argument) {
  auto* const region = static_cast<Region*>(argument);
  __tsan_acquire(&region->begin);
  region->body(region->data);
  __tsan_release(&region->end);
}

}  // namespace

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  static auto* const parallel = reinterpret_cast<Parallel*>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  if (parallel == nullptr) std::abort();
  Region region = {body, data, 0, 0};
  __tsan_release(&region.begin);
  parallel(run, &region, threads, flags);
  __tsan_acquire(&region.end);
}
