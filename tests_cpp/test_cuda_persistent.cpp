// The persistent CUDA engine on the CPU (persistent_on_host.h), with random schedules. Each test
// checks that it was used.
#include "cell_arguments.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/persistent.h"
#include "cuda_on_host.h"
#include "op/bidirectional.h"
#include "op/operators.h"
#include "persistent_on_host.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

// A row of K units whose words appear during waits.
template <int kUnitsK>
struct PolledRow {
  static constexpr int kWords = kUnitsK * lltm::cuda::kWarps * lltm::cuda::kWarpUnits<float>;
  alignas(16) std::uint32_t words[kWords];
  std::function<void(int)> appear;  // in wait(n)
  int waits = 0, reads = 0;

  PolledRow() { std::fill(std::begin(words), std::end(words), lltm::cuda::kAbsent); }

  lltm::cuda::Words read(const void* data) {
    ++reads;
    lltm::cuda::Words x;
    std::memcpy(&x, data, sizeof(x));
    return x;
  }
  bool wait(int& polls) {
    EXPECT_EQ(polls++, waits++);
    if (waits > 100) throw std::runtime_error("the lane never sees its words");
    appear(waits);
    return true;
  }

  // As a lane of the second warp.
  void poll() {
    const auto* const row = reinterpret_cast<const float*>(words);
    constexpr int kWarp = 1, kLane = 6;
    lltm::cuda::States<float, kUnitsK> states;
    const auto from = [&](int) { return lltm::cuda::StateRow<float>{row, /*polled=*/true}; };
    states.load(*this, from(0), kWords, kWarp, kLane, 0);
    EXPECT_EQ(std::exchange(reads, 0), kUnitsK);
    lltm::cuda::poll<1>(*this, &states, from, kWarp, kLane);
    for (int j = 0; j < kUnitsK; ++j) {
      const auto first = lltm::cuda::k_of<float>(kWarp, kLane, j);
      for (int n = 0; n < 4; ++n) EXPECT_EQ(states.x[j].w[n], words[first + n]) << j;
    }
  }
};

template <typename Units>
class PersistentPoll : public testing::Test {};
using UnitCounts = testing::Types<
    std::integral_constant<int, 1>,
    std::integral_constant<int, 2>,
    std::integral_constant<int, 3>,
    std::integral_constant<int, 6>,
    std::integral_constant<int, 9>,
    std::integral_constant<int, 12>>;
TYPED_TEST_SUITE(PersistentPoll, UnitCounts);

// The loop ends one round trip after the last word appears.
TYPED_TEST(PersistentPoll, AfterTheLastPublicationOneRoundTripRemains) {
  for (const int last : {1, 2, 5}) {
    PolledRow<TypeParam::value> row;
    row.appear = [&](int n) {
      if (n == last) std::iota(std::begin(row.words), std::end(row.words), 1U);
    };
    row.poll();
    EXPECT_EQ(row.waits, last);
    EXPECT_EQ(row.reads, last * TypeParam::value);
  }
}

TYPED_TEST(PersistentPoll, PublishedUnitsAreNotReadAgain) {
  PolledRow<TypeParam::value> row;
  std::iota(std::begin(row.words), std::end(row.words), 1U);
  row.poll();
  EXPECT_EQ(row.waits, 0);
  EXPECT_EQ(row.reads, 0);
}

TYPED_TEST(PersistentPoll, OnlyMissingUnitsAreReadAgain) {
  constexpr int kUnitsK = TypeParam::value;
  PolledRow<kUnitsK> row;
  row.appear = [&](int n) {
    if (n > kUnitsK) return;  // all have appeared
    const int words = PolledRow<kUnitsK>::kWords / kUnitsK;
    const auto unit = std::begin(row.words) + (kUnitsK - n) * words;
    std::iota(unit, unit + words, 1U);
  };
  row.poll();
  EXPECT_EQ(row.waits, kUnitsK);
  EXPECT_EQ(row.reads, kUnitsK * (kUnitsK + 1) / 2);
}

struct Launch {
  bool begun = true;
  bool all_have_begun() const { return begun; }
};

int polls_of(lltm::cuda::PollLimit& poll_limit, Launch& launch, int most, int begins_after = 0) {
  for (int polls = 0, all = 1; all < 100'000; ++all) {
    launch.begun = all > begins_after;
    if (!poll_limit.wait(launch, polls, most)) return all;
  }
  return -1;
}

TEST(PersistentPollLimit, EndsIfPollsRunOutAfterAllBlocksHaveStarted) {
  Launch launch;
  for (const int begins_after : {0, 5, 95, 100, 101, 150, 995}) {
    lltm::cuda::PollLimit poll_limit;
    const int polls = polls_of(poll_limit, launch, 100, begins_after);
    EXPECT_GT(polls - begins_after, 100) << "not before they have run out once";
    EXPECT_LE(polls - begins_after, 303);
    int next = 0;
    EXPECT_FALSE(poll_limit.wait(launch, next, 100)) << "from then on at once";
  }
}

TEST(PersistentPollLimit, EndsEvenIfBlocksNeverStart) {
  Launch launch;
  lltm::cuda::PollLimit poll_limit;
  const int polls = polls_of(poll_limit, launch, 100, /*begins_after=*/1'000'000);
  EXPECT_GT(polls, 100 * lltm::cuda::PollLimit::kMostCounts);
  EXPECT_LT(polls, 103 * (lltm::cuda::PollLimit::kMostCounts + 1));
}

// In the second slice of units and the first group of rows.
struct Thread {
  int number;

