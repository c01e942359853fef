// Schedules for machines other than this one (cpu/schedule.h), by their cache sizes.
#include "cpu/schedule.h"

#include "cpu/gemm/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm::cpu {
namespace {

struct Named {
  const char* name;
  Machine machine;
};

// Caches of one core; 16 threads. L3 as one socket shares it.
const Named kZen4 = {
    "Zen 4", {32 << 10, 1 << 20, 32 << 20, 16, /*f32=*/true, /*bf16=*/true, /*bf16x3=*/false}};
const Named kCascadeLake = {
    "Cascade Lake", {32 << 10, 1 << 20, 36 << 20, 16, true, /*bf16=*/false, false}};
const Named kSapphireRapids = {
    "Sapphire Rapids", {48 << 10, 2 << 20, 105 << 20, 16, true, true, /*bf16x3=*/true}};

// Rows as of 100 steps.
LayerShape shape(int64_t batch, int64_t input, int64_t hidden, bool bf16 = false) {
  return {batch, input, hidden, 100 * batch, bf16};
}

struct Expected {
  Named machine;
  LayerShape shape;
  std::string forward, backward;
};

TEST(Schedule, IsWhatTheSizesAndTheCachesAskFor) {
  const std::vector<Expected> table = {
      {kZen4,
       shape(16, 32, 128),
       "forward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kZen4,
       shape(64, 128, 256),
       "forward: GEMM float32, threads 8 x 2 (rows x blocks), blocks of 64 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 8 x 2 (rows x blocks), blocks of 128 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kZen4,
       shape(128, 512, 512),
       "forward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kZen4,
       shape(128, 512, 512, /*bf16=*/true),
       "forward: GEMM bfloat16, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM bfloat16, threads 16 x 1 (rows x blocks), blocks of 256 units, chunks of "
       "4096 rows, gradient GEMMs bfloat16"},
      {kCascadeLake,
       shape(16, 32, 128),
       "forward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kCascadeLake,
       shape(64, 128, 256),
       "forward: GEMM float32, threads 8 x 2 (rows x blocks), blocks of 64 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 8 x 2 (rows x blocks), blocks of 128 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kCascadeLake,
       shape(128, 512, 512),
       "forward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kCascadeLake,
       shape(128, 512, 512, /*bf16=*/true),
       "forward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 512 "
       "rows, gradient GEMMs float32"},
      {kSapphireRapids,
       shape(16, 32, 128),
       "forward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 2 x 8 (rows x blocks), blocks of 16 units, chunks of 512 "
       "rows, gradient GEMMs bf16x3"},
      {kSapphireRapids,
       shape(64, 128, 256),
       "forward: GEMM bf16x3, threads 1 x 8 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM float32, threads 8 x 2 (rows x blocks), blocks of 128 units, chunks of 512 "
       "rows, gradient GEMMs bf16x3"},
      {kSapphireRapids,
       shape(128, 512, 512),
       "forward: GEMM bf16x3, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM bf16x3, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 512 "
       "rows, gradient GEMMs bf16x3"},
      {kSapphireRapids,
       shape(128, 512, 512, /*bf16=*/true),
       "forward: GEMM bfloat16, threads 1 x 16 (rows x blocks), blocks of 32 units, chunks of 256 "
       "rows, input projection per step",
       "backward: GEMM bfloat16, threads 16 x 1 (rows x blocks), blocks of 256 units, chunks of "
       "4096 rows, gradient GEMMs bfloat16"},
  };
  for (const auto& [machine, shape, forward, backward] : table) {
    SCOPED_TRACE(machine.name);
    EXPECT_EQ(to_string(schedule_forward(machine.machine, shape)), forward);
    EXPECT_EQ(to_string(schedule_backward(machine.machine, shape)), backward);
  }
}

// With the number of threads of a laptop, of a machine with an L2 cache of 1 MiB.
TEST(Schedule, OfOtherNumbersOfThreads) {
  Machine machine = kZen4.machine;
  const std::vector<std::pair<int64_t, std::string>> expected = {
      {1,
       "forward: GEMM float32, threads 1 x 1 (rows x blocks), blocks of 64 units, chunks of 64 "
       "rows, input projection per chunk"},
      {2,
       "forward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 64 units, chunks of 256 "
       "rows, input projection per step"},
      {6,
       "forward: GEMM float32, threads 4 x 1 (rows x blocks), blocks of 64 units, chunks of 256 "
       "rows, input projection per step"}};
  for (const auto& [threads, forward] : expected) {
    machine.threads = threads;
    EXPECT_EQ(to_string(schedule_forward(machine, shape(32, 128, 256))), forward);
  }
}

// The format of A decides how results are rounded, and is the same on every machine.
TEST(Schedule, OfFewRows) {
  for (const Named& machine : {kZen4, kCascadeLake, kSapphireRapids}) {
    SCOPED_TRACE(machine.name);
    for (const bool prepacked : {false, true}) {
      EXPECT_EQ(
          to_string(schedule_few_rows(machine.machine, shape(1, 32, 128), 100, prepacked)),
          "forward: few rows, weights packed, GEMM accumulated in float64 of 64-bit h and x, "
          "threads 1, blocks of 64 units, chunks of 64 rows");
      EXPECT_EQ(
          to_string(schedule_few_rows(machine.machine, shape(4, 300, 300), 100, prepacked)),
          "forward: few rows, weights packed, GEMM accumulated in float64 of 32-bit h and x, "
          "threads 10, blocks of 32 units, chunks of 64 rows");
    }
  }
}

TEST(Schedule, OfFewSteps) {
  const auto in_place = [](int64_t steps, int64_t batch, bool prepacked) {
    const FewRowsSchedule schedule =
        schedule_few_rows(kZen4.machine, shape(batch, 32, 128), steps, prepacked);
    EXPECT_EQ(schedule.float_operand, steps <= 32 && batch <= 4);
    return schedule.in_place;
  };
  EXPECT_TRUE(in_place(1, 1, false));
  EXPECT_TRUE(in_place(32, 1, false));
  EXPECT_TRUE(in_place(32, 4, false));
  EXPECT_FALSE(in_place(33, 1, false));
  EXPECT_FALSE(in_place(1, 1, true)) << "prepacked";
  EXPECT_FALSE(in_place(1, 5, false)) << "rows of one step";
  EXPECT_EQ(
      to_string(schedule_few_rows(kZen4.machine, shape(1, 32, 128), 32, /*prepacked=*/false)),
      "forward: few rows, weights in place, GEMM float32, threads 1, blocks of 64 units, chunks of "
      "64 rows");
  EXPECT_EQ(
      to_string(schedule_few_rows(kZen4.machine, shape(1, 32, 128), 32, /*prepacked=*/true)),
      "forward: few rows, weights packed, GEMM accumulated in float64 of 32-bit h and x, threads "
      "1, "
      "blocks of 64 units, chunks of 64 rows");
}

std::string of_one_step(
    int64_t batch,
    Storage storage = Storage::kF32,
    int64_t hidden = 256,
    const Machine& machine = kZen4.machine) {
  return to_string(schedule_cell(machine, {batch, 128, hidden, storage, 128 + hidden}));
}

TEST(Schedule, OfOneStep) {
  EXPECT_EQ(
      of_one_step(1, Storage::kF32, 64),
      "cell: threads 1, blocks of 64 units, forward by scalar products, backward by the float32 "
      "kernel");
  EXPECT_EQ(
      of_one_step(1),
      "cell: threads 16, blocks of 16 units, forward by scalar products, backward by the float32 "
      "kernel");
  EXPECT_EQ(
      of_one_step(16),
      "cell: threads 16, blocks of 16 units, forward by the GEMM kernel, backward by the float32 "
      "kernel");
}

// Whether the text of a schedule has one of these words.
bool has(const std::string& schedule, const std::string& words) {
  return schedule.find(words) != std::string::npos;
}

TEST(Schedule, OfOneStepByDtype) {
  const Machine plain = {32 << 10, 1 << 20, 32 << 20, 16, /*f32=*/false, false, false};
  for (const Storage storage : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    EXPECT_TRUE(has(of_one_step(4, storage), "forward by scalar products"));
    EXPECT_TRUE(has(of_one_step(15, storage), "backward by the float32 kernel"));
    EXPECT_TRUE(has(of_one_step(64, storage, 256, plain), "forward by ATen, backward by ATen"));
  }
  EXPECT_TRUE(has(of_one_step(1, Storage::kF64), "forward by ATen, backward by ATen"));
  EXPECT_TRUE(has(of_one_step(16, Storage::kF16), "forward by ATen, backward by the float32"));
  EXPECT_TRUE(
      has(of_one_step(16, Storage::kBf16), "forward by the GEMM kernel, backward by the bf"));
  EXPECT_TRUE(
      has(of_one_step(16, Storage::kBf16, 256, kCascadeLake.machine), "backward by the fl"));
  EXPECT_TRUE(has(of_one_step(16, Storage::kBf16, 255), "forward by ATen, backward by the bf"))
      << "pairs of elements do not begin at even columns";
}

TEST(Schedule, OfOneStepByTheWeightsLayout) {
  const auto by_stride = [](int64_t stride, Storage storage = Storage::kF32) {
    return to_string(schedule_cell(kZen4.machine, {16, 128, 256, storage, stride}));
  };
  EXPECT_TRUE(has(by_stride(0), "forward by ATen, backward by ATen")) << "columns side by side";
  EXPECT_TRUE(has(by_stride(400), "forward by the GEMM kernel, backward by the float32 kernel"));
  EXPECT_TRUE(has(by_stride(400, Storage::kBf16), "forward by ATen, backward by the bfloat16"))
      << "oneDNN keeps a kernel for every stride";
  constexpr int64_t kWide = 1 << 21;
  EXPECT_TRUE(
      has(to_string(schedule_cell(kZen4.machine, {16, kWide - 256, 256, Storage::kBf16, kWide})),
          "forward by ATen"))
      << "its offsets are of 32 bits";
}

// C (65, 192) has 50 kB: of float32 a copy for every 128 rows of a chunk.
TEST(Schedule, OfTheGradientGemm) {
  for (const auto& [format, slice, group, copies] :
       {std::tuple{GemmFormat::kF32, 512, 512, 4},
        {GemmFormat::kBf16, 1024, 512, 16},
        {GemmFormat::kBf16x3, 128, 65, 16}}) {
    SCOPED_TRACE(to_string(format));
    const GradientGemmSchedule schedule =
        schedule_gradient_gemm(kSapphireRapids.machine, format, 65, 192);
    EXPECT_EQ(schedule.slice_rows, slice);
    EXPECT_EQ(schedule.group_rows, group);
    EXPECT_EQ(schedule.accumulators, copies);
  }
}

// Of bf16x3 all together take 32 MiB at most; there is always one.
TEST(Schedule, OfTheGradientGemmsAccumulators) {
  for (const auto& [n, copies] : {std::pair{2048, 2}, {1024, 4}, {4096, 1}, {8192, 1}}) {
    EXPECT_EQ(
        schedule_gradient_gemm(kSapphireRapids.machine, GemmFormat::kBf16x3, 2048, n).accumulators,
        copies)
        << n;
  }
}

const std::vector<LayerShape> kShapes = {
    shape(1, 32, 128),
    shape(16, 32, 128),
    shape(64, 128, 256),
    shape(128, 512, 512),
    shape(20, 300, 650),
    shape(7, 33, 17),
    shape(1024, 1024, 2048),
    shape(16, 32, 128, /*bf16=*/true),
    shape(128, 512, 512, /*bf16=*/true)};

// What holds on every machine.
TEST(Schedule, KeepsItsPromises) {
  for (const int64_t l2 : {256 << 10, 1 << 20, 2 << 20, 8 << 20}) {
    for (const int64_t threads : {1, 2, 16, 128}) {
      for (const bool amx : {false, true}) {
        const Machine machine = {32 << 10, l2, 32 << 20, threads, true, amx, amx};
        for (const LayerShape& layer : kShapes) {
          const ForwardSchedule forward = schedule_forward(machine, layer);
          const BackwardSchedule backward = schedule_backward(machine, layer);
          SCOPED_TRACE(to_string(forward) + "; " + to_string(backward));
          EXPECT_LE(forward.grid.slots(), threads);
          EXPECT_LE(backward.grid.slots(), threads);
          EXPECT_LE(forward.block_width, max_forward_block_width(forward.format));
          const int64_t align = visit_format(
              forward.format, []<typename Format>(Format) { return Format::kUnitAlign; });
          EXPECT_EQ(forward.block_width % align, 0);
          EXPECT_GT(backward.block_width, 0);
          if (!amx) {
            EXPECT_EQ(forward.format, GemmFormat::kF32);
            EXPECT_EQ(backward.gradient_format, GemmFormat::kF32);
          }
          EXPECT_TRUE(!forward.merge_projection || forward.grid.rows == 1);
        }
      }
    }
  }
}

// ---- what LLTM_TUNE tries ---------------------------------------------------

template <typename Schedule>
void check_alternatives(
    const Machine& machine,
    const LayerShape& layer,
    const Schedule& schedule,
    const std::function<void(const Schedule&)>& check) {
  for (const Aspect aspect : kAspects) {
    const std::vector<Schedule> found = alternatives(machine, layer, schedule, aspect);
    EXPECT_LE(found.size(), 16);
    for (size_t k = 0; k < found.size(); ++k) {
      SCOPED_TRACE(to_string(schedule) + "; " + to_string(found[k]));
      EXPECT_NE(found[k], schedule);
      EXPECT_EQ(std::find(found.begin(), found.begin() + k, found[k]), found.begin() + k);
      check(found[k]);
    }
  }
}

TEST(Alternatives, KeepThePromisesOfSchedules) {
  const auto align = [](GemmFormat format) {
    return visit_format(format, []<typename Format>(Format) { return Format::kUnitAlign; });
  };
  for (const int64_t threads : {1, 2, 6, 16, 128}) {
    for (const bool amx : {false, true}) {
      const Machine machine = {32 << 10, 1 << 20, 32 << 20, threads, true, amx, amx};
      for (const LayerShape& layer : kShapes) {
        check_alternatives<ForwardSchedule>(
            machine, layer, schedule_forward(machine, layer), [&](const ForwardSchedule& s) {
              EXPECT_LE(s.grid.slots(), threads);
              EXPECT_LE(s.grid.columns, Blocks(layer.hidden, s.block_width).count);
              EXPECT_LE(s.block_width, max_forward_block_width(s.format));
              EXPECT_EQ(s.block_width % align(s.format), 0);
              EXPECT_TRUE(!s.merge_projection || s.grid.rows == 1);
              EXPECT_TRUE(s.format != GemmFormat::kBf16x3 || (amx && layer.batch >= 16));
            });
        check_alternatives<ForwardSchedule>(
            machine, layer, schedule_forward_int8(machine, layer), [&](const ForwardSchedule& s) {
              EXPECT_EQ(s.format, GemmFormat::kInt8);
            });
        check_alternatives<BackwardSchedule>(
            machine, layer, schedule_backward(machine, layer), [&](const BackwardSchedule& s) {
              EXPECT_LE(s.grid.slots(), threads);
              EXPECT_LE(s.block_width, s.format == GemmFormat::kF32 ? 128 : 256);
              EXPECT_EQ(s.block_width % align(s.format), 0);
              EXPECT_TRUE(s.format != GemmFormat::kBf16x3 || (amx && layer.batch >= 16));
              EXPECT_EQ(s.gradient_format == GemmFormat::kBf16, s.format == GemmFormat::kBf16);
            });
        for (const int64_t steps : {8, 100}) {
          const FewRowsSchedule few = schedule_few_rows(machine, layer, steps, /*prepacked=*/false);
          check_alternatives<FewRowsSchedule>(machine, layer, few, [&](const FewRowsSchedule& s) {
            EXPECT_LE(s.threads, threads);
            EXPECT_LE(s.threads, Blocks(layer.hidden, s.block_width).count);
            EXPECT_EQ(s.block_width % 16, 0);
            EXPECT_LE(s.block_width, 64);
            // These decide how results are rounded.
            EXPECT_EQ(s.float_operand, few.float_operand);
            EXPECT_EQ(s.in_place, few.in_place);
          });
        }
      }
    }
  }
}

// Two threads, 64 rows of 256 units.
TEST(Alternatives, AreTheNeighboursInEveryAspect) {
  Machine machine = kZen4.machine;
  machine.threads = 2;
  const LayerShape layer = shape(64, 128, 256);
  const auto texts = [&](const auto& schedule, Aspect aspect) {
    std::vector<std::string> found;
    for (const auto& other : alternatives(machine, layer, schedule, aspect)) {
      found.push_back(to_string(other));
    }
    return found;
  };
  using Texts = std::vector<std::string>;
  const ForwardSchedule forward = schedule_forward(machine, layer);
  ASSERT_EQ(
      to_string(forward),
      "forward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 64 units, chunks of 256 "
      "rows, input projection per step");
  EXPECT_EQ(texts(forward, Aspect::kFormat), Texts());
  EXPECT_EQ(
      texts(forward, Aspect::kGrid),
      Texts({"forward: GEMM float32, threads 1 x 2 (rows x blocks), blocks of 64 units, chunks of "
             "256 rows, input projection per step"}));
  EXPECT_EQ(
      texts(forward, Aspect::kBlocks),
      Texts({"forward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 32 units, chunks of "
             "256 rows, input projection per step"}));
  EXPECT_EQ(
      texts(forward, Aspect::kChunks),
      Texts(
          {"forward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 64 units, chunks of "
           "128 rows, input projection per step",
           "forward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 64 units, chunks of "
           "512 rows, input projection per step"}));

  // The projection can be merged where no thread has rows of its own.
  ForwardSchedule shared = forward;
  shared.grid = {1, 2};
  EXPECT_EQ(
      texts(shared, Aspect::kChunks).back(),
      "forward: GEMM float32, threads 1 x 2 (rows x blocks), blocks of 64 units, chunks of 128 "
      "rows, input projection per chunk");

  const BackwardSchedule backward = schedule_backward(machine, layer);
  EXPECT_EQ(
      texts(backward, Aspect::kChunks),
      Texts(
          {"backward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 128 units, chunks of "
           "256 rows, gradient GEMMs float32",
           "backward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 128 units, chunks of "
           "1024 rows, gradient GEMMs float32"}));
  machine.bf16x3 = true;
  EXPECT_EQ(
      texts(backward, Aspect::kFormat),
      Texts(
          {"backward: GEMM float32, threads 2 x 1 (rows x blocks), blocks of 128 units, chunks of "
           "512 rows, gradient GEMMs bf16x3",
           "backward: GEMM bf16x3, threads 2 x 1 (rows x blocks), blocks of 256 units, chunks of "
           "512 rows, gradient GEMMs bf16x3"}));
}

// A smaller L2 cache never makes blocks wider, nor lets more threads share all weights.
TEST(Schedule, FollowsTheCache) {
  for (const LayerShape& layer : kShapes) {
    Machine large = kSapphireRapids.machine;
    large.bf16x3 = false;
    Machine small = large;
    small.l2 = large.l2 / 4;
    EXPECT_LE(
        schedule_forward(small, layer).block_width, schedule_forward(large, layer).block_width);
    EXPECT_LE(schedule_forward(small, layer).grid.rows, schedule_forward(large, layer).grid.rows);
  }
}

TEST(Schedule, AsksTheSystemForItsCaches) {
  const Machine& machine = cache_sizes();
  EXPECT_GE(machine.l1, 8 << 10);
  EXPECT_GE(machine.l2, machine.l1);
  EXPECT_GE(machine.l3, 1 << 20);
}

}  // namespace
}  // namespace lltm::cpu
