// Schedules (cpu/schedule.h) for simulated CPUs with different L2 caches.
#include "cpu/choose_engine.h"
#include "cpu/schedule.h"

#include "cell/lltm.h"
#include "cpu/gemm/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
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

// 16 threads.
const Named kZen4 = {"Zen 4", {1 << 20, 16, /*f32=*/true, /*bf16=*/true, /*bf16x3=*/false}};
const Named kHaswell = {"Haswell", {1 << 20, 16, true, /*bf16=*/false, false}};
// A bfloat16 GEMM that is slower than float32's, as on Xeons without AMX.
const Named kCascadeLake = {"Cascade Lake", [] {
                              Machine machine = kZen4.machine;
                              machine.fast_bf16 = false;
                              return machine;
                            }()};
const Named kSapphireRapids = {
    "Sapphire Rapids", {2 << 20, 16, true, true, /*bf16x3=*/true, /*matrix_unit=*/true}};

constexpr SlotCounts kSlots = {Lltm::kCell.x.count(), Lltm::kCell.h.count()};

// N for 100 steps.
LayerShape shape(
    int64_t batch, int64_t input, int64_t hidden, bool bf16 = false, int64_t heads = 1) {
  return {batch, input, hidden, 100 * batch, bf16, kSlots, heads};
}

bool has(const std::string& schedule, const std::string& words) {
  return schedule.find(words) != std::string::npos;
}

TEST(Schedule, FormatsDependOnTheCpu) {
  const auto formats = [](const Named& named, int64_t batch, int64_t hidden, bool bf16 = false) {
    const LayerShape layer = shape(batch, 128, hidden, bf16);
    const BackwardSchedule backward = schedule_backward(named.machine, layer);
    return std::array{
        schedule_forward(named.machine, layer).format, backward.format, backward.gradient_format};
  };
  using enum GemmFormat;
  EXPECT_EQ(formats(kZen4, 128, 512), (std::array{kF32, kF32, kF32}));
  EXPECT_EQ(formats(kZen4, 128, 512, true), (std::array{kBf16, kBf16, kBf16}));
  EXPECT_EQ(formats(kHaswell, 128, 512, true), (std::array{kF32, kF32, kF32}));
  EXPECT_EQ(formats(kCascadeLake, 128, 512, true), (std::array{kF32, kF32, kF32}));
  EXPECT_EQ(formats(kSapphireRapids, 16, 128), (std::array{kF32, kF32, kBf16x3}));
  EXPECT_EQ(formats(kSapphireRapids, 512, 512), (std::array{kBf16x3, kBf16x3, kBf16x3}));
}

TEST(Schedule, WeightsBeyondL2AreOnePanelPerBlock) {
  Machine machine = kHaswell.machine;
  machine.threads = 2;
  const auto widest = [&](int64_t hidden, SlotCounts slots) {
    const LayerShape layer = {8, 128, hidden, 800, /*bf16=*/false, slots};
    return schedule_forward(machine, layer).blocks.width;
  };
  EXPECT_GT(widest(128, {4, 4}), 16);
  EXPECT_EQ(widest(768, {4, 4}), 16);
  EXPECT_EQ(widest(768, {2, 2}), 32);
  EXPECT_GT(widest(768, {4, 4, /*stages=*/true}), 16);
}

// ---- the cost model --------------------------------------------------------------

Machine machine_of(int64_t threads, int64_t l3, int64_t l3_cores) {
  Machine machine = kZen4.machine;
  machine.threads = threads;
  machine.l3 = l3;
  machine.l3_cores = l3_cores;
  return machine;
}

const std::vector<LayerShape>& random_shapes() {
  static const auto shapes = [] {
    std::mt19937_64 random(48);
    const auto size = [&](double most) {
      return static_cast<int64_t>(
          std::exp(std::uniform_real_distribution<double>(0, std::log(most))(random)));
    };
    std::vector<LayerShape> all(200);
    for (LayerShape& each : all) {
      each = {size(512), size(1024), size(1500), 0, /*bf16=*/false, kSlots};
      each.rows = each.batch * size(500);
    }
    return all;
  }();
  return shapes;
}