  int slice() const { return 1; }
  int group() const { return 0; }
  int thread() const { return number; }
};
constexpr int64_t kFirstRow = 40, kHidden = 56;

lltm::cuda::ThreadPosition place_of(int thread) {
  return lltm::cuda::ThreadPosition::of<4>(Thread{thread}, kFirstRow, kHidden);
}

// 32 banks of 4 bytes.
TEST(PersistentPlaces, SumsAreReadAndWrittenWithoutBankConflicts) {
  constexpr int kLanes = lltm::cuda::kWarpLanes;
  for (int warp = 0; warp < lltm::cuda::kWarps; ++warp) {
    std::set<int> banks;
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto p = place_of(warp * kLanes + lane);
      banks.insert((2 * p.sums + p.odd) % 32);
      const auto row = static_cast<int>((p.row(0) - kFirstRow) % lltm::cuda::kTileRows);
      const auto unit = static_cast<int>(p.unit - lltm::cuda::kSliceUnits);
      EXPECT_EQ(p.sums, lltm::cuda::place_of_sums(row, unit));
      EXPECT_EQ(p.odd, unit % 2);
    }
    EXPECT_EQ(banks.size(), 32);
  }
  // Half a warp accesses 8 bytes per lane concurrently.
  std::set<int> places;
  for (const int odd : {0, 1}) {
    for (const int half : {0, 1}) {
      std::set<int> pairs_of_banks;
      for (int lane = 16 * half; lane < 16 * half + 16; ++lane) {
        const int place = lltm::cuda::place_of_sums(2 * (lane % 4) + odd, 2 * (lane / 4));
        pairs_of_banks.insert(place % 16);
        places.insert(place);
      }
      EXPECT_EQ(pairs_of_banks.size(), 16);
    }
  }
  EXPECT_EQ(places.size(), lltm::cuda::kTileSums);
  EXPECT_EQ(*places.rbegin(), lltm::cuda::kTileSums - 1);
}

template <typename T>
class Temporarily {
 public:
  Temporarily(T& variable, T value) : variable_(variable), before_(variable) { variable = value; }
  ~Temporarily() { variable_ = before_; }
  Temporarily(const Temporarily&) = delete;
  Temporarily& operator=(const Temporarily&) = delete;

 private:
  T& variable_;
  T before_;
};

template <typename Body>
int64_t launches(const Body& body) {
  const int64_t before = persistent_launches;
  body();
  return persistent_launches - before;
}

lltm::SequenceArgs forward_args(const Arguments& a) {
  return {engine_inputs(a), /*save=*/true};
}
Tensors forward(const Arguments& a, int64_t workspace_bytes = lltm::cuda::workspace_of_cache()) {
  const lltm::SequenceArgs args = forward_args(a);
  const auto plan = lltm::cuda::plan_persistent(args);
  return as_list(lltm::cuda::persistent_forward(args, plan, workspace_bytes).value());
}

// The output gradients are ones.
lltm::SequenceBackwardArgs backward_args(const Arguments& a, const Tensors& results) {
  const lltm::OutputMask mask = {true, true, true, true};
  return {engine_inputs(a), results[0], results[3], at::ones_like(results[0]), {}, {}, mask};
}
Tensors backward(const Arguments& a, const Tensors& results) {
  return as_list(lltm::cuda::sequence_backward(backward_args(a, results)));
}

std::vector<Form> persistent_forms() {
  std::vector<Form> forms;
  for (const char* cell : kCells) {
    forms.push_back(
        {.name = cell,
         .run = sequence,
         .baseline = eager_sequence,
         .cell = cell,
         .setting = persistent<true>});
  }
  return forms;
}

class PersistentEngine : public FormTest {
 protected:
  int64_t row_bytes() const {  // pre-activations, H = 24
    return lltm::find_cell(form_.cell)->x.count() * 24 * static_cast<int64_t>(sizeof(float));
  }
  // Forward and backward each need `each` launches.
  void check_persistent(const Problem& problem, int64_t each = 1, uint64_t problems = 1) const {
    int64_t calls = 0;
    const Function counted = [&](const Arguments& a) {
      ++calls;
      return sequence(a);
    };
    const int64_t launched =
        launches([&] { lltm_test::check(counted, eager_sequence, problem, kRandom, problems); });
    EXPECT_EQ(launched, 2 * each * calls);
  }
};

// float16 has the kernels of bfloat16, and is in the tests below.
constexpr std::array<at::ScalarType, 2> kTypes = {at::kBFloat16, at::kFloat};
LLTM_EACH_CASE(Cells, PersistentEngine, persistent_forms(), kTypes);

// Full and partial slices of units and tiles of rows.
TEST_P(PersistentEngine, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{3, 1, 16, 8}, Sizes{5, 3, 5, 24}, Sizes{7, 8, 3, 16}, Sizes{3, 17, 9, 40}}) {
    check_persistent(dense(sizes), 1, 2);
  }
  check_persistent(dense({5, 3, 4, 24}, /*bias=*/false));
}

TEST_P(PersistentEngine, PackedValuesAndGradientsMatchOracle) {
  check_persistent(packed({5}, 3, 8));
  check_persistent(packed({7, 6, 5, 4, 3, 2, 1}, 3, 24));
  check_persistent(packed({9, 1, 1, 1}, 2, 16));
  // Sequences end inside a tile and at its end.
  check_persistent(packed(falling_lengths(19, 6), 3, 24));
}

