// The engines of the CPU by schedules of the tests' choice: right by every division of the work
// that a schedule can name, also where schedule.cpp would choose another. With the emulated kernels
// for AMX too (lstm/dispatch.cpp).
#include "testing.h"

#include "cpu/engine/engine.h"
#include "cpu/gemm/formats.h"
#include "cpu/packed_weights.h"

#include <lltm/ops.h>

#include <ATen/ATen.h>

#include <initializer_list>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

using lltm::SequenceResult;
using lltm::cpu::BackwardSchedule;
using lltm::cpu::FewRowsSchedule;
using lltm::cpu::ForwardSchedule;
using lltm::cpu::GemmFormat;
using lltm::cpu::Grid;
using lltm::cpu::LayerShape;
using lltm::cpu::Machine;

// One slot, slots that share blocks, rows, and both; more slots than there are threads.
constexpr Grid kGrids[] = {{1, 1}, {3, 1}, {1, 3}, {2, 3}};

// Chunks of one step, and of several.
constexpr int64_t kChunkRows[] = {1, 100};

// The narrowest blocks, which leave some threads of wide grids more than one, and the widest ones,
// of which there may be fewer than columns of threads.
std::vector<int64_t> block_widths(GemmFormat format) {
  const int64_t narrowest =
      lltm::cpu::visit_format(format, []<typename F>(F) { return F::kUnitAlign; });
  return {narrowest, lltm::cpu::max_forward_block_width(format)};
}

std::vector<ForwardSchedule> forward_schedules(
    GemmFormat format, const std::vector<int64_t>& widths) {
  std::vector<ForwardSchedule> schedules;
  for (const Grid& grid : kGrids) {
    for (const int64_t width : widths) {
      for (const int64_t rows : kChunkRows) {
        schedules.push_back({format, grid, width, /*merge_projection=*/false, rows});
        if (grid.rows == 1) schedules.push_back({format, grid, width, true, rows});
      }
    }
  }
  return schedules;
}

// The formats that a dtype may be multiplied in.
std::vector<GemmFormat> formats(const Machine& machine, at::ScalarType dtype) {
  if (dtype == at::kBFloat16 && machine.bf16) return {GemmFormat::kBf16};
  if (dtype != at::kBFloat16 && machine.bf16x3) return {GemmFormat::kF32, GemmFormat::kBf16x3};
  return {GemmFormat::kF32};
}

std::vector<BackwardSchedule> backward_schedules(const Machine& machine, at::ScalarType dtype) {
  std::vector<BackwardSchedule> schedules;
  for (const GemmFormat format : formats(machine, dtype)) {
    for (const GemmFormat gradient_format : formats(machine, dtype)) {
      // The state's gradients in bf16x3 and those of the weights in float32: nothing needs that.
      if (format == GemmFormat::kBf16x3 && gradient_format != format) continue;
      for (const Grid& grid : kGrids) {
        for (const int64_t width : block_widths(format)) {
          for (const int64_t rows : kChunkRows) {
            schedules.push_back({format, grid, width, rows, gradient_format});
          }
        }
      }
    }
  }
  return schedules;
}

// A problem, plain PyTorch's results, and the oracle's.
class Case {
 public:
  explicit Case(const Arguments& arguments)
      : a_(arguments),
        dtype_(a_.input.scalar_type()),
        bias_(*a_.bias),
        batch_sizes_(a_.batch_sizes.value_or(at::Tensor())),
        grads_(random_like(eager_sequence(a_), 7)),
        eager_(evaluate(eager_sequence, a_, grads_)),
        expected_(expect(a_, grads_)),
        checkpoints_(std::get<3>(lltm::cpu::stepwise_forward(args(a_.weights, kCheckpointSteps)))) {
  }

  void check_forward(const at::Tensor& weights) const {
    const bool prepacked = lltm::cpu::is_prepacked(weights);
    if (few()) {
      // Whether operands are float32 decides how results are rounded: that is as it would be.
      FewRowsSchedule schedule = schedule_few_rows(machine_, shape(), steps(), prepacked);
      for (const int64_t threads : {1, 3}) {
        for (const int64_t width : block_widths(GemmFormat::kF32)) {
          for (const int64_t rows : kChunkRows) {
            schedule.threads = threads;
            schedule.block_width = width;
            schedule.chunk_rows = rows;
            check(lltm::cpu::few_rows_forward, weights, schedule);
          }
        }
      }
      return;
    }
    for (const GemmFormat format : formats(machine_, dtype_)) {
      if (prepacked && !lltm::cpu::has_form(weights, format)) continue;
      for (const ForwardSchedule& schedule : forward_schedules(format, block_widths(format))) {
        check(lltm::cpu::blocked_forward, weights, schedule);
      }
    }
  }

  void check_backward() const {
    const SequenceResult saved = lltm::cpu::sequence_forward(args(a_.weights));
    const lltm::SequenceBackwardArgs backward = {
        args(a_.weights),
        /*checkpoint_steps=*/0,
        std::get<0>(saved),
        std::get<3>(saved),
        grads_[0],
        grads_[1],
        grads_[2],
        {true, true, true, true, true}};
    for (const BackwardSchedule& schedule : backward_schedules(machine_, dtype_)) {
      SCOPED_TRACE(to_string(schedule));
      const auto [input, h, c, weights, bias] =
          lltm::cpu::blocked_backward(backward, schedule).value();
      const Tensors gradients = {input, h, c, weights, bias};
      for (size_t k = 0; k < gradients.size(); ++k) {
        EXPECT_TRUE(is_accurate(gradients[k], eager_.gradients[k], expected_.gradients[k]))
            << kArgumentNames[k];
      }
    }
  }