// A desktop CPU, CPUs of eight cores per L3, and two sockets.
template <typename Body>
void for_each_model(const Body& body) {
  for (const auto& [l3, cores] : {std::pair{32 << 20, 64}, {32 << 20, 8}, {64 << 20, 32}}) {
    for (const LayerShape& layer : random_shapes()) {
      for (const bool backward : {false, true}) {
        const auto chosen = [&](const Machine& machine) {
          const Grid grid = backward ? schedule_backward(machine, layer).grid
                                     : schedule_forward(machine, layer).grid;
          EXPECT_LE(grid.workers(), machine.threads);
          return predicted_time(machine, layer, backward, grid);
        };
        body(l3, cores, layer, backward, chosen);
      }
    }
  }
}

// Beyond the region itself, which has all threads.
TEST(CostModel, MoreThreadsAreNotSlower) {
  for_each_model([](int64_t l3, int64_t cores, const LayerShape& layer, bool, const auto& chosen) {
    double fewer = chosen(machine_of(1, l3, cores));
    for (const int64_t threads : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      const double time = chosen(machine_of(threads, l3, cores));
      const double regions = 25000.0 * static_cast<double>(threads);
      EXPECT_LE(time, fewer * 1.001 + regions)
          << threads << " threads, B " << layer.batch << ", H " << layer.hidden;
      fewer = std::min(fewer, time);
    }
  });
}

TEST(CostModel, ChoosesNearlyTheBestGrid) {
  for_each_model(
      [](int64_t l3, int64_t cores, const LayerShape& layer, bool backward, const auto& chosen) {
        for (const int64_t threads : {2, 5, 8, 16, 24, 64}) {
          const Machine machine = machine_of(threads, l3, cores);
          double best = predicted_time(machine, layer, backward, {});
          for (int64_t rows = 1; rows <= std::min(threads, layer.batch); ++rows) {
            const int64_t most = std::min(threads / rows, divide_up(layer.hidden, 16));
            for (int64_t columns = 1; columns <= most; ++columns) {
              best = std::min(best, predicted_time(machine, layer, backward, {rows, columns}));
            }
          }
          EXPECT_LE(chosen(machine), 1.15 * best)
              << threads << " threads, B " << layer.batch << ", H " << layer.hidden;
        }
      });
}

