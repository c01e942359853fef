// Reports OpenMP synchronization to the thread sanitizer: libgomp is not instrumented, so correct
// exchanges at barriers and parallel regions would be reported as races.
//
// GOMP_parallel and GOMP_barrier replace libgomp's in the test programs, call them, and report
// which writes are visible to which threads.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdlib>

namespace {

// A parallel region with its barriers. Two alternate, because threads are at most one barrier
// apart.
struct Region {
  void (*body)(void*);
  void* data;
  char begin, end, barriers[2];
};

thread_local Region* region = nullptr;
thread_local unsigned barriers_passed = 0;

template <typename Function>
Function* next_definition(const char* name) {
  void* const function = dlsym(RTLD_NEXT, name);
  if (function == nullptr) std::abort();
  return reinterpret_cast<Function*>(function);
}

void run(void* argument) {
  Region* const outer = region;
  const unsigned outer_barriers = barriers_passed;
  region = static_cast<Region*>(argument);
  barriers_passed = 0;
  __tsan_acquire(&region->begin);
  region->body(region->data);
  __tsan_release(&region->end);
  region = outer;
  barriers_passed = outer_barriers;
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  static auto* const parallel =
      next_definition<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel");
  Region region = {body, data, 0, 0, {}};
  __tsan_release(&region.begin);
  parallel(run, &region, threads, flags);
  __tsan_acquire(&region.end);
}

void GOMP_barrier() {
  static auto* const barrier = next_definition<void()>("GOMP_barrier");
  char* const tag = &region->barriers[barriers_passed++ % 2];
  __tsan_release(tag);
  barrier();
  __tsan_acquire(tag);
}
}