// With 2 and 4 tiles, 3 and 2 groups run all rows concurrently. Larger batches need several
// launches, the last with fewer groups.
TEST_P(PersistentEngine, LargerBatchesUseMoreTilesAndThenMoreLaunches) {
  const Temporarily small(multiprocessors, int64_t{6});  // 2 slices each
  check_persistent(dense({3, 41, 3, 24}));
  check_persistent(dense({3, 77, 3, 24}));
  check_persistent(packed(falling_lengths(40, 4), 3, 24));
  check_persistent(dense({3, 200, 3, 24}), /*each=*/3);
}

Problem with_resets(const Problem& problem) {
  return [=](uint64_t seed) {
    Arguments a = problem(seed);
    a.reset = random_reset(a, seed + 1);
    return a;
  };
}
Problem with_masks(const Problem& problem) {
  return [=](uint64_t seed) {
    Arguments a = problem(seed);
    a.recurrent_mask = random_mask(a, seed + 2);
    return a;
  };
}

TEST_P(PersistentEngine, ResetsMatchOracle) {
  check_persistent(with_resets(dense({6, 3, 5, 24})), 1, 3);
  check_persistent(with_resets(packed({7, 6, 5, 4, 3, 2, 1}, 3, 24)), 1, 3);
  const Temporarily small(multiprocessors, int64_t{6});
  check_persistent(with_resets(dense({3, 41, 3, 24})));
  check_persistent(with_resets(packed(falling_lengths(80, 4), 3, 24)));
}

TEST_P(PersistentEngine, MasksMatchOracle) {
  check_persistent(with_masks(dense({6, 3, 5, 24})), 1, 3);
  check_persistent(with_resets(with_masks(packed({7, 6, 5, 4, 3, 2, 1}, 3, 24))), 1, 3);
  const Temporarily small(multiprocessors, int64_t{6});
  check_persistent(with_masks(packed(falling_lengths(80, 4), 3, 24)));
}

// As of layers with a large H.
TEST_P(PersistentEngine, WeightsInSharedMemoryMatchOracle) {
  const Temporarily shared(prefers_shared, true);
  check_persistent(with_resets(dense({4, 9, 5, 200})));
  const Temporarily small(multiprocessors, int64_t{13});
  check_persistent(dense({3, 33, 3, 200}), /*each=*/2);
}

// Backward runs each segment as a call.
TEST_P(PersistentEngine, CheckpointsAreStatesBetweenSteps) {
  for (const Problem& problem :
       {dense({7, 9, 5, 24}), packed({7, 6, 6, 3, 1}, 3, 24), with_resets(dense({7, 9, 5, 24}))}) {
    const Arguments a = problem(1);
    const Tensors gradients = random_gradients(a);
    const at::Tensor output = evaluate(sequence, a, gradients).outputs[0];
    for (const int64_t steps : {1, 3, 7, 9}) {
      SCOPED_TRACE(testing::Message() << "checkpoint_steps " << steps);
      Evaluation ours;
      // A segment of 1 step uses the per-step engine.
      const int64_t segments = steps == 1 ? 0 : std::max<int64_t>(7 / steps, 1);
      EXPECT_EQ(
          launches([&] { ours = evaluate(checkpointed(steps), a, gradients); }), 1 + 2 * segments);
      EXPECT_TRUE(identical(ours.outputs[0], output));
      lltm_test::check(checkpointed(steps), eager_sequence, problem);
    }
  }
}

TEST_P(PersistentEngine, SeveralLaunchesPerBatchGiveTheSameResultsAsOne) {
  const Arguments arguments = with_resets(packed(falling_lengths(36, 5), 3, 24))(1);
  const Tensors gradients = random_gradients(arguments);
  const Evaluation all = evaluate(sequence, arguments, gradients);
  const Temporarily small(multiprocessors, int64_t{2});
  Evaluation parts;
  EXPECT_EQ(launches([&] { parts = evaluate(sequence, arguments, gradients); }), 4);
  EXPECT_TRUE(identical(parts, all));
}

TEST_P(PersistentEngine, ChunksGiveTheSameResultsAsASingleLaunch) {
  for (const Arguments& a :
       {dense({9, 11, 3, 24})(1), with_resets(packed({9, 7, 7, 3, 1}, 3, 24))(1)}) {
    const Tensors all = forward(a);
    for (const int64_t rows : {0, 4, 5, 22, 23}) {
      Tensors chunks;
      EXPECT_GT(launches([&] { chunks = forward(a, rows * row_bytes()); }), 1);
      EXPECT_TRUE(identical(chunks, all)) << rows << " rows at a time";
    }
  }
}

TEST_P(PersistentEngine, ArgumentsMayHaveAnyAlignment) {
  const Arguments aligned = dense({3, 5, 0, 24})(1);
  const Tensors gradients = random_gradients(aligned);
  Tensors shifted;
  for (const at::Tensor& tensor : differentiable(aligned)) {
    const at::Tensor memory = at::empty({tensor.numel() + 1}, tensor.options());
    shifted.push_back(memory.slice(0, 1).view(tensor.sizes()).copy_(tensor));
  }
  const Evaluation ours = evaluate(sequence, with(aligned, shifted), gradients);
  const Evaluation expected = evaluate(sequence, aligned, gradients);
  EXPECT_TRUE(identical(ours, expected));
}

// Most warps have a part of K: warps without element-wise work get one step ahead.
TEST_P(PersistentEngine, EveryScheduleIsBitwiseIdentical) {
  for (const Arguments& a :
       {dense({6, 7, 5, 200})(1), packed({7, 6, 6, 6, 3, 2, 2, 2, 2, 1}, 3, 40)(1)}) {
    const Tensors gradients = random_gradients(a);
    const Temporarily seed(schedule_seed, uint64_t{1000});
    const Evaluation first = evaluate(sequence, a, gradients);
    for (int again = 0; again < 5; ++again) {
      const Evaluation next = evaluate(sequence, a, gradients);
      ASSERT_TRUE(identical(next, first)) << again;
    }
  }
}

