// Every division of work, even if schedule.cpp would not choose it; also with emulated AMX kernels
// (choosable_amx_dispatch.cpp).
#include "cell_arguments.h"
#include "common/heads.h"
#include "cpu/engine/engine.h"
#include "cpu/gemm/formats.h"
#include "cpu/prepack.h"

#include <ATen/ATen.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace lltm_test {
namespace {

using lltm::SequenceResult;
using lltm::cpu::BackwardSchedule;
using lltm::cpu::ForwardSchedule;
using lltm::cpu::GemmFormat;
using lltm::cpu::Grid;
using lltm::cpu::LayerShape;
using lltm::cpu::Machine;
using lltm::cpu::Partition;
using lltm::cpu::SmallBatchSchedule;

// Shared blocks, shared rows, and both; more positions than threads.
constexpr Grid kGrids[] = {{1, 1}, {3, 1}, {1, 3}, {2, 3}};

constexpr int64_t kChunkRows[] = {1, 100};

// The narrowest, several per thread, and the widest, possibly fewer than grid columns.
std::vector<Partition> blocks_of(const LayerShape& shape, GemmFormat format) {
  const int64_t narrowest =
      lltm::cpu::visit_format(format, []<typename F>(F) { return F::kUnitAlign; });
  const auto of_width = [&](int64_t width) {
    const int64_t of_head = (shape.head_units() + width - 1) / width;
    return Partition(shape.hidden, narrowest, shape.heads * of_head);
  };
  return {of_width(narrowest), of_width(lltm::cpu::max_forward_block_width(format))};
}

std::vector<ForwardSchedule> forward_schedules(
    GemmFormat format, const std::vector<Partition>& all_blocks) {
  std::vector<ForwardSchedule> schedules;
  for (const Grid& grid : kGrids) {
    for (const Partition& blocks : all_blocks) {
      for (const int64_t rows : kChunkRows) {
        schedules.push_back({format, grid, blocks, /*merge_projection=*/false, rows});
        schedules.push_back({format, grid, blocks, /*merge_projection=*/true, rows});
      }
    }
  }
  return schedules;
}

// Emulation changes nothing but AMX GEMMs.
const bool kMatrixUnitOnly = std::getenv("LLTM_EMULATED_AMX") != nullptr;

std::vector<GemmFormat> formats(const Machine& machine, at::ScalarType dtype) {
  if (dtype != at::kBFloat16 && machine.bf16x3 && kMatrixUnitOnly) return {GemmFormat::kBf16x3};
  if (dtype == at::kBFloat16 && machine.bf16) return {GemmFormat::kF32, GemmFormat::kBf16};
  if (dtype != at::kBFloat16 && machine.bf16x3) return {GemmFormat::kF32, GemmFormat::kBf16x3};
  return {GemmFormat::kF32};
}

std::vector<BackwardSchedule> backward_schedules(
    const Machine& machine, at::ScalarType dtype, const LayerShape& shape) {
  std::vector<BackwardSchedule> schedules;
  for (const GemmFormat format : formats(machine, dtype)) {
    for (const GemmFormat gradient_format : formats(machine, dtype)) {
      // Schedules only combine float32 state gradients with bf16x3 weight gradients.
      const bool combined = format != gradient_format;
      if (combined && (format != GemmFormat::kF32 || gradient_format == GemmFormat::kBf16))
        continue;
      for (const Grid& grid : kGrids) {
        for (const Partition& blocks : blocks_of(shape, format)) {
          for (const int64_t rows : kChunkRows) {
            const int64_t threads = grid.workers() == 6 ? 7 : grid.workers();
            schedules.push_back({format, grid, blocks, rows, gradient_format, threads});
          }
        }
      }
    }
  }
  return schedules;
}

class Case {
 public:
  explicit Case(const Arguments& arguments)
      : a_(arguments),
        dtype_(a_.input.scalar_type()),
        grads_(random_gradients(a_)),
        eager_(evaluate(eager_sequence, a_, grads_)),
        expected_(expect(a_, grads_)),
        checkpoints_(std::get<3>(lltm::cpu::per_step_forward(args(kCheckpointSteps)))) {}

  void check_forward(const at::Tensor& packed = {}) const {
    const bool prepacked = packed.defined();
    if (few()) {
      if (kMatrixUnitOnly) return;
      // Keeps the operand type, which determines the rounding.
      SmallBatchSchedule schedule = schedule_small_batch(machine_, shape(), steps(), prepacked);
      for (const Grid grid : {Grid{1, 1}, Grid{1, 3}, Grid{2, 1}, Grid{3, 2}}) {
        for (const Partition& blocks : blocks_of(shape(), GemmFormat::kF32)) {
          for (const int64_t rows : kChunkRows) {
            schedule.grid = grid;
            schedule.blocks = blocks;
            schedule.chunk_rows = rows;
            check(lltm::cpu::small_batch_forward, packed, schedule);
          }
        }
      }
      if (!lltm::find_cell(a_.cell)->forgets) return;  // other cells can use either engine
    }
    for (const GemmFormat format : formats(machine_, dtype_)) {
      if (prepacked && !lltm::cpu::has_form(lltm::cpu::bytes_of(packed), format)) continue;
      for (const ForwardSchedule& schedule :
           forward_schedules(format, blocks_of(shape(), format))) {
        check(lltm::cpu::blocked_forward, packed, schedule);
      }
    }
  }