  // Their error is that of the quantisation: the same by every schedule, up to rounding.
  void check_int8() const {
    const double tolerance = dtype_ == at::kFloat ? 1e-3 : 2e-2;
    const at::Tensor packed = lltm::prepack(a_.weights, at::kQInt8);
    std::vector<SequenceResult> results;
    for (const ForwardSchedule& schedule : forward_schedules(GemmFormat::kInt8, {0})) {
      SCOPED_TRACE(to_string(schedule));
      results.push_back(lltm::cpu::blocked_int8_forward(args(packed), schedule).result);
      const auto [output, h_n, c_n, saved] = results.back();
      const auto& first = results.front();
      EXPECT_TRUE(at::allclose(output, std::get<0>(first), tolerance, tolerance));
      EXPECT_TRUE(at::allclose(c_n, std::get<2>(first), tolerance, tolerance));
    }
  }

 private:
  static constexpr int64_t kCheckpointSteps = 2;

  lltm::SequenceArgs args(const at::Tensor& weights, int64_t checkpoint_steps = 0) const {
    return {
        {a_.input, a_.h, a_.c, weights, bias_, batch_sizes_, a_.reverse},
        checkpoint_steps,
        /*save=*/true};
  }
  LayerShape shape() const {
    const int64_t input = a_.input.size(-1);
    return {a_.h.size(0), input, a_.h.size(1), a_.input.numel() / input};
  }
  int64_t steps() const { return batch_sizes_.defined() ? batch_sizes_.size(0) : a_.input.size(0); }
  // Of the engine for few elements.
  bool few() const {
    return dtype_ == at::kFloat && lltm::cpu::has_few_elements(a_.h.size(0), a_.h.size(1));
  }

  template <typename Engine, typename Schedule>
  void check(const Engine& engine, const at::Tensor& weights, const Schedule& schedule) const {
    SCOPED_TRACE(to_string(schedule));
    const std::optional<SequenceResult> result = engine(args(weights), schedule);
    ASSERT_TRUE(result.has_value());
    const Tensors outputs = {std::get<0>(*result), std::get<1>(*result), std::get<2>(*result)};
    for (size_t k = 0; k < outputs.size(); ++k) {
      EXPECT_TRUE(is_accurate(outputs[k], eager_.outputs[k], expected_.outputs[k])) << k;
    }
    const std::optional<SequenceResult> other = engine(args(weights, kCheckpointSteps), schedule);
    ASSERT_TRUE(other.has_value());
    const double tolerance = 16 * epsilon(dtype_);
    EXPECT_TRUE(at::allclose(std::get<3>(*other), checkpoints_, tolerance, tolerance));
  }

  const Arguments a_;
  const at::ScalarType dtype_;
  const at::Tensor bias_, batch_sizes_;
  const Tensors grads_;
  const Evaluation eager_;
  const Expected expected_;
  const at::Tensor checkpoints_;
  const Machine machine_ = lltm::cpu::current_machine();
};

class Engines : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!lltm::cpu::current_machine().f32) GTEST_SKIP() << "the blocked engine needs AVX2";
  }

  // Calls test(case) for problems of few rows, of few units, of sizes that fill no vector, of rows
  // that end and begin.
  template <typename Test>
  void for_each_case(const Test& test) const {
    std::vector<Arguments> problems;
    for (const Sizes& sizes :
         {Sizes{9, 3, 19, 130},
          {34, 3, 19, 70},  // more than few steps
          {12, 40, 7, 16},
          {6, 5, 33, 70},
          {5, 33, 20, 100},
          {4, 130, 9, 65}}) {
      problems.push_back(sequence_problem(sizes, GetParam(), problems.size() + 1));
    }
    // Batch first in memory, which cannot be read in place.
    problems.push_back(sequence_problem({9, 40, 12, 48}, GetParam(), 8));
    problems.back().input = problems.back().input.transpose(0, 1).contiguous().transpose(0, 1);
    std::vector<int64_t> lengths;
    for (int64_t row = 0; row < 70; ++row) lengths.push_back(12 - row / 6);
    problems.push_back(packed_problem(lengths, 33, 65, GetParam(), 9));
    problems.push_back(problems.back());
    for (size_t k = 0; k < problems.size(); k += 2) problems[k].reverse = true;
    for (const Arguments& arguments : problems) {
      SCOPED_TRACE(testing::Message() << arguments.input.sizes() << ' ' << arguments.h.sizes());
      test(Case(arguments), arguments.weights);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes, Engines, testing::Values(at::kFloat, at::kBFloat16, at::kHalf), [](const auto& info) {
      return name(info.param);
    });

TEST_P(Engines, AreAsAccurateAsPlainPyTorchByEverySchedule) {
  for_each_case([](const Case& problem, const at::Tensor& weights) {
    problem.check_forward(weights);
    problem.check_backward();
  });
}

TEST_P(Engines, OfPrepackedWeightsAreAsAccurateAsPlainPyTorchByEverySchedule) {
  for_each_case([](const Case& problem, const at::Tensor& weights) {
    problem.check_forward(lltm::prepack(weights));
  });
}

TEST_P(Engines, OfWeightsInInt8GiveTheSameByEverySchedule) {
  for_each_case([](const Case& problem, const at::Tensor&) { problem.check_int8(); });
}

TEST(Machine, SaysHowLargeTheCacheOfACoreIs) {
  EXPECT_GE(lltm::cpu::current_machine().l2, 64 << 10);
}

}  // namespace
}  // namespace lltm_test
