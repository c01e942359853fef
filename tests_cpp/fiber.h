// A fiber: a function that can suspend and resume, as a GPU lane. Notifies the address and thread
// sanitizers of stack changes.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define LLTM_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLTM_TEST_ASAN 1
#endif
#endif
#if defined(LLTM_TEST_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace lltm_test {

// Only written pages use physical memory.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 64 << 10;

  explicit Stacks(std::size_t count) : bytes_(count * kBytes) {
    memory_ = mmap(
        nullptr,
        bytes_,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1,
        0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void* operator[](std::size_t n) const { return static_cast<char*>(memory_) + n * kBytes; }

 private:
  std::size_t bytes_;
  void* memory_;
};

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    if (inner_fiber_ != nullptr) __tsan_destroy_fiber(inner_fiber_);
#endif
  }

  // The first resume() calls `body(argument)`, which must not throw.
  void start(void* stack, void (*body)(void*), void* argument) {
    stack_ = stack;
    body_ = body;
    argument_ = argument;
    getcontext(&first_);
    first_.uc_stack.ss_sp = stack;
    first_.uc_stack.ss_size = Stacks::kBytes;
    first_.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(
        &first_,
        reinterpret_cast<void (*)()>(enter),
        2,
        static_cast<unsigned>(self >> 32),
        static_cast<unsigned>(self));
#if defined(__SANITIZE_THREAD__)
    inner_fiber_ = __tsan_create_fiber(0);
#endif
  }

  bool done() const { return done_; }

  // Called outside the fiber.
  void resume() {
#if defined(__SANITIZE_THREAD__)
    outer_fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(inner_fiber_, 0);
#endif
#if defined(LLTM_TEST_ASAN)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, Stacks::kBytes);
#endif
    if (_setjmp(outside_) == 0) {
      if (started_) _longjmp(inside_, 1);
      started_ = true;
      setcontext(&first_);
    }
#if defined(LLTM_TEST_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // Called inside the fiber.
  void suspend() { leave(/*last=*/false); }

 private:
  static void enter(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<Fiber*>(std::uintptr_t{high} << 32 | low);
    self->arrive(nullptr);
    self->body_(self->argument_);
    self->done_ = true;
    self->leave(/*last=*/true);
  }

  void leave([[maybe_unused]] bool last) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(outer_fiber_, 0);
#endif
    void* fake_stack = nullptr;
#if defined(LLTM_TEST_ASAN)
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, outer_stack_, outer_bytes_);
#endif
    if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
    arrive(fake_stack);
  }

  void arrive([[maybe_unused]] void* fake_stack) {
#if defined(LLTM_TEST_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, &outer_stack_, &outer_bytes_);
#endif
  }

  // First switch. Later switches use jumps, which need no system call.
  ucontext_t first_;
  jmp_buf inside_, outside_;
  bool started_ = false;
  void* stack_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool done_ = false;
#if defined(LLTM_TEST_ASAN)
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* inner_fiber_ = nullptr;
  void* outer_fiber_ = nullptr;
#endif
};

}  // namespace lltm_test