  // Dense, without a mask and resets.
  void check_small_layer() const {
    for (const at::Tensor& packed : {at::Tensor(), pack(a_)}) {
      lltm::SequenceArgs small = args(/*checkpoint_steps=*/0, packed);
      small.save = false;
      check_outputs(lltm::cpu::small_layer_forward(small));
    }
  }

  void check_backward() const {
    if (has_jumps(a_)) return;
    const SequenceResult saved = lltm::cpu::sequence_forward(args());
    const bool has_c = a_.c.defined();
    const lltm::SequenceBackwardArgs backward = {
        args(),
        std::get<0>(saved),
        std::get<3>(saved),
        grads_[0],
        grads_[1],
        has_c ? grads_[2] : at::Tensor(),
        {true, true, has_c, true, a_.weight_hh.has_value(), true, a_.bias_hh.has_value()}};
    for (const BackwardSchedule& schedule : backward_schedules(machine_, dtype_, shape())) {
      SCOPED_TRACE(to_string(schedule));
      const auto [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] =
          lltm::call_backward(backward, [&](const lltm::SequenceBackwardArgs& args) {
            return lltm::cpu::blocked_backward(args, schedule).value();
          });
      // In the order of `differentiable`.
      Tensors gradients;
      for (const at::Tensor& gradient : {input, h, c, weight_ih, bias_ih, weight_hh, bias_hh}) {
        if (gradient.defined()) gradients.push_back(gradient);
      }
      ASSERT_EQ(gradients.size(), eager_.gradients.size());
      for (size_t k = 0; k < gradients.size(); ++k) {
        EXPECT_TRUE(is_accurate(gradients[k], eager_.gradients[k], expected_.gradients[k]))
            << argument_names(a_)[k];
      }
    }
  }

  // The quantization error is equal for every schedule up to rounding.
  void check_int8() const {
    const double tolerance = dtype_ == at::kFloat ? 1e-3 : 2e-2;
    const at::Tensor packed = pack(a_, at::kQInt8);
    std::vector<SequenceResult> results;
    for (const ForwardSchedule& schedule : forward_schedules(GemmFormat::kInt8, {Partition()})) {
      SCOPED_TRACE(to_string(schedule));
      results.push_back(lltm::cpu::blocked_int8_forward(args(0, packed), schedule).result);
      const auto [output, h_n, c_n, saved] = results.back();
      const auto& first = results.front();
      EXPECT_TRUE(at::allclose(output, std::get<0>(first), tolerance, tolerance));
      EXPECT_TRUE(at::allclose(c_n, std::get<2>(first), tolerance, tolerance));
    }
  }

 private:
  static constexpr int64_t kCheckpointSteps = 2;

  lltm::SequenceArgs args(int64_t checkpoint_steps = 0, const at::Tensor& packed = {}) const {
    lltm::SequenceArgs args = {engine_inputs(a_, checkpoint_steps), /*save=*/true};
    if (packed.defined()) {
      args.weight_ih = packed;
      args.weight_hh = args.recurrent_mask = at::Tensor();
    }
    return args;
  }
  LayerShape shape() const {
    const int64_t input = a_.input.size(-1);
    return {
        a_.h.size(0),
        input,
        a_.h.size(1),
        a_.input.numel() / input,
        /*bf16=*/false,
        lltm::cpu::slots_of(*lltm::find_cell(a_.cell)),
        lltm::cpu::packed_heads_of(args().weight_hh)};
  }
  int64_t steps() const { return (a_.batch_sizes ? *a_.batch_sizes : a_.input).size(0); }
  bool few() const {
    return dtype_ == at::kFloat && lltm::cpu::has_few_elements(a_.h.size(0), a_.h.size(1));
  }

  template <typename Engine, typename Schedule>
  void check(const Engine& engine, const at::Tensor& packed, const Schedule& schedule) const {
    SCOPED_TRACE(to_string(schedule));
    const std::optional<SequenceResult> result = engine(args(0, packed), schedule);
    ASSERT_TRUE(result.has_value());
    check_outputs(*result);
    const std::optional<SequenceResult> other = engine(args(kCheckpointSteps, packed), schedule);
    ASSERT_TRUE(other.has_value());
    const double tolerance = 16 * epsilon(dtype_);
    EXPECT_TRUE(at::allclose(std::get<3>(*other), checkpoints_, tolerance, tolerance));
  }

