// Every schedule that LLTM_TUNE may choose gives results as accurate as the one of schedule.cpp:
// the engines are called with each of them. And the operators with LLTM_TUNE in the environment.
#include "testing.h"

#include "cpu/engine/engine.h"
#include "cpu/gemm/formats.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"

#include <lltm/ops.h>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

using lltm::cpu::Aspect;
using lltm::cpu::BackwardSchedule;
using lltm::cpu::FewRowsSchedule;
using lltm::cpu::ForwardSchedule;
using lltm::cpu::LayerShape;
using lltm::cpu::Machine;

// Before the library reads them. With the second, it says what it measures.
const bool kTunes = setenv("LLTM_TUNE", "1", 1) == 0 && setenv("LLTM_SCHEDULE", "1", 1) == 0;

// ---- every schedule ---------------------------------------------------------

// A schedule and those that differ from it in one or two aspects.
template <typename Schedule>
std::vector<Schedule> reachable(
    const Machine& machine, const LayerShape& shape, const Schedule& first, bool prepacked) {
  std::vector<Schedule> found = {first};
  size_t begin = 0;
  for (int changes = 0; changes < 2; ++changes) {
    const size_t end = found.size();
    for (; begin < end; ++begin) {
      for (const Aspect aspect : lltm::cpu::kAspects) {
        if (prepacked && aspect == Aspect::kBlocks) continue;
        for (const Schedule& other : alternatives(machine, shape, found[begin], aspect)) {
          if (std::find(found.begin(), found.end(), other) == found.end()) found.push_back(other);
        }
      }
    }
  }
  return found;
}

// A problem, plain PyTorch's results, and the oracle's.
class Case {
 public:
  explicit Case(const Arguments& arguments)
      : a_(arguments),
        grads_(random_like(eager_sequence(a_), 7)),
        eager_(evaluate(eager_sequence, a_, grads_)),
        expected_(expect(a_, grads_)) {}

  LayerShape shape() const {
    const int64_t input = a_.input.size(-1);
    const bool bf16 = a_.input.scalar_type() == at::kBFloat16;
    return {a_.h.size(0), input, a_.h.size(1), a_.input.numel() / input, bf16};
  }
  int64_t steps() const { return a_.batch_sizes ? a_.batch_sizes->size(0) : a_.input.size(0); }
  // Of the engine for few elements.
  bool few() const {
    return a_.input.scalar_type() == at::kFloat &&
           lltm::cpu::has_few_elements(a_.h.size(0), a_.h.size(1));
  }

  // The blocked engine, or the one for few rows.
  template <typename Schedule>
  lltm::SequenceResult forward(const Schedule& schedule, const at::Tensor& weights) const {
    const lltm::SequenceArgs args = {inputs(weights), /*checkpoint_steps=*/0, /*save=*/true};
    if constexpr (std::is_same_v<Schedule, ForwardSchedule>) {
      return lltm::cpu::blocked_forward(args, schedule).value();
    } else {
      return lltm::cpu::few_rows_forward(args, schedule);
    }
  }

  template <typename Schedule>
  void check_forward(
      const Machine& machine, const Schedule& first, const at::Tensor& weights) const {
    const bool prepacked = lltm::cpu::is_prepacked(weights);
    for (const Schedule& schedule : reachable(machine, shape(), first, prepacked)) {
      SCOPED_TRACE(to_string(schedule));
      const auto [output, h_n, c_n, activations] = forward(schedule, weights);
      const Tensors outputs = {output, h_n, c_n};
      for (size_t k = 0; k < outputs.size(); ++k) {
        EXPECT_TRUE(is_accurate(outputs[k], eager_.outputs[k], expected_.outputs[k])) << k;
      }
    }
  }

  void check_forward(const Machine& machine, const at::Tensor& weights) const {
    if (few()) {
      const bool prepacked = lltm::cpu::is_prepacked(weights);
      check_forward(machine, schedule_few_rows(machine, shape(), steps(), prepacked), weights);
    } else {
      check_forward(machine, schedule_forward(machine, shape()), weights);
    }
  }

  void check_backward(const Machine& machine) const {
    const auto saved =
        few() ? forward(schedule_few_rows(machine, shape(), steps(), false), a_.weights)
              : forward(schedule_forward(machine, shape()), a_.weights);
    const lltm::SequenceBackwardArgs args = {
        inputs(a_.weights),
        /*checkpoint_steps=*/0,
        std::get<0>(saved),
        std::get<3>(saved),
        grads_[0],
        grads_[1],
        grads_[2],
        {true, true, true, true, true}};
    const BackwardSchedule first = schedule_backward(machine, shape());
    for (const BackwardSchedule& schedule : reachable(machine, shape(), first, false)) {
      SCOPED_TRACE(to_string(schedule));
      const auto [input, h, c, weights, bias] = lltm::cpu::blocked_backward(args, schedule).value();
      const Tensors gradients = {input, h, c, weights, bias};
      for (size_t k = 0; k < gradients.size(); ++k) {
        EXPECT_TRUE(is_accurate(gradients[k], eager_.gradients[k], expected_.gradients[k]))
            << kArgumentNames[k];
      }
    }
  }