// As measured with two threads of Zen 4.
TEST(CostModel, ChoosesTheMeasuredGrids) {
  Machine machine = kZen4.machine;
  machine.threads = 2;
  const auto grid = [&](int64_t steps, int64_t batch, int64_t input, int64_t hidden) {
    const LayerShape layer = {batch, input, hidden, steps * batch, /*bf16=*/false, {4, 4}};
    const Grid chosen = schedule_forward(machine, layer).grid;
    return std::pair{chosen.rows, chosen.columns};
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(grid(500, 1, 64, 128), Pair(1, 2));
  EXPECT_EQ(grid(50, 4, 256, 256), Pair(1, 2));
  EXPECT_EQ(grid(20, 8, 512, 512), Pair(1, 2));
  EXPECT_EQ(grid(30, 64, 64, 128), Pair(2, 1));
  EXPECT_EQ(grid(50, 32, 64, 256), Pair(2, 1));
  EXPECT_EQ(grid(100, 13, 414, 19), Pair(2, 1));
  EXPECT_EQ(grid(5, 7, 10, 18), Pair(1, 1)) << "shorter than a parallel region";
}

TEST(CostModel, HeadsHaveShorterProductsAndNeedNoBarrier) {
  const Machine machine = machine_of(2, 32 << 20, 8);
  for (const bool backward : {false, true}) {
    const auto time = [&](int64_t heads, int64_t columns) {
      const LayerShape layer = shape(4, 0, 384, /*bf16=*/false, heads);
      return predicted_time(machine, layer, backward, {1, columns});
    };
    const auto added = [&](int64_t heads) { return time(heads, 2) - time(heads, 1) / 2; };
    EXPECT_LT(time(4, 1), 0.5 * time(1, 1));
    EXPECT_LT(added(4), 0.2 * added(3)) << "two threads share a head";
  }
}

TEST(Schedule, OfTwoDirections) {
  Machine machine = kZen4.machine;
  const auto side_by_side = [&](int64_t threads, int64_t batch, int64_t hidden, bool training) {
    machine.threads = threads;
    return schedule_side_by_side(machine, shape(batch, 128, hidden), training);
  };
  for (const bool training : {false, true}) {
    EXPECT_FALSE(side_by_side(1, 1, 128, training));
    EXPECT_TRUE(side_by_side(2, 1, 128, training));
    EXPECT_TRUE(side_by_side(2, 64, 256, training));
    EXPECT_TRUE(side_by_side(16, 64, 128, training));
    EXPECT_TRUE(side_by_side(16, 1, 512, training));
  }
  // The weights exceed a core's share of L3.
  EXPECT_FALSE(side_by_side(2, 1, 1024, true));
  EXPECT_TRUE(side_by_side(2, 16, 1024, true));
}

TEST(Schedule, OfFewSteps) {
  const auto in_place = [](int64_t steps, int64_t batch, bool prepacked, int64_t hidden = 128) {
    return schedule_small_batch(kZen4.machine, shape(batch, 32, hidden), steps, prepacked).in_place;
  };
  EXPECT_TRUE(in_place(1, 1, false));
  EXPECT_TRUE(in_place(32, 1, false));
  EXPECT_TRUE(in_place(32, 4, false));
  EXPECT_FALSE(in_place(33, 1, false));
  EXPECT_FALSE(in_place(1, 1, true)) << "prepacked";
  EXPECT_FALSE(in_place(1, 5, false)) << "few weights";
  EXPECT_TRUE(in_place(4, 8, false, 256));
  EXPECT_FALSE(in_place(5, 8, false, 256)) << "passes over the weights";
  EXPECT_FALSE(in_place(1, 8, false, 256)) << "a single step";
  EXPECT_TRUE(has(
      to_string(schedule_small_batch(kZen4.machine, shape(1, 32, 128), 32, /*prepacked=*/false)),
      "weights in place"));
}

std::string of_one_step(
    int64_t batch,
    Storage storage = Storage::kF32,
    int64_t hidden = 256,
    const Machine& machine = kZen4.machine) {
  return to_string(schedule_step(machine, {batch, 128, hidden, storage, 128 + hidden, kSlots}));
}

TEST(Schedule, OfOneStep) {
  EXPECT_EQ(
      of_one_step(1, Storage::kF32, 64),
      "cell: threads 1, blocks of up to 64 units, forward by dot products, backward by the "
      "float32 kernel");
  EXPECT_EQ(
      of_one_step(1, Storage::kF32, 512),
      "cell: threads 16, blocks of up to 32 units, forward by dot products, backward by the "
      "float32 kernel");
  EXPECT_EQ(
      of_one_step(16),
      "cell: threads 16, blocks of up to 16 units, forward by the float32 kernel, backward by the "
      "float32 kernel");
}

TEST(Schedule, OfOneStepByDtype) {
  const Machine plain = {1 << 20, 16, /*f32=*/false, false, false};
  for (const Storage storage : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    EXPECT_TRUE(has(of_one_step(4, storage), "forward by dot products"));
    EXPECT_TRUE(has(of_one_step(15, storage), "backward by the float32 kernel"));
    EXPECT_TRUE(has(of_one_step(64, storage, 256, plain), "forward by ATen, backward by ATen"));
  }
  EXPECT_TRUE(has(of_one_step(1, Storage::kF64), "forward by ATen, backward by ATen"));
  EXPECT_TRUE(has(
      of_one_step(16, Storage::kF16), "forward by the float32 kernel, backward by the float32"));
  EXPECT_TRUE(
      has(of_one_step(16, Storage::kBf16), "forward by the bfloat16 kernel, backward by the bf"));
  EXPECT_TRUE(
      has(of_one_step(16, Storage::kBf16, 256, kCascadeLake.machine),
          "forward by the float32 kernel, backward by the fl"));
  EXPECT_TRUE(has(
      of_one_step(16, Storage::kBf16, 255), "forward by the float32 kernel, backward by the bf"))
      << "pairs of elements do not begin at even columns";
}

TEST(Schedule, OfOneStepByTheWeightsLayout) {
  const auto by_stride = [](int64_t stride, Storage storage = Storage::kF32) {
    return to_string(schedule_step(kZen4.machine, {16, 128, 256, storage, stride, kSlots}));
  };
  EXPECT_TRUE(has(by_stride(0), "forward by ATen, backward by ATen")) << "columns side by side";
  EXPECT_TRUE(has(by_stride(400), "forward by the float32 kernel, backward by the float32 kernel"));
  EXPECT_TRUE(has(
      by_stride(400, Storage::kBf16), "forward by the bfloat16 kernel, backward by the bfloat16"));
  EXPECT_TRUE(
      has(by_stride(401, Storage::kBf16), "forward by the float32 kernel, backward by the bf"));
  constexpr int64_t kWide = 1 << 21;
  EXPECT_TRUE(
      has(to_string(
              schedule_step(kZen4.machine, {16, kWide - 256, 256, Storage::kBf16, kWide, kSlots})),
          "forward by the bfloat16 kernel"))
      << "offsets are of 64 bits";
}

// ---- the engine of a call --------------------------------------------------------

// A call of 100 steps in float32.
Call call(int64_t batch, int64_t hidden = 128, int64_t steps = 100) {
  return {
      .shape = {batch, 32, hidden, steps * batch, /*bf16=*/false, kSlots},
      .steps = steps,
      .storage = Storage::kF32,
      .weights = 3 * hidden * (32 + hidden)};
}

template <typename Change>
Call with(Call call, const Change& change) {
  change(call);
  return call;
}

Engine::Kind kind(const Call& call, const Machine& machine = kZen4.machine) {
  return choose_engine(machine, call).kind;
}

TEST(ChooseEngine, BySizes) {
  EXPECT_EQ(kind(call(16)), Engine::kBlocked);
  EXPECT_EQ(kind(call(4)), Engine::kSmallBatch);
  EXPECT_EQ(kind(call(16, 16)), Engine::kSmallBatch);
  EXPECT_EQ(kind(call(16, 128, 1)), Engine::kOneStep);
  EXPECT_EQ(kind(call(4, 128, 1)), Engine::kSmallBatch);
  const auto forgets = [](Call& c) { c.forgets = true; };
  EXPECT_EQ(kind(with(call(1), forgets)), Engine::kSmallBatch);
  EXPECT_EQ(kind(with(call(4), forgets)), Engine::kBlocked) << "several threads";
  EXPECT_EQ(kind(with(call(4, 128, 32), forgets)), Engine::kSmallBatch) << "weights in place";
  EXPECT_EQ(kind(with(call(16, 16), forgets)), Engine::kBlocked);
  const auto small_layer = [](Call& c) { c.forgets = c.small_layer = true; };
  const Machine one_thread = machine_of(1, 32 << 20, 8);
  EXPECT_EQ(kind(with(call(1), small_layer), one_thread), Engine::kSmallLayer);
  EXPECT_EQ(kind(with(call(1), small_layer)), Engine::kSmallBatch) << "16 threads";
  EXPECT_EQ(kind(with(call(1, 64), small_layer)), Engine::kSmallLayer);
  EXPECT_EQ(kind(with(call(16, 16), small_layer), one_thread), Engine::kSmallLayer) << "in L1";
  EXPECT_EQ(kind(with(call(17, 16), small_layer), one_thread), Engine::kBlocked);
  EXPECT_EQ(kind(with(call(2), small_layer), one_thread), Engine::kSmallBatch) << "not in L1";
  EXPECT_EQ(kind(with(call(1, 256), small_layer)), Engine::kSmallBatch) << "not in L2";
  EXPECT_EQ(kind(with(call(1, 128, 12), small_layer)), Engine::kSmallBatch) << "weights in place";
  const auto backward = [](Call& c) { c.backward = true; };
  EXPECT_EQ(kind(with(call(4), backward)), Engine::kBlocked);
  EXPECT_EQ(kind(with(call(4, 128, 1), backward)), Engine::kOneStep);
  EXPECT_EQ(kind(with(call(1, 512, 2), backward)), Engine::kPerStep) << "few rows";
  EXPECT_EQ(kind(with(call(1, 128, 8), backward)), Engine::kBlocked) << "small weights";
  EXPECT_EQ(kind(with(call(20, 512, 2), backward)), Engine::kBlocked) << "many rows";
  EXPECT_EQ(kind(with(call(1, 512, 5), backward)), Engine::kBlocked) << "many steps";
  const auto wide = [](Call& c) { c.backward = c.wide_gradients = true; };
  EXPECT_EQ(kind(with(call(4, 128, 1), wide)), Engine::kBlocked);
}

TEST(ChooseEngine, PerStepForFloat64EmptySizesAndCpusWithoutKernels) {
  const Machine plain = {1 << 20, 16, /*f32=*/false, false, false};
  for (const bool backward : {false, true}) {
    const auto base = with(call(16), [=](Call& c) { c.backward = backward; });
    EXPECT_EQ(kind(base, plain), Engine::kPerStep);
    EXPECT_EQ(kind(with(base, [](Call& c) { c.empty = true; })), Engine::kPerStep);
    EXPECT_EQ(kind(with(base, [](Call& c) { c.storage = Storage::kF64; })), Engine::kPerStep);
  }
}

TEST(ChooseEngine, Of16Bits) {
  const auto bf16 = [](Call& c) {
    c.storage = Storage::kBf16;
    c.shape.bf16 = true;
  };
  EXPECT_EQ(kind(with(call(16, 127, 1), bf16)), Engine::kOneStep);
  EXPECT_EQ(kind(call(16, 512, 1)), Engine::kOneStep);
  const Call few = with(call(1), bf16);
  EXPECT_EQ(kind(few), Engine::kBlocked) << "operands in bfloat16";
  const auto small_layer = [](Call& c) { c.small_layer = true; };
  EXPECT_EQ(kind(with(with(call(1, 64), bf16), small_layer)), Engine::kSmallLayer);
  EXPECT_EQ(kind(few, kCascadeLake.machine), Engine::kSmallBatch);
  EXPECT_EQ(
      kind(with(
          few,
          [](Call& c) {
            c.storage = Storage::kF16;
            c.shape.bf16 = false;
          })),
      Engine::kSmallBatch);
}

TEST(ChooseEngine, StagesGivenGatesAndHeads) {
  const Machine& machine = kSapphireRapids.machine;
  const auto stages = [](Call& c) { c.stages = true; };
  EXPECT_TRUE(choose_engine(machine, call(512)).machine.bf16x3);
  EXPECT_FALSE(choose_engine(machine, with(call(512), stages)).machine.bf16x3);
  EXPECT_EQ(kind(with(call(1), stages)), Engine::kBlocked);
  EXPECT_EQ(kind(with(call(1, 128, 1), stages)), Engine::kBlocked);
  EXPECT_EQ(kind(with(call(1, 512, 1), stages)), Engine::kPerStep) << "many weights in place";
  EXPECT_EQ(kind(with(call(8, 512, 1), stages)), Engine::kBlocked);

  const auto given = [](Call& c) { c.given = true; };
  EXPECT_EQ(kind(with(call(1, 128, 1), given)), Engine::kSmallBatch);
  EXPECT_EQ(kind(with(call(8, 128, 1), given)), Engine::kBlocked);

  const auto heads = [](bool packs) {
    return [=](Call& c) { c.heads = true, c.packs_heads = packs; };
  };
  const auto dense = [&](const Call& call) { return choose_engine(machine, call).dense; };
  EXPECT_FALSE(dense(with(call(16), heads(true))));
  EXPECT_TRUE(dense(with(call(16), heads(false))));
  for (const bool packs : {false, true}) {
    EXPECT_EQ(kind(with(call(1), heads(packs))), Engine::kSmallBatch);
    EXPECT_EQ(dense(with(call(1), heads(packs))), !packs);
    EXPECT_FALSE(dense(with(call(1, 128, 1), heads(packs)))) << "weights in place";
  }
  EXPECT_TRUE(choose_engine(machine, with(call(512), heads(true))).machine.bf16x3);
  const Call empty = with(call(16), [&](Call& c) { heads(true)(c), c.empty = true; });
  EXPECT_FALSE(dense(empty));
  EXPECT_FALSE(dense(with(empty, [](Call& c) { c.backward = true; }))) << "per step";
}

TEST(ChooseEngine, OfPrepackedWeights) {
  const auto packed = [](GemmFormat format, Storage storage = Storage::kF32) {
    return [=](Call& c) {
      c.prepacked = format_bit(format);
      c.storage = storage;
      c.shape.bf16 = storage == Storage::kBf16;
    };
  };
  using enum GemmFormat;
  const auto engine = [&](const Call& call, const Machine& machine = kZen4.machine) {
    return choose_engine(machine, call);
  };
  EXPECT_EQ(kind(with(call(16, 128, 1), packed(kF32))), Engine::kBlocked);
  EXPECT_EQ(kind(with(call(16), packed(kInt8))), Engine::kInt8);
  const auto empty = [&](Call& c) { packed(kInt8)(c), c.empty = true; };
  EXPECT_TRUE(engine(with(call(16), empty)).unpack);
  EXPECT_EQ(kind(with(call(16), empty)), Engine::kPerStep);
  const Call bf16 = with(call(16), packed(kBf16, Storage::kBf16));
  EXPECT_FALSE(engine(bf16).unpack);
  EXPECT_TRUE(engine(bf16, kHaswell.machine).unpack) << "no bfloat16 kernels";
  EXPECT_EQ(kind(bf16, kHaswell.machine), Engine::kBlocked);
  EXPECT_FALSE(engine(bf16, kCascadeLake.machine).unpack) << "slow, but without unpacking";
  EXPECT_TRUE(engine(bf16, kCascadeLake.machine).machine.fast_bf16);
  EXPECT_FALSE(engine(with(call(16), packed(kF32)), kSapphireRapids.machine).machine.bf16x3);
  EXPECT_TRUE(engine(with(call(16), packed(kBf16x3)), kSapphireRapids.machine).machine.bf16x3);
}

// C (65, 192) has 50 kB. float32 uses one copy per 128 rows of a chunk.
TEST(Schedule, OfTheGradientGemm) {
  for (const auto& [format, slice, group, copies] :
       {std::tuple{GemmFormat::kF32, 512, 512, 4},
        {GemmFormat::kBf16, 1024, 512, 16},
        {GemmFormat::kBf16x3, 128, 65, 16}}) {
    SCOPED_TRACE(to_string(format));
    const GradientGemmSchedule schedule =
        schedule_gradient_gemm(kSapphireRapids.machine, format, 16, 65, 192);
    EXPECT_EQ(schedule.slice_rows, slice);
    EXPECT_EQ(schedule.group_rows, group);
    EXPECT_EQ(schedule.accumulators, copies);
  }
}

// bf16x3 accumulators use at most 32 MiB in total, but at least one.
TEST(Schedule, OfTheGradientGemmsAccumulators) {
  for (const auto& [n, copies] : {std::pair{2048, 2}, {1024, 4}, {4096, 1}, {8192, 1}}) {
    EXPECT_EQ(
        schedule_gradient_gemm(kSapphireRapids.machine, GemmFormat::kBf16x3, 16, 2048, n)
            .accumulators,
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
    shape(128, 512, 512, /*bf16=*/true),
    shape(16, 32, 96, /*bf16=*/false, /*heads=*/3),
    shape(128, 512, 512, /*bf16=*/false, /*heads=*/8)};

// Blocks cover all hidden units, and no block has units of two heads. The threads' shares differ by
// at most `align`.
void expect_equal_shares(
    const Partition& blocks, const LayerShape& layer, int64_t align, int64_t threads) {
  const int64_t hidden = layer.hidden, units = layer.head_units();
  EXPECT_EQ(blocks.total, hidden);
  int64_t end = 0;
  for (int64_t block = 0; block < blocks.count; ++block) {
    const Range range = blocks.range(block);
    EXPECT_EQ(range.begin, end);
    EXPECT_EQ(range.begin % align, 0);
    EXPECT_GT(range.size(), 0);
    EXPECT_LE(range.size(), blocks.width);
    EXPECT_EQ(range.begin / units, (range.end - 1) / units);
    end = range.end;
  }
  EXPECT_EQ(end, hidden);
  if (blocks.count % threads != 0) return;
  const int64_t parts = (hidden + align - 1) / align;
  for (int64_t thread = 0; thread < threads; ++thread) {
    const int64_t first = thread * blocks.count / threads;
    const int64_t last = (thread + 1) * blocks.count / threads - 1;
    const int64_t units = blocks.range(last).end - blocks.begin(first);
    EXPECT_LE(units, (parts + threads - 1) / threads * align);
  }
}

// Invariants for every CPU.
TEST(Schedule, KeepsItsGuarantees) {
  for (const int64_t l2 : {256 << 10, 1 << 20, 2 << 20, 8 << 20}) {
    for (const int64_t threads : {1, 2, 16, 128}) {
      for (const bool amx : {false, true}) {
        const Machine machine = {l2, threads, true, amx, amx, amx};
        for (const LayerShape& layer : kShapes) {
          const ForwardSchedule forward = schedule_forward(machine, layer);
          const BackwardSchedule backward = schedule_backward(machine, layer);
          SCOPED_TRACE(to_string(forward) + "; " + to_string(backward));
          EXPECT_LE(forward.grid.workers(), threads);
          EXPECT_LE(backward.grid.workers(), threads);
          EXPECT_LE(forward.blocks.width, max_forward_block_width(forward.format));
          const int64_t align = visit_format(
              forward.format, []<typename Format>(Format) { return Format::kUnitAlign; });
          expect_equal_shares(forward.blocks, layer, align, forward.grid.columns);
          expect_equal_shares(backward.blocks, layer, align, backward.grid.columns);
          if (!amx) {
            EXPECT_EQ(forward.format, GemmFormat::kF32);
            EXPECT_EQ(backward.gradient_format, GemmFormat::kF32);
          }
          EXPECT_TRUE(!forward.merge_projection || forward.chunk_rows >= 2 * layer.batch);
        }
      }
    }
  }
}

TEST(Schedule, DependsOnTheCache) {
  for (const LayerShape& layer : kShapes) {
    Machine large = kSapphireRapids.machine;
    large.bf16x3 = false;
    Machine small = large;
    small.l2 = large.l2 / 4;
    EXPECT_LE(
        schedule_forward(small, layer).blocks.width, schedule_forward(large, layer).blocks.width);
  }
}

}  // namespace
}  // namespace lltm::cpu