// Three and six units of K per warp, awaited together.
TEST(PersistentRounds, AStepNeedsOne) {
  const PersistentSetting persistent(true);
  const Temporarily in_turn(round_robin, true);
  const int64_t steps = 6;
  const Arguments a = sequence_problem({steps, 3, 4, 520}, at::kHalf, 1);
  const Tensors saved = forward(a);
  EXPECT_LE(rounds, steps + 1);
  EXPECT_EQ(launches([&] { backward(a, saved); }), 1);
  EXPECT_LE(rounds, steps + 2);
}

// NaNs with all bits set, like an absent word.
at::Tensor with_nan(const at::Tensor& tensor, int64_t position) {
  at::Tensor copy = tensor.clone();
  copy.view(-1).slice(0, position, position + 2).view(at::kByte).fill_(0xFF);
  return copy;
}

// As in the per-step engine, without a deadlock.
TEST_P(PersistentEngine, NaNsPropagate) {
  const Arguments clean = dense({4, 9, 4, 24})(1);
  const Tensors clean_gradients = random_gradients(clean);
  const auto compare = [](const Arguments& a, const Tensors& gradients) {
    const Evaluation ours = evaluate(sequence, a, gradients);
    const PersistentSetting per_step(false);
    const Evaluation theirs = evaluate(sequence, a, gradients);
    int64_t found = 0;
    for (const auto& [x, y] :
         {std::pair(ours.outputs, theirs.outputs), std::pair(ours.gradients, theirs.gradients)}) {
      for (size_t k = 0; k < x.size(); ++k) {
        found += x[k].isnan().sum().item<int64_t>();
        EXPECT_TRUE(identical(x[k].isnan(), y[k].isnan())) << "result " << k;
      }
    }
    EXPECT_GT(found, 0);
  };
  const Tensors tensors = differentiable(clean);
  for (size_t k = 0; k < tensors.size(); ++k) {
    SCOPED_TRACE(argument_names(clean)[k]);
    for (const int64_t position : {int64_t{0}, tensors[k].numel() / 2, tensors[k].numel() - 2}) {
      Tensors replaced = tensors;
      replaced[k] = with_nan(tensors[k], position);
      compare(with(clean, replaced), clean_gradients);
    }
  }
  for (size_t k = 0; k < clean_gradients.size(); ++k) {
    SCOPED_TRACE(testing::Message() << "gradient " << k);
    Tensors gradients = clean_gradients;
    gradients[k] = with_nan(gradients[k], gradients[k].numel() / 2);
    compare(clean, gradients);
  }
}

TEST(PersistentPlan, UnsupportedCallsHaveAReason) {
  const auto why_not = [](const Arguments& a, int64_t checkpoint_steps = 0) {
    const lltm::SequenceArgs args = {engine_inputs(a, checkpoint_steps), /*save=*/true};
    const char* const reason = lltm::cuda::plan_persistent(args).why_not;
    return std::string(reason == nullptr ? "" : reason);
  };
  const auto problem = [](const Sizes& sizes, at::ScalarType dtype = at::kHalf) {
    return sequence_problem(sizes, dtype, 1);
  };
  EXPECT_EQ(why_not(problem({3, 3, 4, 16})), "");
  EXPECT_EQ(why_not(problem({3, 3, 4, 16}, at::kFloat)), "");
  EXPECT_EQ(why_not(problem({2, 3, 4, 16}, at::kDouble)), "dtype is float64");
  for (const Sizes& empty : {Sizes{0, 3, 4, 16}, {2, 0, 4, 16}, {2, 3, 4, 0}}) {
    EXPECT_EQ(why_not(problem(empty)), "nothing to compute");
  }
  EXPECT_EQ(why_not(problem({2, 3, 4, 20})), "H is not a multiple of 8");
  EXPECT_EQ(why_not(problem({3, 1, 4, 1536})), "");
  {
    const Temporarily little(shared_bytes, int64_t{99} << 10);
    EXPECT_EQ(why_not(problem({3, 1, 4, 2056})), "H is too large");
  }
  EXPECT_EQ(why_not(problem({3, 3, 4, 16}), /*checkpoint_steps=*/2), "");
  EXPECT_EQ(why_not(problem({2, 3, 4, 16})), "too few steps");
  Arguments a = problem({3, 3, 4, 16});
  a.reset = random_reset(a, 1);
  EXPECT_EQ(why_not(a), "");
  a.recurrent_mask = random_mask(a, 1);
  EXPECT_EQ(why_not(a), "");
  const Temporarily small(multiprocessors, int64_t{3});
  const Arguments largest = problem({3, 128, 4, 48});
  EXPECT_EQ(why_not(largest), "");
  EXPECT_EQ(launches([&] { forward(largest); }), 4);
  EXPECT_EQ(why_not(problem({3, 129, 4, 48})), "B is too large");
  EXPECT_EQ(
      why_not(problem({2, 3, 4, 56})), "too few thread blocks run concurrently on this device");
  const Temporarily large(multiprocessors, int64_t{32});
  EXPECT_EQ(why_not(problem({3, 64, 4, 512})), "");
  EXPECT_EQ(why_not(problem({3, 65, 4, 512})), "B is too large");
  const auto in_inference = [&](int64_t steps) {
    const lltm::SequenceArgs args = {engine_inputs(problem({steps, 3, 4, 48}))};
    return lltm::cuda::plan_persistent(args).why_not;
  };
  EXPECT_STREQ(in_inference(1), "too few steps");
  EXPECT_EQ(in_inference(2), nullptr);
}