 private:
  lltm::SequenceInputs inputs(const at::Tensor& weights) const {
    return {a_.input, a_.h, a_.c, weights, a_.bias, a_.batch_sizes, a_.reverse};
  }

  const Arguments a_;
  const Tensors grads_;
  const Evaluation eager_;
  const Expected expected_;
};

class EverySchedule : public testing::TestWithParam<std::tuple<at::ScalarType, int>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  // This one, with so many threads.
  Machine machine() const {
    Machine found = lltm::cpu::current_machine();
    found.threads = std::get<1>(GetParam());
    return found;
  }
  void SetUp() override {
    if (!machine().f32) GTEST_SKIP() << "the blocked engine needs AVX2";
  }

  std::vector<Arguments> problems() const {
    std::vector<Arguments> found;
    // Few rows, few units, sizes that fill no vector, rows of several chunks.
    for (const Sizes& sizes :
         {Sizes{9, 3, 19, 130},
          {50, 20, 7, 16},
          {6, 5, 33, 70},
          {9, 16, 65, 96},
          {5, 33, 20, 100},
          {12, 130, 9, 65}}) {
      found.push_back(sequence_problem(sizes, dtype(), found.size() + 1));
    }
    // Batch first in memory, which cannot be read in place.
    found.push_back(sequence_problem({9, 40, 12, 48}, dtype(), 8));
    found.back().input = found.back().input.transpose(0, 1).contiguous().transpose(0, 1);
    std::vector<int64_t> lengths;
    for (int64_t row = 0; row < 70; ++row) lengths.push_back(12 - row / 6);
    found.push_back(packed_problem(lengths, 33, 65, dtype(), 9));
    for (size_t k = 0; k < found.size(); k += 2) found[k].reverse = true;
    found.push_back(found.back());
    found.back().reverse = true;
    found.push_back(
        sequence_problem({34, 3, 19, 130}, dtype(), 10));  // few rows, more than few steps
    return found;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    EverySchedule,
    testing::Combine(testing::Values(at::kFloat, at::kBFloat16, at::kHalf), testing::Values(1, 4)),
    [](const auto& info) {
      return name(std::get<0>(info.param)) + "_threads" + std::to_string(std::get<1>(info.param));
    });

TEST_P(EverySchedule, IsAsAccurateAsPlainPyTorch) {
  for (const Arguments& arguments : problems()) {
    const Case problem(arguments);
    SCOPED_TRACE(testing::Message() << arguments.input.sizes() << ' ' << arguments.h.sizes());
    problem.check_forward(machine(), arguments.weights);
    problem.check_backward(machine());
  }
}

TEST_P(EverySchedule, OfPrepackedWeightsIsAsAccurateAsPlainPyTorch) {
  for (const Arguments& arguments : problems()) {
    const Case problem(arguments);
    SCOPED_TRACE(testing::Message() << arguments.input.sizes() << ' ' << arguments.h.sizes());
    problem.check_forward(machine(), lltm::prepack(arguments.weights));
  }
}

// Their error is that of the quantisation: the same in every schedule, up to rounding.
TEST_P(EverySchedule, OfWeightsInInt8GivesTheSame) {
  const double tolerance = dtype() == at::kFloat ? 1e-3 : 2e-2;
  for (const Arguments& arguments : problems()) {
    SCOPED_TRACE(testing::Message() << arguments.input.sizes() << ' ' << arguments.h.sizes());
    const at::Tensor packed = lltm::prepack(arguments.weights, at::kQInt8);
    const Case problem(arguments);
    const ForwardSchedule first = schedule_forward_int8(machine(), problem.shape());
    const auto expected = problem.forward(first, packed);
    for (const ForwardSchedule& schedule :
         reachable(machine(), problem.shape(), first, /*prepacked=*/true)) {
      SCOPED_TRACE(to_string(schedule));
      const auto found = problem.forward(schedule, packed);
      EXPECT_TRUE(at::allclose(std::get<0>(found), std::get<0>(expected), tolerance, tolerance));
      EXPECT_TRUE(at::allclose(std::get<2>(found), std::get<2>(expected), tolerance, tolerance));
    }
  }
}

// ---- LLTM_TUNE --------------------------------------------------------------