  void check_outputs(const SequenceResult& result) const {
    const Tensors outputs = {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
    for (size_t k = 0; k < eager_.outputs.size(); ++k) {  // without c there is no c_n
      EXPECT_TRUE(is_accurate(outputs[k], eager_.outputs[k], expected_.outputs[k])) << k;
    }
  }

  const Arguments a_;
  const at::ScalarType dtype_;
  const Tensors grads_;
  const Evaluation eager_;
  const Evaluation expected_;
  const at::Tensor checkpoints_;
  const Machine machine_ = lltm::cpu::current_machine();
};

class Engines : public testing::TestWithParam<std::tuple<at::ScalarType, const char*>> {
 protected:
  void SetUp() override {
    if (!lltm::cpu::current_machine().f32) GTEST_SKIP() << "the blocked engine needs AVX2";
  }

  // Small batches, few hidden units, partial vectors, packed sequences, resets; recurrent masks if
  // supported.
  template <typename Test>
  void for_each_case(const Test& test, bool masks = false) const {
    const auto& [dtype, cell] = GetParam();
    std::vector<Arguments> problems;
    for (const Sizes& sizes :
         {Sizes{9, 3, 19, 130},
          {34, 3, 19, 70},  // too many steps for the small-batch engine
          {12, 40, 7, 16},
          {6, 5, 33, 70},
          {5, 33, 20, 100},
          {4, 130, 9, 65}}) {
      problems.push_back(sequence_problem(sizes, dtype, problems.size() + 1, true, cell));
    }
    // Batch-first memory, which cannot be read in place.
    problems.push_back(sequence_problem({9, 40, 12, 48}, dtype, 8, /*bias=*/true, cell));
    problems.back().input = problems.back().input.transpose(0, 1).contiguous().transpose(0, 1);
    problems.push_back(packed_problem(falling_lengths(70, 12), 33, 65, dtype, 9, cell));
    problems.push_back(problems.back());
    for (size_t k = 0; k < problems.size(); k += 2) problems[k].reverse = true;
    for (size_t k = 0; k < problems.size(); ++k) {
      if (k % 3 == 1) problems[k].reset = random_reset(problems[k], /*seed=*/k);
      if (masks && (k == 4 || k % 3 == 2)) {
        problems[k].recurrent_mask = random_mask(problems[k], /*seed=*/k);
      }
    }
    const bool all = std::string_view(cell) == "lltm";
    if (!all) {  // small, blocked and packed problems, and heads
      problems = {problems[0], problems[4], problems[8]};
      for (const Sizes& sizes : {Sizes{9, 3, 19, 96}, {34, 2, 19, 64}, {5, 40, 33, 128}}) {
        problems.push_back(sequence_problem(sizes, dtype, problems.size(), true, cell));
        Arguments& a = problems.back();
        a.weight_hh = a.weight_hh->narrow(1, 0, 32).reshape({a.h.size(1) / 32, -1, 32});
        a.reverse = problems.size() % 2 == 0;
        a.reset = random_reset(a, /*seed=*/problems.size());
      }
    }
    for (const Arguments& arguments : problems) {
      SCOPED_TRACE(testing::Message() << arguments.input.sizes() << ' ' << arguments.h.sizes());
      test(Case(arguments), arguments);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    Engines,
    testing::Combine(
        testing::Values(at::kFloat, at::kBFloat16, at::kHalf), testing::ValuesIn(kCells)),
    [](const auto& info) { return name(std::get<0>(info.param)) + '_' + std::get<1>(info.param); });

TEST_P(Engines, AreAsAccurateAsTheReferenceWithEverySchedule) {
  for_each_case(
      [](const Case& problem, const Arguments&) {
        problem.check_forward();
        problem.check_backward();
      },
      /*masks=*/true);
}

TEST_P(Engines, WithPrepackedWeightsAreAsAccurateAsTheReferenceWithEverySchedule) {
  for_each_case([](const Case& problem, const Arguments& arguments) {
    problem.check_forward(pack(arguments));
  });
}

TEST(SmallLayer, IsAsAccurateAsTheReference) {
  if (!lltm::cpu::current_machine().f32) GTEST_SKIP() << "the small-layer engine needs AVX2";
  for (const char* const cell : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
    for (const int64_t hidden : {1, 5, 8, 15, 16, 21, 40, 70}) {
      const bool odd = hidden % 2 != 0;
      const Sizes sizes = {20, odd ? 1 : 3, hidden / 2 + 1, hidden};
      Arguments a = sequence_problem(sizes, at::kFloat, /*seed=*/hidden, /*bias=*/odd, cell);
      a.reverse = hidden > 15;
      a.input = a.input.transpose(0, 1).contiguous().transpose(0, 1);  // batch-first memory
      SCOPED_TRACE(testing::Message() << cell << ' ' << hidden);
      Case(a).check_small_layer();
    }
  }
}

TEST_P(Engines, WithInt8WeightsGiveTheSameResultsWithEverySchedule) {
  if (!info_of(std::get<1>(GetParam())).bounded) GTEST_SKIP() << "not in int8";
  for_each_case([](const Case& problem, const Arguments&) { problem.check_int8(); });
}

TEST(Machine, ReportsTheCacheOfACore) {
  EXPECT_GE(lltm::cpu::current_machine().l2, 64 << 10);
}

}  // namespace
}  // namespace lltm_test
