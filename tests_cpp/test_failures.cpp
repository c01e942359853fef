// Exceptions on one of several threads: the caller receives the exception, no thread deadlocks, and
// the next call works. The tensor allocator and operator new[], with which engines and their
// threads allocate workspaces, throw on request.
#include "testing.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>

namespace lltm_test {
namespace {

struct Failed : std::exception {
  const char* what() const noexcept override { return "the test asked for it"; }
};

class FailingAllocator final : public c10::Allocator {
 public:
  FailingAllocator() : before_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, kPriority);
    current = this;
  }
  ~FailingAllocator() override {
    current = nullptr;
    c10::SetCPUAllocator(before_, kPriority);
  }
  FailingAllocator(const FailingAllocator&) = delete;
  FailingAllocator& operator=(const FailingAllocator&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    count();
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void count() {
    if (calls++ == failing_call) throw Failed();
  }

  static inline std::atomic<FailingAllocator*> current = nullptr;
  std::atomic<int64_t> calls = 0;
  std::atomic<int64_t> failing_call = -1;

 private:
  static constexpr uint8_t kPriority = 1;
  c10::Allocator* const before_;
};

class Failures : public testing::TestWithParam<int> {
 protected:
  Failures() {
    // Enough hidden units for several threads.
    const Arguments a = sequence_problem({3, 8, 20, 144}, at::kBFloat16, 1);
    forward_ = sequence_stack(a);
    const Stack results = call("lltm::sequence_forward", forward_);
    const std::vector<bool> all(7, true);
    backward_ = forward_;
    for (const c10::IValue& value :
         Stack{results[0], results[3], results[0], results[1], results[2], all}) {
      backward_.push_back(value);
    }
  }

  static void check(const char* name, const Stack& arguments) {
    FailingAllocator allocator;
    const auto run = [&] {
      allocator.calls = 0;
      Tensors results;
      for (const c10::IValue& value : call(name, arguments)) results.push_back(value.toTensor());
      return results;
    };
    const Tensors expected = run();
    const int64_t count = allocator.calls;
    ASSERT_GT(count, 0);
    for (int64_t k = 0; k < count; ++k) {
      SCOPED_TRACE(testing::Message() << "allocation " << k << " of " << count);
      allocator.failing_call = k;
      EXPECT_THROW(run(), Failed);
      // With one thread, nothing runs afterward.
      if (at::get_num_threads() == 1) {
        EXPECT_EQ(allocator.calls, k + 1);
      }
    }
    allocator.failing_call = -1;
    EXPECT_TRUE(identical(run(), expected));
  }

  const ThreadCount threads_{GetParam()};
  Stack forward_, backward_;
};

INSTANTIATE_TEST_SUITE_P(
    Threads, Failures, testing::Values(1, 3), [](const testing::TestParamInfo<int>& info) {
      return std::to_string(info.param);
    });

TEST_P(Failures, ReachTheCallerForward) {
  check("lltm::sequence_forward", forward_);
}

TEST_P(Failures, OfAThreadReachTheCallerBackward) {
  check("lltm::sequence_backward", backward_);
}

}  // namespace

void count_allocation() {
  if (FailingAllocator* const current = FailingAllocator::current) current->count();
}

}  // namespace lltm_test

void* operator new[](std::size_t bytes) {
  lltm_test::count_allocation();
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept {
  std::free(memory);
}