// What the library prints to stderr meanwhile.
template <typename Work>
std::string log_of(const Work& work) {
  testing::internal::CaptureStderr();
  work();
  return testing::internal::GetCapturedStderr();
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// Each test has sizes of its own, because what was measured holds for the process.
class Tuned : public testing::Test {
 protected:
  Tuned() : threads_before_(at::get_num_threads()) { at::set_num_threads(2); }
  ~Tuned() override { at::set_num_threads(threads_before_); }
  void SetUp() override {
    ASSERT_TRUE(kTunes);
    if (!lltm::cpu::current_machine().f32) GTEST_SKIP() << "the blocked engine needs AVX2";
  }

 private:
  int threads_before_;
};

TEST_F(Tuned, CallsOfAKindAreMeasuredOnce) {
  const Arguments a = sequence_problem({12, 10, 24, 48}, at::kFloat, 1);
  Tensors first, second;
  const std::string log = log_of([&] { first = sequence(a); });
  EXPECT_EQ(count(log, "measured"), 1) << log;
  EXPECT_EQ(count(log, ", tuned\n"), 1) << log;
  const std::string next = log_of([&] { second = sequence(a); });
  EXPECT_EQ(count(next, "measured"), 0) << next;
  EXPECT_EQ(count(next, ", tuned\n"), 1) << next;
  EXPECT_TRUE(identical(first, second)) << "one schedule, the same bits";

  // A kind has 8 to 15 steps.
  const auto measured = [&](const Arguments& arguments) {
    return count(log_of([&] { sequence(arguments); }), "measured");
  };
  EXPECT_EQ(measured(sequence_problem({15, 10, 24, 48}, at::kFloat, 1)), 0);
  EXPECT_EQ(measured(sequence_problem({16, 10, 24, 48}, at::kFloat, 1)), 1);
  EXPECT_EQ(measured(sequence_problem({12, 11, 24, 48}, at::kFloat, 1)), 1);
  EXPECT_EQ(measured(sequence_problem({12, 10, 25, 48}, at::kFloat, 1)), 1);
  EXPECT_EQ(measured(sequence_problem({12, 10, 24, 47}, at::kFloat, 1)), 1);
  EXPECT_EQ(measured(sequence_problem({12, 10, 24, 48}, at::kHalf, 1)), 1);
  EXPECT_EQ(measured(packed_problem(std::vector<int64_t>(10, 12), 24, 48, at::kFloat, 1)), 1);
  at::set_num_threads(1);
  EXPECT_EQ(measured(a), 1);
}

TEST_F(Tuned, ForwardThatSavesAndBackwardAreKindsOfTheirOwn) {
  const Arguments a = sequence_problem({12, 12, 24, 48}, at::kFloat, 1);
  const auto train = [&] {
    const Arguments leaves = requiring_grad(a);
    sequence(leaves)[0].sum().backward();
  };
  EXPECT_EQ(count(log_of([&] { sequence(a); }), "measured"), 1);
  const std::string log = log_of(train);
  EXPECT_EQ(count(log, "measured"), 2) << log;
  EXPECT_EQ(count(log, ", tuned\n"), 2) << log;
  EXPECT_EQ(count(log, "backward"), 2) << log;
  EXPECT_EQ(count(log_of(train), "measured"), 0);
}

TEST_F(Tuned, EveryFormOfWeightsIsMeasuredForItself) {
  // Without bfloat16, whose micro-kernel is a part of the kind too where weights are not prepacked.
  const bool before = at::globalContext().userEnabledMkldnn();
  at::globalContext().setUserEnabledMkldnn(false);
  const Arguments a = sequence_problem({12, 14, 24, 48}, at::kFloat, 1);
  const auto with = [&](const at::Tensor& packed) {
    return log_of([&] {
      lltm::sequence_prepacked(a.input, a.h, a.c, packed, a.bias, a.batch_sizes, a.reverse);
    });
  };
  EXPECT_EQ(count(log_of([&] { sequence(a); }), "measured"), 1);
  for (const at::Tensor& packed :
       {lltm::prepack(a.weights), lltm::prepack(a.weights, at::kQInt8)}) {
    EXPECT_EQ(count(with(packed), "measured"), 1);
    EXPECT_EQ(count(with(packed), "measured"), 0);
  }
  at::globalContext().setUserEnabledMkldnn(before);
}

TEST_F(Tuned, FewRowsAreToo) {
  const Arguments a = sequence_problem({40, 2, 24, 48}, at::kFloat, 1);
  EXPECT_EQ(count(log_of([&] { sequence(a); }), "measured"), 1);
  EXPECT_EQ(count(log_of([&] { sequence(a); }), ", tuned\n"), 1);
}

// 32 and 33 steps are of one kind by their powers of two, but only the former take float32
// operands, and read weights in place. That is not for measurements to decide.
TEST_F(Tuned, FewRowsAreRoundedAsTheyWouldBeUntuned) {
  const auto log = [](int64_t steps, bool prepacked) {
    const Arguments a = sequence_problem({steps, 3, 24, 48}, at::kFloat, 1);
    if (!prepacked) return log_of([&] { sequence(a); });
    const at::Tensor packed = lltm::prepack(a.weights);
    return log_of([&] { lltm::sequence_prepacked(a.input, a.h, a.c, packed, a.bias); });
  };
  for (int call = 0; call < 2; ++call) {
    const int lines = call == 0 ? 2 : 1;
    EXPECT_EQ(count(log(32, /*prepacked=*/false), "in place, GEMM float32"), lines);
    EXPECT_EQ(count(log(33, /*prepacked=*/false), "of 64-bit h and x"), lines);
    EXPECT_EQ(count(log(32, /*prepacked=*/true), "of 32-bit h and x"), lines);
    EXPECT_EQ(count(log(33, /*prepacked=*/true), "of 64-bit h and x"), lines);
  }
}

TEST_F(Tuned, ResultsAreAsAccurateAsEver) {
  for (const at::ScalarType dtype : kDtypes) {
    check_sequence([&](uint64_t seed) { return sequence_problem({6, 17, 20, 60}, dtype, seed); });
    check_sequence([&](uint64_t seed) {
      return packed_problem({7, 7, 6, 5, 5, 4, 2, 1}, 20, 60, dtype, seed);
    });
  }
}

TEST_F(Tuned, NothingIsMeasuredInAParallelRegion) {
  const Arguments a = sequence_problem({12, 16, 24, 48}, at::kFloat, 1);
  const std::string log = log_of([&] {
    // Not at::parallel_for, which is compiled here, by Clang without OpenMP.
    lltm::cpu::parallel_region(2, [&](lltm::cpu::Team& team) {
      team.for_each_slot(2, [&](int64_t) {
        const at::NoGradGuard no_grad;
        sequence(a);
        return true;
      });
    });
  });
  EXPECT_EQ(count(log, "forward"), 2) << log;
  EXPECT_EQ(count(log, "tuned"), 0) << log;
}

TEST_F(Tuned, NothingIsMeasuredWhereResultsAreToBeDeterministic) {
  const Arguments a = sequence_problem({12, 18, 24, 48}, at::kFloat, 1);
  const auto log = [&] { return log_of([&] { sequence(a); }); };
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  EXPECT_EQ(count(log(), "tuned"), 0);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  EXPECT_EQ(count(log(), "measured"), 1);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  EXPECT_EQ(count(log(), "tuned"), 0);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
}

TEST_F(Tuned, ThreadsAtOnceMeasureAKindOnceAndGetTheSame) {
  std::vector<Arguments> kinds;
  for (const int64_t batch : {20, 22, 24}) {
    kinds.push_back(sequence_problem({12, batch, 24, 48}, at::kFloat, 1));
  }
  const auto call_all = [&] {
    const at::NoGradGuard no_grad;
    for (int round = 0; round < 20; ++round) {
      for (const Arguments& a : kinds) {
        const Tensors outputs = sequence(a), expected = eager_sequence(a);
        EXPECT_TRUE(at::allclose(outputs[0], expected[0], 1e-4, 1e-5));
      }
    }
  };
  const std::string log = log_of([&] {
    std::vector<std::thread> threads;
    for (int k = 0; k < 4; ++k) threads.emplace_back(call_all);
    for (std::thread& thread : threads) thread.join();
    call_all();
  });
  EXPECT_EQ(count(log, "measured"), 3);
}

// Where there is AMX, of bf16x3: the call is tuned and computed in float32.
TEST_F(Tuned, ValuesOutOfRangeAreComputedInFloat32) {
  Arguments a = sequence_problem({12, 64, 24, 48}, at::kFloat, 1);
  a.input.mul_(0x1p62);
  a.weights.mul_(0x1p-62);
  for (int call = 0; call < 2; ++call) {
    const Tensors outputs = sequence(a), expected = eager_sequence(a);
    for (size_t k = 0; k < outputs.size(); ++k) {
      EXPECT_TRUE(at::allclose(outputs[k], expected[k], 1e-4, 1e-5)) << k;
    }
  }
}

TEST_F(Tuned, WhatHasNoScheduleIsNot) {
  const Arguments float64 = sequence_problem({12, 10, 24, 48}, at::kDouble, 1);
  EXPECT_EQ(count(log_of([&] { sequence(float64); }), "tuned"), 0);
  const Arguments empty = sequence_problem({0, 10, 24, 48}, at::kFloat, 1);
  EXPECT_EQ(count(log_of([&] { sequence(empty); }), "tuned"), 0);
}

}  // namespace
}  // namespace lltm_test