// ctest checks the printed engines, with LLTM_SCHEDULE set.
TEST(PersistentSchedule, EachCallReportsItsEngine) {
  const Arguments a = sequence_problem({3, 19, 4, 16}, at::kHalf, 1);
  const Temporarily small(multiprocessors, int64_t{2});
  const PersistentSetting persistent(true);
  const Tensors gradients = random_gradients(a);
  EXPECT_EQ(launches([&] { evaluate(sequence, a, gradients); }), 2);
  const PersistentSetting per_step(false);
  sequence(a);
}

TEST(PersistentSettings, TheDefaultIsThePersistentEngine) {
  EXPECT_TRUE(lltm::cuda_persistent());
  const PersistentSetting per_step(false);
  EXPECT_FALSE(lltm::cuda_persistent());
}

// The launch continues after a step that never ran.
TEST(PersistentLaunch, AWordThatTimesOutIsNaNAndAnErrorOfTheNextCall) {
  // Enough polls for words that do appear, with a fixed schedule.
  const Temporarily few(most_polls, 30);
  const Temporarily seed(schedule_seed, uint64_t{1});
  const PersistentSetting persistent(true);
  using T = c10::Half;
  // Three slices of units. Only the first of two rows had a previous step.
  const at::TensorOptions half(at::kHalf), wide(at::kFloat);
  const at::Tensor state = at::zeros({2, 48}, half), weights = at::ones({144 * 48}, half);
  const at::Tensor gates = at::zeros({6, 144}, wide), dz = at::zeros({7, 144}, half);
  const at::Tensor output = at::zeros({7, 48}, half), activations = at::ones({7, 192}, half);
  const at::Tensor dh = at::zeros({2, 48}, wide), dc = at::zeros({2, 48}, wide);
  const auto data = [](const at::Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
  };
  const auto kernel_of = []<typename Args>(const Args& args) {
    return lltm::cuda::persistent_kernel<Args>(lltm::Lltm::kCell, args.hidden, /*tiles=*/1);
  };
  const lltm::cuda::Stream stream = lltm::cuda::current_stream();
  std::uint32_t begun = 0;
  lltm::cuda::LaunchSteps steps = {};
  steps.ascending = true;
  steps.edge = 1;
  steps.previous_rows = 1;
  steps.runs = 1;
  steps.run[0] = {3, 2};
  const Arguments a = sequence_problem({3, 2, 4, 16}, at::kHalf, 1);
  const Tensors results = forward(a);
  const auto expect_an_error_once = [&](const auto& call) {
    {
      const Temporarily other(lltm_test::stream, static_cast<void*>(&begun));
      call();
    }
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(
          std::string(error.what())
              .find(
                  "lltm::sequence: the persistent kernel timed out in an earlier call on this "
                  "stream of cpu, and its results are NaN"),
          std::string::npos);
    }
    call();
  };
  const auto expect_nan_of_the_first_row = [](const at::Tensor& rows) {
    const at::Tensor nan = rows.slice(0, 1).view({3, 2, -1}).isnan();
    EXPECT_TRUE(nan.select(1, 0).all().item<bool>());
    EXPECT_FALSE(nan.select(1, 1).any().item<bool>());
  };

  lltm::cuda::PersistentForwardArgs<T> first;
  first.hidden = 48;
  first.batch = 2;
  first.weights = data(weights);
  first.gates = gates.const_data_ptr<float>();
  first.gates_offset = 1;
  first.h_0 = first.h_before = first.c_before = data(state);
  first.h = first.c = data(state);
  first.output = first.operand = data(output);
  first.words = {&begun, 3, lltm::cuda::failure_word(stream)};
  first.steps = steps;
  lltm::cuda::mark_absent(first.output, static_cast<int64_t>(output.nbytes()), stream);
  const lltm::cuda::DirectionArgs<lltm::cuda::PersistentForwardArgs<T>> one = {{first}, 1};
  EXPECT_TRUE(lltm::cuda::launch_persistent(kernel_of(first), one, 1, stream));
  expect_nan_of_the_first_row(output);
  expect_an_error_once([&] { sequence(a); });

  lltm::cuda::PersistentBackwardArgs<T> second;
  second.hidden = 48;
  second.batch = 2;
  second.weights = data(weights);
  second.activations = data(activations);
  second.dz = data(dz);
  second.dh = dh.mutable_data_ptr<float>();
  second.dc = dc.mutable_data_ptr<float>();
  second.words = {&begun, 6, lltm::cuda::failure_word(stream)};
  second.steps = steps;
  lltm::cuda::mark_absent(second.dz, static_cast<int64_t>(dz.nbytes()), stream);
  const lltm::cuda::DirectionArgs<lltm::cuda::PersistentBackwardArgs<T>> other = {{second}, 1};
  EXPECT_TRUE(lltm::cuda::launch_persistent(kernel_of(second), other, 1, stream));
  expect_nan_of_the_first_row(dz);
  expect_an_error_once([&] { backward(a, results); });
}

// Another stream may occupy multiprocessors longer than a lane polls.
TEST_P(PersistentEngine, BlocksMayStartLate) {
  const Arguments a = dense({4, 9, 3, 40})(1);
  const Tensors gradients = random_gradients(a);
  const Evaluation expected = evaluate(sequence, a, gradients);
  const Temporarily late(late_rounds, 900);
  const Temporarily few(most_polls, 50);
  const Evaluation ours = evaluate(sequence, a, gradients);
  EXPECT_FALSE(lltm::cuda::take_failure(lltm::cuda::current_stream()));
  EXPECT_TRUE(identical(ours, expected));
}

