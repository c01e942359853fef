// What becomes of an exception on one of several threads: the caller gets it, no
// thread waits for ever, and the next call is as good as any.
//
// The exceptions are those of PyTorch's brgemm, by which the engines multiply bfloat16: of what
// runs on the threads little else can fail. This program has a function of that name itself, which
// the dynamic linker prefers, also for the library: it fails where a test asks for it, and else
// calls PyTorch's.
#include "testing.h"

#if __has_include(<ATen/native/CPUBlas.h>)
#include <ATen/native/CPUBlas.h>
#endif

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <string>

namespace lltm_test {
namespace {

struct Failed : std::exception {
  const char* what() const noexcept override { return "the test asked for it"; }
};

std::atomic<int64_t> brgemm_calls = 0;
std::atomic<int64_t> failing_call = -1;

// The function of the same name that the dynamic linker would have taken without
// this program's.
template <typename F>
F* next(F* function) {
  Dl_info info = {};
  TORCH_CHECK(dladdr(reinterpret_cast<void*>(function), &info) != 0 && info.dli_sname != nullptr);
  void* const found = dlsym(RTLD_NEXT, info.dli_sname);
  TORCH_CHECK(found != nullptr, "no ", info.dli_sname, " in a library");
  return reinterpret_cast<F*>(found);
}

using Brgemm = void(
    int64_t,
    int64_t,
    int64_t,
    int64_t,
    int64_t,
    int64_t,
    bool,
    const at::BFloat16*,
    const at::BFloat16*,
    float*,
    bool);

}  // namespace
}  // namespace lltm_test

#if defined(CPUBLAS_BRGEMM_BF16BF16F32)
namespace at::native::cpublas {

void brgemm(
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t ld_a,
    int64_t ld_b,
    int64_t ld_c,
    const bool add_C,
    const at::BFloat16* A,
    const at::BFloat16* B,
    float* C,
    bool is_vnni) {
  static auto* const of_torch = lltm_test::next<lltm_test::Brgemm>(&brgemm);
  if (lltm_test::brgemm_calls++ == lltm_test::failing_call) throw lltm_test::Failed();
  of_torch(M, N, K, ld_a, ld_b, ld_c, add_C, A, B, C, is_vnni);
}

}  // namespace at::native::cpublas
#endif

namespace lltm_test {
namespace {

torch::jit::Stack call_operator(const char* name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack;
}

class Failures : public testing::TestWithParam<int> {
 protected:
  Failures() : threads_before_(at::get_num_threads()) {
    at::set_num_threads(GetParam());
    // Hidden units enough for several threads, rows too few for products that are
    // not the micro-kernel's.
    const Arguments a = sequence_problem({3, 8, 20, 144}, at::kBFloat16, 1);
    forward_ = {
        a.input, a.h, a.c, a.weights, a.bias, a.batch_sizes, a.reverse, /*checkpoint_steps=*/0};
    const torch::jit::Stack results = call_operator("lltm::sequence_forward", forward_);
    const std::vector<bool> all(5, true);
    backward_ = forward_;
    for (const c10::IValue& value :
         torch::jit::Stack{results[0], results[3], results[0], results[1], results[2], all}) {
      backward_.push_back(value);
    }
  }
  ~Failures() override {
    failing_call = -1;
    at::set_num_threads(threads_before_);
  }

  // Lets one call of the micro-kernel after the other fail.
  static void check(const char* name, const torch::jit::Stack& arguments) {
    const auto run = [&] {
      brgemm_calls = 0;
      Tensors results;
      for (const c10::IValue& value : call_operator(name, arguments))
        results.push_back(value.toTensor());
      return results;
    };
    const Tensors expected = run();
    const int64_t count = brgemm_calls;
    if (count == 0) GTEST_SKIP() << "no micro-kernel here";
    for (int64_t k = 0; k < count; ++k) {
      SCOPED_TRACE(testing::Message() << "call " << k << " of " << count);
      failing_call = k;
      EXPECT_THROW(run(), Failed);
      // Of one thread, nothing is multiplied after that.
      if (at::get_num_threads() == 1) {
        EXPECT_EQ(brgemm_calls, k + 1);
      }
    }
    failing_call = -1;
    EXPECT_TRUE(identical(run(), expected));
  }

  torch::jit::Stack forward_, backward_;

 private:
  int threads_before_;
};

INSTANTIATE_TEST_SUITE_P(
    Threads, Failures, testing::Values(1, 3), [](const testing::TestParamInfo<int>& info) {
      return std::to_string(info.param);
    });

TEST_P(Failures, OfAThreadReachTheCallerForward) {
  check("lltm::sequence_forward", forward_);
}

TEST_P(Failures, OfAThreadReachTheCallerBackward) {
  check("lltm::sequence_backward", backward_);
}

// As torch.backends.mkldnn.flags(enabled=False) does.
TEST_P(Failures, DoNotComeOfAMicroKernelThatIsTurnedOff) {
  const bool before = at::globalContext().userEnabledMkldnn();
  at::globalContext().setUserEnabledMkldnn(false);
  brgemm_calls = 0;
  call_operator("lltm::sequence_forward", forward_);
  call_operator("lltm::sequence_backward", backward_);
  at::globalContext().setUserEnabledMkldnn(before);
  EXPECT_EQ(brgemm_calls, 0);
}

}  // namespace
}  // namespace lltm_test