// Then in the cache. The first fill includes the counter of blocks.
TEST_P(PersistentEngine, WordsAreInitializedJustBeforeTheirLaunch) {
  const Arguments a = dense({4, 9, 3, 24})(1);
  const int64_t slots = lltm::find_cell(form_.cell)->slots;
  const auto size = static_cast<int64_t>(a.input.element_size());
  const auto expect_chunks = [&](int64_t row_bytes, const auto& run) {
    const int64_t before = persistent_launches;
    filled.clear();
    run();
    std::map<int64_t, int64_t> bytes;
    for (const auto& [launch, count] : filled) bytes[launch - before] += count;
    const int64_t each = 9 * row_bytes;
    EXPECT_EQ(bytes, (std::map<int64_t, int64_t>{{0, each + 16}, {1, each}, {2, each}, {3, each}}));
  };
  Tensors results;
  expect_chunks(24 * size, [&] { results = forward(a, /*workspace_bytes=*/0); });
  const lltm::SequenceBackwardArgs args = backward_args(a, results);
  const auto plan = lltm::cuda::plan_persistent(args);
  const auto run_backward = [&](int64_t workspace_bytes) {
    return as_list(lltm::cuda::persistent_backward(args, plan, workspace_bytes).value());
  };
  Tensors chunks;
  expect_chunks(slots * 24 * size, [&] { chunks = run_backward(0); });
  EXPECT_TRUE(identical(chunks, run_backward(1 << 20)));
}

// Device operations: ATen operations that compute or copy, GEMMs, fills and launches.
int64_t device_operations(const std::function<void()>& body) {
  static int64_t aten;
  aten = -gemm_calls - persistent_launches - static_cast<int64_t>(filled.size());
  const auto count = [](const at::RecordFunction& call) {
    // Views, memory, operations that call others, and fill_, which only a CPU needs for a sum.
    static const std::set<std::string> others = {
        "as_strided",
        "clone",
        "contiguous",
        "empty",
        "empty_like",
        "empty_strided",
        "fill_",
        "flatten",
        "narrow",
        "slice",
        "t",
        "to",
        "transpose",
        "view"};
    if (others.count(std::string(call.name()).substr(std::strlen("aten::"))) == 0) ++aten;
    return std::unique_ptr<at::ObserverContext>();
  };
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return aten + gemm_calls + persistent_launches + static_cast<int64_t>(filled.size());
}

// Short sequences wait for the host. A layer adds an operation for zero states.
TEST(PersistentOperations, ATrainingCallNeedsFew) {
  const PersistentSetting persistent(true);
  const auto expect_operations = [](const char* cell, int64_t in_forward, int64_t in_backward) {
    SCOPED_TRACE(cell);
    const Arguments a = sequence_problem({5, 3, 8, 24}, at::kHalf, 1, /*bias=*/true, cell);
    Tensors r;
    EXPECT_EQ(device_operations([&] { r = forward(a); }), in_forward);
    lltm::SequenceBackwardArgs args = backward_args(a, r);
    args.output_mask = {true, false, false, true, true, true, true};
    EXPECT_EQ(device_operations([&] { lltm::cuda::sequence_backward(args); }), in_backward);
  };
  expect_operations("lstm", 4, 9);
  expect_operations("gru", 5, 12);
  expect_operations("lltm", 5, 9);
}

// The per-step engine computes all steps, even if a later launch fails.
TEST(PersistentLaunch, IfRejectedTheCallUsesThePerStepEngine) {
  for (const Arguments& a :
       {sequence_problem({3, 70, 4, 24}, at::kHalf, 1),
        packed_problem(falling_lengths(36, 5), 3, 24, at::kHalf, 1)}) {
    const Temporarily small(multiprocessors, int64_t{2});
    const Tensors gradients = random_gradients(a);
    const auto run = [&](bool persistent) {
      const PersistentSetting setting(persistent);
      return evaluate(sequence, a, gradients);
    };
    const Evaluation per_step = run(false);
    const int64_t all = launches([&] { run(true); });
    EXPECT_GE(all, 4);
    for (int64_t left = 0; left < all / 2; ++left) {
      const Temporarily refused(launches_left, left);
      const Evaluation ours = run(true);
      EXPECT_TRUE(identical(ours, per_step)) << left;
    }
  }
}

TEST(PersistentLaunch, IfBackwardIsRejectedOnlyBackwardUsesThePerStepEngine) {
  const Temporarily small(multiprocessors, int64_t{2});
  const Arguments a = sequence_problem({3, 70, 4, 24}, at::kHalf, 1);
  const PersistentSetting persistent(true);
  const Tensors saved = forward(a);
  const int64_t all = launches([&] { backward(a, saved); });
  EXPECT_GT(all, 1);
  Tensors per_step;
  {
    const PersistentSetting off(false);
    per_step = backward(a, saved);
  }
  for (int64_t left = 0; left < all; ++left) {
    const Temporarily refused(launches_left, left);
    EXPECT_TRUE(identical(backward(a, saved), per_step)) << left;
  }
}

// All results must have many elements.
void check_one(const Arguments& a, int64_t expected_launches) {
  const PersistentSetting persistent(true);
  const Tensors gradients = random_gradients(a);
  Evaluation ours;
  EXPECT_EQ(launches([&] { ours = evaluate(sequence, a, gradients); }), expected_launches);
  const Evaluation eager = evaluate(eager_sequence, a, gradients);
  const Evaluation expected = expect(a, gradients);
  for (size_t k = 0; k < ours.outputs.size(); ++k) {
    EXPECT_TRUE(is_accurate(ours.outputs[k], eager.outputs[k], expected.outputs[k])) << k;
  }
  for (size_t k = 0; k < ours.gradients.size(); ++k) {
    EXPECT_TRUE(is_accurate(ours.gradients[k], eager.gradients[k], expected.gradients[k]))
        << argument_names(a)[k];
  }
}

// The kernel passes its self-check.
template <typename Args>
void expect_checked(lltm::cuda::Engine engine, const Args& args) {
  const Temporarily checked(lltm_test::capturing, false);
  const auto plan = lltm::cuda::plan_persistent(args);
  EXPECT_EQ(lltm::cuda::why_not_kernels(*args.cell, args.input, engine, plan), nullptr);
}

// The largest size of each LLTM kernel, and just above the previous kernel's limit. Other cells'
// backward K is another multiple of H.
class PersistentKernels : public testing::TestWithParam<std::tuple<const char*, int64_t, int>> {};
std::string kernel_name(const testing::TestParamInfo<PersistentKernels::ParamType>& info) {
  const auto [cell, size, tiles] = info.param;
  return cell + ("_H" + std::to_string(size)) + "_tiles" + std::to_string(tiles);
}
const auto kTiles = testing::Values(1, 2, 4);
INSTANTIATE_TEST_SUITE_P(
    Sizes,
    PersistentKernels,
    testing::Combine(testing::Values("lltm"), testing::Values(176, 264), kTiles),
    kernel_name);
INSTANTIATE_TEST_SUITE_P(
    SlowSizes,
    PersistentKernels,
    testing::Combine(
        testing::Values("lltm"), testing::Values(256, 512, 520, 768, 776, 1024), kTiles),
    kernel_name);
INSTANTIATE_TEST_SUITE_P(
    SlowCells,
    PersistentKernels,
    testing::Combine(
        testing::Values("lstm", "gru"),
        testing::Values(128, 192, 256, 512, 768),
        testing::Values(2)),
    kernel_name);

TEST_P(PersistentKernels, ValuesAndGradientsMatchOracle) {
  const auto [cell, hidden, tiles] = GetParam();
  const Temporarily one_group(multiprocessors, (hidden + 15) / 16);
  const at::ScalarType dtype = tiles == 2 ? at::kHalf : at::kBFloat16;
  const int64_t rows = tiles == 1 ? 1 : 4 * tiles + 1;
  const Arguments a = sequence_problem({3, rows, 64, hidden}, dtype, 1, /*bias=*/true, cell);
  check_one(a, /*expected_launches=*/2);
  expect_checked(lltm::cuda::Engine::persistent_forward, forward_args(a));
  expect_checked(lltm::cuda::Engine::persistent_backward, backward_args(a, forward(a)));
}

// Backward of these sizes uses the per-step engine.
class PersistentForwardKernels : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(SlowSizes, PersistentForwardKernels, testing::Values(1032, 1288, 1536));

TEST_P(PersistentForwardKernels, ValuesAndGradientsMatchOracle) {
  const Arguments a = sequence_problem({3, 2, 64, GetParam()}, at::kHalf, 1);
  check_one(a, /*expected_launches=*/2);
  expect_checked(lltm::cuda::Engine::persistent_forward, forward_args(a));
}

// A layer's two directions, with different weights: in the same launches if both fit.
class PersistentDirections : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Cells, PersistentDirections, testing::Values("lltm", "lstm", "gru"));

TEST_P(PersistentDirections, ResultsAreBitwiseIdenticalToSeparateCalls) {
  const PersistentSetting persistent(true);
  const auto problem = [](uint64_t seed, bool packed) {
    return requiring_grad(
        packed ? packed_problem(falling_lengths(19, 6), 3, 24, at::kHalf, seed, GetParam())
               : sequence_problem({7, 19, 3, 24}, at::kHalf, seed, /*bias=*/true, GetParam()));
  };
  const auto check = [&](bool packed, int64_t checkpoint_steps, int64_t separate, int64_t both) {
    SCOPED_TRACE(testing::Message() << "packed " << packed << ", steps " << checkpoint_steps);
    std::array<Arguments, 2> calls = {problem(1, packed), problem(2, packed)};
    calls[1].reverse = true;
    Tensors inputs = differentiable(calls[0]);
    for (const at::Tensor& tensor : differentiable(calls[1])) inputs.push_back(tensor);
    const auto run = [&](const auto& layer) {
      const auto [first, second] = layer(
          lltm::SequenceArgs{operator_inputs(calls[0], checkpoint_steps)},
          lltm::SequenceArgs{operator_inputs(calls[1], checkpoint_steps)});
      const auto& [output, h, c] = first;
      const auto& [other_output, other_h, other_c] = second;
      const at::Tensor loss = (output * h.sum() + other_output.square()).sum() + other_h.sum();
      Tensors all = torch::autograd::grad({loss}, inputs);
      all.insert(all.end(), {output, h, other_output, other_h});
      return all;
    };
    Tensors expected, ours;
    EXPECT_EQ(separate, launches([&] {
                expected = run([](const auto& a, const auto& b) {
                  return std::pair(lltm::op::call(a), lltm::op::call(b));
                });
              }));
    EXPECT_EQ(both, launches([&] { ours = run(lltm::sequences_side_by_side); }));
    ASSERT_EQ(ours.size(), expected.size());
    for (size_t k = 0; k < ours.size(); ++k) EXPECT_TRUE(identical(ours[k], expected[k])) << k;
  };
  // Two slices of each direction, with up to 32 rows.
  const Temporarily few(multiprocessors, int64_t{4});
  check(/*packed=*/false, 0, 4, 2);
  check(/*packed=*/true, 0, 4, 2);
  // Each recomputes segments of 4 and 3 steps.
  check(/*packed=*/false, 4, 10, 8);
  const Temporarily fewer(multiprocessors, int64_t{3});
  check(/*packed=*/false, 0, 4, 4);
}

TEST(PersistentPair, FailuresAndTheSelfCheckConcernBothDirections) {
  const PersistentSetting persistent(true);
  const Arguments a = sequence_problem({3, 5, 4, 24}, at::kHalf, 1);
  const lltm::SequenceArgs args = {operator_inputs(a)};
  {
    const Temporarily checked(lltm_test::capturing, false);
    const int64_t of_check = launches([&] { sequence(a); }) - 1;
    EXPECT_GT(of_check, 0);
    lltm::cuda::forget_self_checks();
    EXPECT_EQ(launches([&] { lltm::sequences_side_by_side(args, args); }), of_check + 1);
    lltm::cuda::forget_self_checks();
  }

  Arguments wrong = a;
  wrong.weights = wrong.weights.slice(1, 1);
  EXPECT_THROW(lltm::sequences_side_by_side(args, {operator_inputs(wrong)}), c10::Error);
  EXPECT_EQ(launches([&] { lltm::sequences_side_by_side(args, args); }), 1);
  const Temporarily refused(launches_left, int64_t{0});
  const auto [first, second] = lltm::sequences_side_by_side(args, args);
  const PersistentSetting per_step(false);
  EXPECT_TRUE(identical(std::get<0>(first), sequence(a)[0]));
  EXPECT_TRUE(identical(std::get<0>(second), sequence(a)[0]));
}

// More runs of equal steps than a launch supports. Small weights limit rounding errors.
class PersistentRuns : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(SlowDirections, PersistentRuns, testing::Bool());

TEST_P(PersistentRuns, BatchSizesMayChangeAtEveryStep) {
  constexpr int64_t kLengths = lltm::cuda::kMostRuns + 9;
  Arguments a = packed_problem(falling_lengths(kLengths, kLengths), 16, 40, at::kHalf, 1);
  a.weights = a.weights * 0.25;
  a.reverse = GetParam();
  check_one(a, /*expected_launches=*/4);
}

// Positions and signs of infinities and NaN are as in the per-step engine.
TEST(PersistentFloat32, InfinitiesPropagate) {
  for (const char* cell : {"lltm", "lstm", "rnn_relu"}) {
    const Arguments clean = sequence_problem({4, 9, 4, 136}, at::kFloat, 1, /*bias=*/true, cell);
    const Tensors tensors = differentiable(clean), clean_gradients = random_gradients(clean);
    const auto compare = [](const Arguments& a, const Tensors& gradients) {
      const auto run = [&](bool persistent) {
        const PersistentSetting setting(persistent);
        const Evaluation results = evaluate(sequence, a, gradients);
        Tensors all = results.outputs;
        all.insert(all.end(), results.gradients.begin(), results.gradients.end());
        return all;
      };
      const Tensors ours = run(true), theirs = run(false);
      for (size_t k = 0; k < ours.size(); ++k) {
        EXPECT_TRUE(at::allclose(ours[k], theirs[k], 1e-4, 1e-4, /*equal_nan=*/true)) << k;
      }
    };
    for (const bool shared : {false, true}) {
      const Temporarily in_shared(prefers_shared, shared);
      for (size_t k = 0; k < tensors.size(); ++k) {
        SCOPED_TRACE(testing::Message() << cell << ": " << argument_names(clean)[k]);
        Tensors replaced = tensors;
        replaced[k] = tensors[k].clone();
        replaced[k].view(-1)[7] = -std::numeric_limits<float>::infinity();
        compare(with(clean, replaced), clean_gradients);
      }
      Tensors gradients = clean_gradients;
      gradients[0] = gradients[0].clone();
      gradients[0].view(-1)[11] = std::numeric_limits<float>::infinity();
      compare(clean, gradients);
    }
  }
}

// TF32 has a thousand times the error. The per-step engine is more exact than on a GPU: GEMMs here
// sum in float64.
TEST(PersistentFloat32, ThePrecisionFollowsTheSettings) {
  const Arguments a = sequence_problem({20, 3, 4, 136}, at::kFloat, 1);
  const Tensors gradients = random_gradients(a);
  const at::Tensor exact = expect(a, gradients).outputs[0];
  const auto error = [&](std::optional<std::string> precision, int64_t expected_launches = 2) {
    lltm::set_cuda_float32(precision);
    Evaluation ours;
    EXPECT_EQ(launches([&] { ours = evaluate(sequence, a, gradients); }), expected_launches);
    lltm::set_cuda_float32(std::nullopt);
    return (ours.outputs[0].to(at::kDouble) - exact).abs().max().item<double>();
  };
  const double ieee = error("ieee", /*expected_launches=*/0);
  EXPECT_LT(error({}), 8 * ieee);
  EXPECT_LT(error("tf32x3"), 8 * ieee);
  EXPECT_GT(error("tf32"), 30 * ieee);
  const Temporarily allowed(allow_tf32, true);
  EXPECT_GT(error({}), 30 * ieee);
  EXPECT_LT(error("tf32x3"), 8 * ieee);
  EXPECT_LT(error("ieee", 0), 8 * ieee);
}

}  // namespace
}  // namespace lltm_test
