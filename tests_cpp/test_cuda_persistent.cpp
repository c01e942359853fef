// The persistent CUDA engine on the CPU (persistent_on_host.h): every class of sizes, under
// schedules of thread blocks and warps that are drawn by chance. Each test sees to it that
// the engine was in fact taken; more of what it has in common with the stepwise one is in
// test_cuda_engine.cpp.
#include "cuda/kernel/persistent.h"
#include "cuda/tuning_table.h"
#include "cuda_engine_autograd.h"
#include "cuda_on_host.h"
#include "persistent_on_host.h"
#include "properties.h"

#include <lltm/backends.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

// ---- mma.m16n8k16, and mma.m16n8k8 of TF32 ----------------------------------

template <typename T>
class PersistentMma : public testing::Test {};
using Types = testing::Types<float, c10::BFloat16, c10::Half>;
TYPED_TEST_SUITE(PersistentMma, Types);

// The column of A, and the row of B, of element i of a lane's fragment, as PTX's documentation
// has them.
template <typename T>
int column_of_a(int thread_in_group, int i) {
  if (sizeof(T) == 4) return i < 2 ? thread_in_group : thread_in_group + 4;
  return thread_in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
}
template <typename T>
int row_of_a(int group_id, int i) {
  if (sizeof(T) == 4) return i % 2 == 0 ? group_id : group_id + 8;
  return i < 2 || (4 <= i && i < 6) ? group_id : group_id + 8;
}
template <typename T>
int row_of_b(int thread_in_group, int i) {
  if (sizeof(T) == 4) return i == 0 ? thread_in_group : thread_in_group + 4;
  return thread_in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
}

// Small integers, so that every sum is exact.
TYPED_TEST(PersistentMma, IsAMatrixProduct) {
  using T = TypeParam;
  constexpr int kElements = 4 / sizeof(T), kDepth = 8 * kElements;
  std::mt19937 random(1);
  const auto draw = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
  float a[16][kDepth], b[kDepth][8], c[16][8], d[32][4];
  for (auto& row : a) std::generate(std::begin(row), std::end(row), draw);
  for (auto& row : b) std::generate(std::begin(row), std::end(row), draw);
  for (auto& row : c) std::generate(std::begin(row), std::end(row), draw);
  Fragments lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    const int group_id = lane >> 2, thread_in_group = lane % 4;
    T of_a[4 * kElements], of_b[2 * kElements];
    for (int i = 0; i < 4 * kElements; ++i) {
      of_a[i] = static_cast<T>(a[row_of_a<T>(group_id, i)][column_of_a<T>(thread_in_group, i)]);
    }
    for (int i = 0; i < 2 * kElements; ++i) {
      of_b[i] = static_cast<T>(b[row_of_b<T>(thread_in_group, i)][group_id]);
    }
    for (int i = 0; i < 4; ++i) {
      d[lane][i] = c[i < 2 ? group_id : group_id + 8][thread_in_group * 2 + (i & 1)];
    }
    lanes[lane].d = d[lane];
    std::memcpy(lanes[lane].a, of_a, sizeof(of_a));
    std::memcpy(lanes[lane].b, of_b, sizeof(of_b));
  }
  emulate_mma<T>(lanes);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, col = lane % 4 * 2 + (i & 1);
      float expected = c[row][col];
      for (int k = 0; k < kDepth; ++k) expected += a[row][k] * b[k][col];
      ASSERT_EQ(d[lane][i], expected) << "lane " << lane << ", element " << i;
    }
  }
}

// ---- polls ------------------------------------------------------------------

// A row of K whose words appear while a lane waits for them, and a count of what it does.
template <int kUnitsK>
struct PolledRow {
  static constexpr int kWords = kUnitsK * lltm::cuda::kWarps * lltm::cuda::kWarpBytes / 4;
  alignas(16) std::uint32_t words[kWords];
  std::function<void(int)> appear;  // in wait(n)
  int waits = 0, reads = 0, most_waits = 100;

  PolledRow() { std::fill(std::begin(words), std::end(words), lltm::cuda::kAbsent); }

  lltm::cuda::Words read(const void* data) {
    ++reads;
    lltm::cuda::Words x;
    std::memcpy(&x, data, sizeof(x));
    return x;
  }
  bool wait(int polls) {
    EXPECT_EQ(polls, ++waits);
    if (waits > 100) throw std::runtime_error("the lane never sees its words");
    if (waits > most_waits) return false;
    appear(waits);
    return true;
  }

  // What a lane of the second warp has of it, having waited for all: NaN for what never came.
  void poll() {
    const auto* const row = reinterpret_cast<const c10::Half*>(words);
    constexpr int kWarp = 1, kLane = 6;
    lltm::cuda::States<kUnitsK> states;
    states.load(*this, row, kWords * 2, kWarp, kLane);
    EXPECT_EQ(std::exchange(reads, 0), kUnitsK);
    states.poll(*this, row, kWarp, kLane);
    for (int j = 0; j < kUnitsK; ++j) {
      const auto first = lltm::cuda::k_of<c10::Half>(kWarp, kLane, j) / 2;
      for (int n = 0; n < 4; ++n) {
        const bool came = words[first + n] != lltm::cuda::kAbsent;
        EXPECT_EQ(states.x[j].w[n], came ? words[first + n] : 0x7FFF7FFF) << j;
      }
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

// A step of the kernels takes as long as the last word does, and one more round trip.
TYPED_TEST(PersistentPoll, AfterTheLastPublicationOneRoundTripIsLeft) {
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

TYPED_TEST(PersistentPoll, WhatIsThereIsNotReadAgain) {
  PolledRow<TypeParam::value> row;
  std::iota(std::begin(row.words), std::end(row.words), 1U);
  row.poll();
  EXPECT_EQ(row.waits, 0);
  EXPECT_EQ(row.reads, 0);
}

// The last units first, one at a time: a lane is never behind what is there.
TYPED_TEST(PersistentPoll, OnlyAbsentUnitsAreReadAgain) {
  constexpr int kUnitsK = TypeParam::value;
  PolledRow<kUnitsK> row;
  row.appear = [&](int n) {
    if (n > kUnitsK) return;  // all are there
    const int words = PolledRow<kUnitsK>::kWords / kUnitsK;
    const auto unit = std::begin(row.words) + (kUnitsK - n) * words;
    std::iota(unit, unit + words, 1U);
  };
  row.poll();
  EXPECT_EQ(row.waits, kUnitsK);
  EXPECT_EQ(row.reads, kUnitsK * (kUnitsK + 1) / 2);
}

TYPED_TEST(PersistentPoll, WhatNeverComesIsNaN) {
  constexpr int kUnitsK = TypeParam::value;
  PolledRow<kUnitsK> row;
  row.most_waits = 1;
  row.appear = [&](int) {
    const auto half = std::begin(row.words) + PolledRow<kUnitsK>::kWords / kUnitsK * (kUnitsK / 2);
    std::iota(std::begin(row.words), half, 1U);
  };
  row.poll();
  EXPECT_EQ(row.waits, 2);
}

// ---- which thread has what --------------------------------------------------

// A thread of the second slice of units and the first group of rows, as a machine.
struct Thread {
  int number;

  int slice() const { return 1; }
  int group() const { return 0; }
  int thread() const { return number; }
};
constexpr int64_t kFirstRow = 40, kHidden = 56;

lltm::cuda::Place place_of(int thread) {
  return lltm::cuda::Place::of<4>(Thread{thread}, kFirstRow, kHidden);
}

template <int kTiles>
void check_that_each_unit_has_one_thread() {
  constexpr int kRows = kTiles * lltm::cuda::kTileRows, kUnits = lltm::cuda::kSliceUnits;
  int threads[kRows][kUnits] = {};
  for (int thread = 0; thread < HostBlock::kThreads; ++thread) {
    const auto p = lltm::cuda::Place::of<kTiles>(Thread{thread}, kFirstRow, kHidden);
    for (int n = 0; n < lltm::cuda::kRowsOfThread<kTiles> && p.takes_part; ++n) {
      EXPECT_TRUE(p.is_in(p.row(n) + 1, n) && !p.is_in(p.row(n), n));
      EXPECT_EQ(p.warp_is_in(p.row(0)), p.row(0) > p.warp_row);
      ++threads[p.row(n) - kFirstRow][p.unit - kUnits];
    }
  }
  for (const auto& row : threads) {
    for (const int count : row) EXPECT_EQ(count, 1) << kTiles;
  }
}

TEST(PersistentPlaces, EachUnitOfARowHasOneThread) {
  check_that_each_unit_has_one_thread<1>();
  check_that_each_unit_has_one_thread<2>();
  check_that_each_unit_has_one_thread<4>();
}

// What a warp accesses at once lies in different banks, of which there are 32, of 4 bytes.
TEST(PersistentPlaces, SumsAreReadAndWrittenWithoutConflictsOfBanks) {
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
  // Of a lane's two rows one after the other, 8 bytes by half a warp at once.
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

// ---- the engine -----------------------------------------------------------

// Sets a variable while it lives.
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

// Sets a variable of the environment, which has none of that name, while it lives.
class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) {
    setenv(name, value, /*replace=*/1);
  }
  ~EnvironmentVariable() { unsetenv(name_); }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* name_;
};

// How many persistent kernels `body` launches.
template <typename Body>
int64_t launches(const Body& body) {
  const int64_t before = persistent_launches;
  body();
  return persistent_launches - before;
}

Tensors forward(const Arguments& a, bool save = true) {
  const auto [output, h_n, c_n, activations] = lltm::cuda::sequence_forward(sequence_args(a, save));
  return {output, h_n, c_n, activations};
}

// Float32 is this engine's where TF32 is allowed. What plain PyTorch computes there is the
// baseline of accuracy.
Function eager_for(at::ScalarType dtype) {
  return dtype == at::kFloat ? eager_tf32_sequence : eager_sequence;
}

struct PersistentAndTf32 {
  PersistentSetting persistent{true};
  Temporarily<bool> tf32{allow_tf32, true};
};
const Form kPersistentTf32 = {
    .name = "persistent",
    .run = engine_sequence,
    .baseline = nullptr,  // of the dtype: eager_for
    .setting = []() -> std::shared_ptr<void> { return std::make_shared<PersistentAndTf32>(); }};

class PersistentEngine : public FormTest {
 protected:
  // Values and gradients; forward and backward take `each` launches.
  void check_persistent(const Problem& problem, int64_t each = 1, uint64_t problems = 1) const {
    int64_t calls = 0;
    const Function counted = [&](const Arguments& a) {
      ++calls;
      return engine_sequence(a);
    };
    const int64_t launched = launches(
        [&] { lltm_test::check(counted, eager_for(dtype()), problem, kRandom, problems); });
    EXPECT_EQ(launched, 2 * each * calls);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    PersistentEngine,
    each_case(kPersistentTf32, std::array{at::kBFloat16, at::kHalf, at::kFloat}),
    case_name);

// Half a slice of units, more than one slice, and half of the last one; rows that fill no
// tile, one, and more than one.
TEST_P(PersistentEngine, ValuesAndGradientsMatchOracle) {
  for (const Sizes& sizes :
       {Sizes{2, 1, 16, 8}, Sizes{5, 3, 5, 24}, Sizes{7, 8, 3, 16}, Sizes{3, 17, 9, 40}}) {
    check_persistent(dense(sizes), 1, 2);
  }
  check_persistent(dense({5, 3, 4, 24}, /*bias=*/false));
}

TEST_P(PersistentEngine, PackedValuesAndGradientsMatchOracle) {
  check_persistent(packed({5}, 3, 8));
  check_persistent(packed({7, 6, 5, 4, 3, 2, 1}, 3, 24));
  check_persistent(packed({9, 1, 1, 1}, 2, 16));
  // Rows of several groups end in the middle of a tile, and with it.
  check_persistent(packed({6, 6, 6, 5, 5, 5, 5, 5, 5, 4, 4, 4, 4, 2, 2, 2, 2, 2, 1}, 3, 24));
}

TEST_P(PersistentEngine, StepsThatReachNoRowChangeNothing) {
  check_persistent([&](uint64_t seed) {
    Arguments arguments = packed({3, 2}, 3, 8)(seed);
    arguments.batch_sizes = at::cat({*arguments.batch_sizes, at::zeros({2}, at::kLong)});
    return arguments;
  });
}

// As many tiles in a group as it takes for all rows to run at once: 2 and 4, with 3 and 2
// groups; then several launches, the last with fewer groups.
TEST_P(PersistentEngine, MoreRowsTakeMoreTilesAndThenMoreLaunches) {
  const Temporarily small(multiprocessors, int64_t{6});  // of 2 slices each
  check_persistent(dense({3, 41, 3, 24}));
  check_persistent(dense({3, 77, 3, 24}));
  check_persistent(packed(
      {4, 4, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
       2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
      3,
      24));
  check_persistent(dense({2, 200, 3, 24}), /*each=*/3);
}

TEST_P(PersistentEngine, SeveralLaunchesOfRowsGiveTheSameAsOne) {
  const Arguments arguments = packed(
      {5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2,
       2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1},
      3,
      24)(1);
  const Tensors gradients = random_like(eager_sequence(arguments), 2);
  const Evaluation all = evaluate(engine_sequence, arguments, gradients);
  const Temporarily small(multiprocessors, int64_t{2});
  Evaluation parts;
  EXPECT_EQ(launches([&] { parts = evaluate(engine_sequence, arguments, gradients); }), 4);
  EXPECT_TRUE(identical(parts.outputs, all.outputs));
  EXPECT_TRUE(identical(parts.gradients, all.gradients));
}

TEST_P(PersistentEngine, ChunksGiveTheSameAsTheWhole) {
  const int64_t row = lltm::Lltm::kSlots * 24 * static_cast<int64_t>(sizeof(float));
  for (const Arguments& a : {dense({9, 11, 3, 24})(1), packed({9, 7, 7, 3, 1}, 3, 24)(1)}) {
    const auto with_workspace = [&](int64_t bytes) {
      const auto [output, h_n, c_n, activations] =
          persistent_forward(sequence_args(a, /*save=*/true), bytes).value();
      return Tensors{output, h_n, c_n, activations};
    };
    const Tensors all = with_workspace(lltm::cuda::kWorkspaceBytes);
    for (const int64_t rows : {0, 4, 5, 22, 23}) {
      Tensors chunks;
      EXPECT_GT(launches([&] { chunks = with_workspace(rows * row); }), 1);
      EXPECT_TRUE(identical(chunks, all)) << rows << " rows at a time";
    }
  }
}

// All but the first: each step is a chunk, of which two fit in the workspace.
TEST_P(PersistentEngine, TheNextChunkIsProjectedBesideTheSteps) {
  const auto [steps, rows, hidden] = std::array<int64_t, 3>{6, 11, 24};
  const Arguments a = dense({steps, rows, 3, hidden})(1);
  const int64_t bytes =
      2 * rows * lltm::Lltm::kSlots * hidden * static_cast<int64_t>(sizeof(float));
  const auto beside = [&](int64_t workspace_bytes) {
    const int64_t before = gemms_beside;
    persistent_forward(sequence_args(a, /*save=*/true), workspace_bytes).value();
    return gemms_beside - before;
  };
  EXPECT_EQ(beside(bytes), steps - 1);
  EXPECT_EQ(beside(steps / 2 * bytes), 0) << "one chunk";
  // Two groups of two slices.
  const Temporarily just_room(multiprocessors, int64_t{5});
  EXPECT_EQ(beside(bytes), steps - 1);
  {
    const Temporarily captured(capturing, true);
    EXPECT_EQ(beside(bytes), 0) << "in a graph";
  }
  const Temporarily full(multiprocessors, int64_t{4});
  EXPECT_EQ(beside(bytes), 0);
}

// ---- two calls at once ------------------------------------------------------

// The directions of a layer: the same sizes, and steps in opposite orders.
std::array<Arguments, 2> both_directions(const Problem& problem) {
  std::array<Arguments, 2> both = {problem(1), problem(2)};
  both[1].batch_sizes = both[0].batch_sizes;
  both[0].reverse = false;
  both[1].reverse = true;
  return both;
}

// Results and gradients of each of some calls that are made together.
std::vector<Tensors> evaluate_together(
    std::span<const Arguments> calls,
    int64_t workspace_bytes = lltm::cuda::kWorkspaceBytes,
    int64_t checkpoint_steps = 0) {
  std::vector<lltm::SequenceArgs> args;
  for (const Arguments& a : calls)
    args.push_back(sequence_args(a, /*save=*/true, checkpoint_steps));
  const auto results = lltm::cuda::persistent_forward(args, workspace_bytes).value();
  std::vector<Tensors> all, grads;
  std::vector<lltm::SequenceBackwardArgs> backward;
  for (const auto& [output, h_n, c_n, saved] : results) {
    all.push_back({output, h_n, c_n, saved});
    grads.push_back(random_like(Tensors{output, h_n, c_n}, 7));
  }
  if (checkpoint_steps > 0) return all;
  for (size_t k = 0; k < calls.size(); ++k) {
    // The gradient of h_0 takes a step more, in one of the calls.
    const lltm::OutputMask mask = {true, calls[k].reverse, true, true, false, true, false};
    backward.push_back(
        {args[k], all[k][0], all[k][3], grads[k][0], grads[k][1], grads[k][2], mask});
  }
  const auto gradients = lltm::cuda::persistent_backward(backward).value();
  for (size_t k = 0; k < calls.size(); ++k) {
    for (const at::Tensor& tensor : as_list(gradients[k])) all[k].push_back(tensor);
  }
  return all;
}

class PersistentPair : public PersistentEngine {};
INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    PersistentPair,
    each_case(kPersistentTf32, std::array{at::kBFloat16, at::kHalf, at::kFloat}),
    case_name);

TEST_P(PersistentPair, GivesWhatEachCallGivesAlone) {
  const int64_t row = lltm::Lltm::kSlots * 24 * static_cast<int64_t>(sizeof(float));
  for (const Problem& problem :
       {dense({5, 11, 3, 24}), packed({7, 7, 7, 3, 1}, 3, 24), dense({4, 3, 3, 21})}) {
    const std::array<Arguments, 2> both = both_directions(problem);
    // One chunk; each step in its own; as many as some rows make, fewer in one of packed calls.
    for (const int64_t rows : {int64_t{1} << 20, int64_t{0}, int64_t{28}}) {
      for (const int64_t checkpoint_steps : {0, 2}) {
        const int64_t before = launches_of_two;
        const auto together = evaluate_together(both, rows * row, checkpoint_steps);
        EXPECT_GT(launches_of_two, before);
        for (size_t k = 0; k < both.size(); ++k) {
          const auto alone = evaluate_together({&both[k], 1}, rows * row, checkpoint_steps);
          EXPECT_TRUE(identical(together[k], alone.front())) << rows << ", call " << k;
        }
      }
    }
  }
}

TEST_P(PersistentPair, TakesHalfOfTheLaunches) {
  const std::array<Arguments, 2> both = both_directions(dense({5, 41, 3, 24}));
  EXPECT_EQ(launches([&] { evaluate_together(both); }), 2) << "forward and backward";
  EXPECT_EQ(launches([&] { evaluate_together({&both[0], 1}); }), 2);
  // A group of each call at once, of two slices and at most 32 rows.
  const Temporarily small(multiprocessors, int64_t{4});
  EXPECT_EQ(launches([&] { evaluate_together(both); }), 4);
}

TEST_P(PersistentPair, WhatDoesNotFitAtOnceRunsOneAfterAnother) {
  const std::array<Arguments, 2> both = both_directions(dense({5, 9, 3, 24}));
  const std::array args = {sequence_args(both[0], /*save=*/true), sequence_args(both[1], true)};
  const auto run = [&] {
    std::vector<Tensors> all;
    for (const auto& [output, h_n, c_n, saved] : lltm::cuda::sequences_forward(args)) {
      all.push_back({output, h_n, c_n, saved});
    }
    return all;
  };
  const std::vector<Tensors> at_once = run();
  const auto expect_same = [&](int64_t expected_launches) {
    std::vector<Tensors> results;
    EXPECT_EQ(launches([&] { results = run(); }), expected_launches);
    for (size_t k = 0; k < both.size(); ++k) EXPECT_TRUE(identical(results[k], at_once[k])) << k;
  };
  expect_same(1);
  {
    const Temporarily small(multiprocessors, int64_t{2});
    expect_same(2);
  }
  const PersistentSetting off(false);
  const std::vector<Tensors> stepwise = run();
  const PersistentSetting on(true);
  const Temporarily refused(launches_left, int64_t{0});
  const std::vector<Tensors> results = run();
  for (size_t k = 0; k < both.size(); ++k) EXPECT_TRUE(identical(results[k], stepwise[k])) << k;
}

// Whichever launch is refused, nothing is left of what ran beside the others when memory is given
// back: with checkpoints a chunk has several launches, and of two packed calls one begins a chunk
// where the other does not.
TEST_P(PersistentPair, WhatRunsBesideIsWaitedForWhereALaunchIsRefused) {
  const int64_t row = lltm::Lltm::kSlots * 24 * static_cast<int64_t>(sizeof(float));
  for (const auto& [problem, rows, checkpoint_steps] :
       {std::tuple(dense({6, 5, 3, 24}), 20, 1),
        std::tuple(packed({7, 7, 7, 3, 1}, 3, 24), 8, 0)}) {
    const std::array<Arguments, 2> both = both_directions(problem);
    for (const size_t count : {1, 2}) {
      std::vector<lltm::SequenceArgs> args;
      for (size_t k = 0; k < count; ++k) {
        args.push_back(sequence_args(both[k], /*save=*/true, checkpoint_steps));
      }
      const auto run = [&, rows = rows] {
        return lltm::cuda::persistent_forward(args, static_cast<int64_t>(count) * rows * row)
            .has_value();
      };
      const int64_t before = gemms_beside, all = launches(run);
      EXPECT_GT(gemms_beside, before);
      for (int64_t left = 0; left < all; ++left) {
        const Temporarily refused(launches_left, left);
        EXPECT_FALSE(run());
        EXPECT_TRUE(all_is_joined()) << left;
      }
    }
  }
}

// ---- more of one call --------------------------------------------------------

TEST_P(PersistentEngine, InferenceGivesTheSame) {
  for (const Arguments& a : {dense({5, 9, 3, 24})(1), packed({5, 4, 4, 1}, 3, 24)(1)}) {
    Tensors trained = forward(a), inferred;
    EXPECT_EQ(launches([&] { inferred = forward(a, /*save=*/false); }), 1);
    EXPECT_FALSE(inferred.back().defined());
    trained.back() = at::Tensor();
    EXPECT_TRUE(
        identical({trained.begin(), trained.end() - 1}, {inferred.begin(), inferred.end() - 1}));
  }
}

TEST_P(PersistentEngine, TwoMatricesGiveTheSameAsTheJoinedOne) {
  const Arguments joined = packed({5, 4, 4, 1}, 3, 24)(1);
  const Tensors gradients = random_like(eager_sequence(joined), 2);
  const Evaluation expected = evaluate(engine_sequence, joined, gradients);
  for (const bool bias_of_h : {false, true}) {
    const Function two = [&](const Arguments& a) {
      CellArguments of_cell = lltm_arguments(a);
      of_cell.weight_hh = a.weights.slice(1, 0, a.h.size(1)).contiguous();
      of_cell.weight_ih = a.weights.slice(1, a.h.size(1)).contiguous();
      if (bias_of_h) std::swap(of_cell.bias_ih, of_cell.bias_hh);
      return run_sequence(of_cell);
    };
    Evaluation ours;
    EXPECT_EQ(launches([&] { ours = evaluate(two, joined, gradients); }), 2);
    EXPECT_TRUE(identical(ours.outputs, expected.outputs));
    EXPECT_TRUE(identical(ours.gradients, expected.gradients));
  }
}

// Rounded to TF32 are factors alone, not what is stored.
TEST_P(PersistentEngine, TheLastOutputIsTheFinalState) {
  const Arguments a = dense({4, 5, 3, 24})(1);
  const Tensors results = forward(a);
  EXPECT_TRUE(identical(results[0][a.reverse ? 0 : 3], results[1]));
}

TEST_P(PersistentEngine, ArgumentsMayBeginAnywhere) {
  const Arguments aligned = dense({3, 5, 0, 24})(1);
  const Tensors gradients = random_like(eager_sequence(aligned), 2);
  Tensors shifted;
  for (const at::Tensor& tensor : differentiable(aligned)) {
    const at::Tensor memory = at::empty({tensor.numel() + 1}, tensor.options());
    shifted.push_back(memory.slice(0, 1).view(tensor.sizes()).copy_(tensor));
  }
  const Evaluation ours = evaluate(engine_sequence, with(aligned, shifted), gradients);
  const Evaluation expected = evaluate(engine_sequence, aligned, gradients);
  EXPECT_TRUE(identical(ours.outputs, expected.outputs));
  EXPECT_TRUE(identical(ours.gradients, expected.gradients));
}

// Also with hidden units enough for most warps to have a part of K, so that warps without an
// element-wise part get a step ahead.
TEST_P(PersistentEngine, EveryScheduleGivesTheSameBits) {
  for (const Arguments& a :
       {dense({6, 7, 5, 200})(1), packed({7, 6, 6, 6, 3, 2, 2, 2, 2, 1}, 3, 40)(1)}) {
    const Tensors gradients = random_like(eager_sequence(a), 2);
    const Temporarily seed(schedule_seed, uint64_t{1000});
    const Evaluation first = evaluate(engine_sequence, a, gradients);
    for (int again = 0; again < 5; ++again) {
      const Evaluation next = evaluate(engine_sequence, a, gradients);
      ASSERT_TRUE(identical(next.outputs, first.outputs)) << again;
      ASSERT_TRUE(identical(next.gradients, first.gradients)) << again;
    }
  }
}

// Three and six units of K to a warp, which a lane that waits for all of them sees together.
TEST(PersistentRounds, AStepTakesOne) {
  const PersistentSetting persistent(true);
  const Temporarily in_turn(round_robin, true);
  const int64_t steps = 6;
  const Arguments a = sequence_problem({steps, 3, 4, 520}, at::kHalf, 1);
  const Tensors saved = forward(a);
  EXPECT_LE(rounds, steps + 1);
  const at::Tensor grad_output = at::ones_like(saved[0]), none;
  persistent_backward({sequence_args(a, /*save=*/true),
                       saved[0],
                       saved[3],
                       grad_output,
                       none,
                       none,
                       /*output_mask=*/{false, true, false, false}})
      .value();
  EXPECT_LE(rounds, steps + 2);
}

// NaNs of all bits set, which as a word would be one that is not there yet.
at::Tensor with_nan(const at::Tensor& tensor, int64_t position) {
  at::Tensor copy = tensor.clone();
  const at::ScalarType bits = tensor.element_size() == 4 ? at::kInt : at::kShort;
  copy.view(bits).view(-1).slice(0, position, position + 2).fill_(-1);
  return copy;
}

// The NaNs reach what they reach in the stepwise engine, and nothing waits for them.
TEST_P(PersistentEngine, NaNsArePassedOn) {
  const Arguments clean = dense({4, 9, 4, 24})(1);
  const Tensors clean_gradients = random_like(eager_sequence(clean), 2);
  const auto compare = [](const Arguments& a, const Tensors& gradients) {
    const Evaluation ours = evaluate(engine_sequence, a, gradients);
    const PersistentSetting stepwise(false);
    const Evaluation theirs = evaluate(engine_sequence, a, gradients);
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
    SCOPED_TRACE(kArgumentNames[k]);
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

TEST_P(PersistentEngine, InfinitiesAndLargeValuesArePassedOn) {
  Arguments a = dense({3, 5, 4, 16})(1);
  a.c = a.c.clone();
  a.c.view(-1)[3] = std::numeric_limits<double>::infinity();
  a.input = a.input * 500;
  const Tensors ours = forward(a);
  const PersistentSetting stepwise(false);
  const Tensors theirs = forward(a);
  for (size_t k = 0; k < ours.size(); ++k) {
    EXPECT_TRUE(identical(ours[k].isinf(), theirs[k].isinf())) << k;
    EXPECT_FALSE(ours[k].isnan().any().item<bool>()) << k;
  }
}

// ---- which problems it takes ----------------------------------------------

int64_t forward_launches(const Arguments& a) {
  return launches([&] { forward(a); });
}

// As plan_rows's limits are in bytes, so is H here.
Arguments problem_of_row_bytes(at::ScalarType dtype, int64_t bytes, int64_t batch = 3) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  return sequence_problem({1, batch, 4, bytes / element}, dtype, 1);
}

TEST(PersistentPlan, Float32IsTakenWhereTf32IsAllowed) {
  const PersistentSetting persistent(true);
  const Arguments a = sequence_problem({3, 5, 4, 20}, at::kFloat, 1);
  const Tensors gradients = random_like(eager_sequence(a), 2);
  const Expected expected = expect(a, gradients);
  const auto error = [&](const Evaluation& evaluation) {
    double largest = 0, scale = 0;
    const at::Tensor output = evaluation.outputs[0].to(at::kDouble).contiguous();
    for (size_t k = 0; k < expected.outputs[0].data.size(); ++k) {
      const auto y = static_cast<double>(expected.outputs[0].data[k]);
      largest = std::max(largest, std::abs(output.const_data_ptr<double>()[k] - y));
      scale = std::max(scale, std::abs(y));
    }
    return largest / scale;
  };
  const auto evaluated = [&](int64_t expected_launches) {
    Evaluation evaluation;
    EXPECT_EQ(
        launches([&] { evaluation = evaluate(engine_sequence, a, gradients); }), expected_launches);
    return evaluation;
  };
  EXPECT_LT(error(evaluated(0)), std::ldexp(1, -20));
  const Temporarily tf32(allow_tf32, true);
  // The weights alone are off by up to 2^-11 of their size.
  EXPECT_GT(error(evaluated(2)), std::ldexp(1, -16));
  {
    const EnvironmentVariable forbidden("NVIDIA_TF32_OVERRIDE", "0");
    EXPECT_LT(error(evaluated(0)), std::ldexp(1, -20));
  }
  {
    const EnvironmentVariable any("NVIDIA_TF32_OVERRIDE", "1");
    evaluated(2);
  }
  const PersistentSetting stepwise(false);
  evaluated(0);
}

// The kernels see more units, of zeros, where 16 bytes are no multiple.
TEST_P(PersistentEngine, AnyNumberOfUnitsMatchesOracle) {
  for (const int64_t hidden : {1, 7, 23}) {
    SCOPED_TRACE(hidden);
    check_persistent(dense({4, 5, 3, hidden}));
    check_persistent(packed({5, 4, 4, 1}, 3, hidden));
  }
  check_persistent(dense({3, 2, 4, 9}, /*bias=*/false));
}

TEST_P(PersistentEngine, CheckpointsAreThoseOfTheStepsAndChangeNothing) {
  for (const int64_t hidden : {24, 21}) {
    for (const Arguments& a :
         {dense({10, 9, 3, hidden})(1), packed({10, 9, 8, 6, 5, 5, 4, 3, 1}, 3, hidden)(1)}) {
      const Tensors whole = forward(a);
      for (const int64_t every : {1, 3, 100}) {
        const auto run = [&](int64_t bytes) {
          const auto [output, h_n, c_n, checkpoints] =
              persistent_forward(sequence_args(a, /*save=*/true, every), bytes).value();
          return Tensors{output, h_n, c_n, checkpoints};
        };
        const Tensors ours = run(lltm::cuda::kWorkspaceBytes);
        EXPECT_TRUE(identical({ours.begin(), ours.end() - 1}, {whole.begin(), whole.end() - 1}))
            << every;
        EXPECT_EQ(ours.back().sizes(), (std::vector<int64_t>{(9 + every) / every, 9, hidden}));
        EXPECT_TRUE(identical(ours.back()[0], a.c));
        EXPECT_TRUE(identical(run(/*bytes=*/0), ours)) << "a launch for each step";
        // c before step k is what a shorter call ends with.
        if (every != 3 || a.batch_sizes || a.reverse) continue;
        Arguments first = a;
        first.input = a.input.slice(0, 0, 6);
        EXPECT_TRUE(identical(ours.back()[2], forward(first)[2]));
      }
    }
  }
}

TEST_P(PersistentEngine, CheckpointedTrainingMatchesOracle) {
  for (const int64_t every : {2, 4}) {
    int64_t calls = 0;
    const Function counted = [&](const Arguments& a) {
      ++calls;
      return engine_checkpointed(every)(a);
    };
    const int64_t launched = launches(
        [&] { lltm_test::check(counted, eager_for(dtype()), dense({7, 5, 3, 24}), kRandom, 1); });
    // A segment of backward is run forward and backward.
    EXPECT_EQ(launched, 3 * ((6 + every) / every) * calls);
  }
}

TEST(PersistentPlan, TheLimitsOfHAreInBytes) {
  const PersistentSetting persistent(true);
  const Temporarily tf32(allow_tf32, true);
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(name(dtype));
    EXPECT_EQ(forward_launches(problem_of_row_bytes(dtype, 16)), 1);
    EXPECT_EQ(forward_launches(problem_of_row_bytes(dtype, 48)), 1);
    EXPECT_EQ(forward_launches(problem_of_row_bytes(dtype, 40)), 1) << "no multiple of 16";
    EXPECT_EQ(forward_launches(problem_of_row_bytes(dtype, 3072, 1)), 1);
    EXPECT_EQ(forward_launches(problem_of_row_bytes(dtype, 3088, 1)), 0);
  }
}

TEST(PersistentPlan, OthersRunStepByStep) {
  const PersistentSetting persistent(true);
  const auto taken = [](const Sizes& sizes) {
    return forward_launches(sequence_problem(sizes, at::kBFloat16, 1));
  };
  EXPECT_EQ(taken({2, 3, 4, 16}), 1);
  EXPECT_EQ(taken({0, 3, 4, 16}) + taken({2, 0, 4, 16}) + taken({2, 3, 4, 0}), 0) << "empty";
  EXPECT_EQ(forward_launches(sequence_problem({2, 3, 4, 16}, at::kFloat, 1)), 0);
  EXPECT_EQ(forward_launches(sequence_problem({2, 3, 4, 16}, at::kDouble, 1)), 0);
  {
    const Temporarily small(multiprocessors, int64_t{3});
    EXPECT_EQ(taken({2, 3, 4, 48}), 1);
    EXPECT_EQ(taken({2, 3, 4, 56}), 0) << "more slices than run at once";
    EXPECT_EQ(taken({1, 128, 4, 48}), 4);
    EXPECT_EQ(taken({1, 129, 4, 48}), 0) << "more launches than are worth it";
  }
  {
    const Temporarily none(multiprocessors, int64_t{0});
    EXPECT_EQ(taken({2, 3, 4, 16}), 0);
  }
  const PersistentSetting stepwise(false);
  EXPECT_EQ(taken({2, 3, 4, 16}), 0);
}

TEST(PersistentPlan, AReasonIsGivenForAllOthers) {
  const auto why_not = [](const Arguments& a) {
    const lltm::SequenceArgs args = sequence_args(a, /*save=*/true);
    const auto attempt = lltm::cuda::persistent_forward({&args, 1});
    EXPECT_EQ(attempt.has_value(), attempt.why_not == nullptr);
    return std::string(attempt ? "" : attempt.why_not);
  };
  const auto problem = [](const Sizes& sizes, at::ScalarType dtype = at::kHalf) {
    return sequence_problem(sizes, dtype, 1);
  };
  EXPECT_EQ(why_not(problem({2, 3, 4, 16})), "");
  EXPECT_EQ(why_not(problem({2, 3, 4, 16}, at::kDouble)), "float64");
  EXPECT_EQ(why_not(problem({2, 3, 4, 16}, at::kFloat)), "float32, and TF32 is not allowed");
  EXPECT_EQ(why_not(problem({0, 3, 4, 16})), "nothing to compute");
  EXPECT_EQ(why_not(problem({1, 1, 4, 1544})), "H is too large");
  Arguments a = problem({2, 3, 4, 16});
  a.reset = random_reset(a, 1);
  EXPECT_EQ(why_not(a), "a reset");
  a.reset = std::nullopt;
  a.recurrent_mask = random_mask(a, 1);
  EXPECT_EQ(why_not(a), "a recurrent mask");
  const Temporarily small(multiprocessors, int64_t{3});
  EXPECT_EQ(why_not(problem({1, 129, 4, 48})), "B is so large");
  EXPECT_EQ(why_not(problem({2, 3, 4, 56})), "too few thread blocks run at once on this device");
  const Temporarily refused(launches_left, int64_t{0});
  EXPECT_EQ(why_not(problem({2, 3, 4, 48})), "the GPU refused a launch");
}

// ctest looks at what these print, with LLTM_SCHEDULE in the environment.
TEST(PersistentSchedule, EachCallSaysWhichEngineItTook) {
  const Arguments a = sequence_problem({2, 19, 4, 16}, at::kHalf, 1);
  const Temporarily small(multiprocessors, int64_t{2});
  const PersistentSetting persistent(true);
  const Tensors gradients = random_like(eager_sequence(a), 2);
  EXPECT_EQ(launches([&] { evaluate(engine_sequence, a, gradients); }), 2);
  const PersistentSetting stepwise(false);
  forward(a);
}

TEST(PersistentSettings, TheDefaultIsTheStepwiseEngine) {
  EXPECT_FALSE(lltm::cuda_persistent());
  const PersistentSetting persistent(true);
  EXPECT_TRUE(lltm::cuda_persistent());
}

// ---- how a problem is run, where it has been measured ----------------------

using lltm::cuda::Direction;
using lltm::cuda::find_tuning;
using lltm::cuda::GpuKind;
using lltm::cuda::Tuning;
using lltm::cuda::TuningEntry;

constexpr GpuKind kGpu = {90, 132};
constexpr std::array<TuningEntry, 7> kTable = {{
    {kGpu, "gru", Direction::forward, 2, 512, 16, {1, 20}},
    {kGpu, "gru", Direction::forward, 2, 512, 64, {2, 0}},
    {kGpu, "gru", Direction::forward, 2, 768, 16, {1, 0}},
    {kGpu, "gru", Direction::forward, 2, 768, 128, {0, 0}},
    {kGpu, "gru", Direction::backward, 2, 768, 32, {4, 40}},
    {kGpu, "lstm", Direction::forward, 2, 768, 16, {2, 20}},
    {{80, 108}, "gru", Direction::forward, 2, 768, 128, {4, 0}},
}};

std::optional<Tuning> tuning_on(
    const GpuKind& gpu, Direction direction, int64_t hidden, int64_t batch) {
  return find_tuning(kTable, gpu, "gru", direction, 2, hidden, batch);
}
std::optional<Tuning> forward_tuning(int64_t hidden, int64_t batch) {
  return tuning_on(kGpu, Direction::forward, hidden, batch);
}

TEST(PersistentTuning, TheSmallestMeasuredSizesThatAreEnoughCount) {
  EXPECT_EQ(forward_tuning(512, 16), (Tuning{1, 20}));
  EXPECT_EQ(forward_tuning(264, 1), (Tuning{1, 20}));
  EXPECT_EQ(forward_tuning(512, 17), (Tuning{2, 0}));
  EXPECT_EQ(forward_tuning(520, 16), (Tuning{1, 0}));
  EXPECT_EQ(forward_tuning(768, 128), (Tuning{0, 0})) << "step by step";
  EXPECT_EQ(tuning_on(kGpu, Direction::backward, 768, 8), (Tuning{4, 40}));
  EXPECT_EQ(tuning_on({80, 108}, Direction::forward, 768, 8), (Tuning{4, 0}));
  EXPECT_EQ(find_tuning(kTable, kGpu, "lstm", Direction::forward, 2, 768, 8), (Tuning{2, 20}));
}

TEST(PersistentTuning, NothingIsSaidOfWhatWasNotMeasured) {
  EXPECT_EQ(forward_tuning(776, 1), std::nullopt) << "more hidden units";
  EXPECT_EQ(forward_tuning(512, 65), std::nullopt) << "more rows, although 768 units have them";
  EXPECT_EQ(forward_tuning(248, 1), std::nullopt) << "far fewer hidden units";
  EXPECT_EQ(tuning_on({90, 114}, Direction::forward, 768, 8), std::nullopt);
  EXPECT_EQ(tuning_on({80, 132}, Direction::forward, 768, 8), std::nullopt);
  EXPECT_EQ(tuning_on(kGpu, Direction::backward, 512, 33), std::nullopt);
  const auto forward = Direction::forward;
  EXPECT_EQ(find_tuning(kTable, kGpu, "gru", forward, 4, 768, 8), std::nullopt) << "dtype";
  EXPECT_EQ(find_tuning(kTable, kGpu, "lltm", forward, 2, 768, 8), std::nullopt) << "cell";
}

// What the engine could not run would make it stepwise without a word.
TEST(PersistentTuning, TheTableNamesWaysThatThereAre) {
  for (const TuningEntry& entry : lltm::cuda::kTuningTable) {
    const Tuning& tuning = entry.tuning;
    const auto& counts = lltm::cuda::kTileCounts;
    EXPECT_TRUE(tuning.tiles == 0 || std::ranges::find(counts, tuning.tiles) != std::end(counts));
    EXPECT_GE(tuning.poll_nanoseconds, 0);
    EXPECT_NE(lltm::find_cell(entry.cell), nullptr);
    EXPECT_TRUE(find_tuning(
        lltm::cuda::kTuningTable,
        entry.gpu,
        entry.cell,
        entry.direction,
        entry.element_bytes,
        entry.most_hidden,
        entry.most_batch));
  }
}

// All ways give the same bits, in as many launches as the tiles make.
TEST(PersistentTuning, AWayThatIsAskedForIsTakenOrNone) {
  const Temporarily small(multiprocessors, int64_t{6});  // 3 groups of 2 slices each
  const Arguments a = sequence_problem({3, 41, 3, 24}, at::kBFloat16, 1);
  const auto with_tuning = [&](const Tuning& tuning) {
    const auto result =
        persistent_forward(sequence_args(a, /*save=*/true), lltm::cuda::kWorkspaceBytes, tuning);
    if (!result) return Tensors();
    const auto [output, h_n, c_n, activations] = *result;
    return Tensors{output, h_n, c_n, activations};
  };
  const Tensors expected = with_tuning({4, 0});
  for (const auto& [tiles, count] : {std::pair(1, 2), {2, 1}, {4, 1}}) {
    Tensors results;
    EXPECT_EQ(launches([&, tiles = tiles] { results = with_tuning({tiles, 20}); }), count) << tiles;
    EXPECT_TRUE(identical(results, expected)) << tiles;
    EXPECT_EQ(last_poll_nanoseconds, 20);
  }
  EXPECT_EQ(launches([&] { EXPECT_TRUE(with_tuning({0, 0}).empty()); }), 0) << "step by step";
  EXPECT_EQ(launches([&] { EXPECT_TRUE(with_tuning({3, 0}).empty()); }), 0) << "no such kernel";
}

TEST(PersistentTuning, BackwardTakesTheWayThatIsAskedForToo) {
  const Temporarily small(multiprocessors, int64_t{6});
  const Arguments a = sequence_problem({3, 41, 3, 24}, at::kHalf, 1);
  const Tensors saved = forward(a);
  const at::Tensor grad_output = at::ones_like(saved[0]), none;
  const auto with_tuning = [&](const Tuning& tuning) {
    const auto result = persistent_backward(
        {sequence_args(a, /*save=*/true),
         saved[0],
         saved[3],
         grad_output,
         none,
         none,
         /*output_mask=*/{true, true, true, true}},
        tuning);
    if (!result) return Tensors();
    return as_list(*result);
  };
  const Tensors expected = with_tuning({4, 0});
  for (const auto& [tiles, count] : {std::pair(1, 2), {2, 1}, {4, 1}}) {
    Tensors results;
    EXPECT_EQ(launches([&, tiles = tiles] { results = with_tuning({tiles, 40}); }), count) << tiles;
    EXPECT_TRUE(identical(results, expected)) << tiles;
    EXPECT_EQ(last_poll_nanoseconds, 40);
  }
  EXPECT_TRUE(with_tuning({0, 0}).empty());
}

// ---- what ends a launch, and what refuses it --------------------------------

// A launch that goes on from a step which never ran: nobody publishes the words that it waits for.
TEST(PersistentLaunch, AWordThatNeverComesIsNaNAndAnErrorOfTheNextCall) {
  // So many that what does come comes before, as on a GPU; in one schedule, whatever ran before.
  const Temporarily few(most_polls, 30);
  const Temporarily seed(schedule_seed, uint64_t{1});
  const at::TensorOptions options(at::kFloat);
  // Three slices of units, and two rows, of which the step before had the first.
  const at::Tensor state = at::zeros({2, 48}, options), weights = at::ones({144 * 48}, options);
  const at::Tensor gates = at::zeros({6, 144}, options), dz = at::zeros({7, 144}, options);
  const at::Tensor output = at::zeros({7, 48}, options), activations = at::ones({7, 192}, options);
  const at::Tensor dh = at::zeros_like(state), dc = at::zeros_like(state);
  const auto data = [](const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); };
  const lltm::cuda::Stream stream = lltm::cuda::current_stream();
  lltm::cuda::LaunchSteps steps = {};
  steps.ascending = true;
  steps.edge = 1;
  steps.previous_rows = 1;
  steps.runs = 1;
  steps.run[0] = {3, 2};
  const Arguments a = sequence_problem({3, 2, 4, 16}, at::kFloat, 1);
  const auto expect_an_error_once = [&](const auto& call) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(
          std::string(error.what()).find("lltm::sequence: the persistent engine waited in vain"),
          std::string::npos);
    }
    call();
  };
  const Tensors results = forward(a);

  lltm::cuda::PersistentForwardArgs<float> first;
  first.hidden = 48;
  first.batch = 2;
  first.weights = data(weights);
  first.gates = data(gates);
  first.gates_offset = 1;
  first.h_0 = first.h = first.c = data(state);
  first.output = data(output);
  first.failure = lltm::cuda::failure_word();
  first.steps = steps;
  lltm::cuda::mark_absent(first.output, static_cast<int64_t>(output.nbytes()), stream);
  EXPECT_TRUE(
      lltm::cuda::launch_persistent_forward<float>(lltm::Lltm::kCell, {1, {first}}, 1, 1, stream));
  const at::Tensor steps_of_output = output.slice(0, 1).view({3, 2, 48});
  EXPECT_TRUE(steps_of_output.select(1, 0).isnan().all().item<bool>());
  EXPECT_FALSE(steps_of_output.select(1, 1).isnan().any().item<bool>()) << "the other row";
  expect_an_error_once([&] { forward(a); });

  lltm::cuda::PersistentBackwardArgs<float> backward;
  backward.hidden = 48;
  backward.batch = 2;
  backward.weights = data(weights);
  backward.activations = data(activations);
  backward.dz = data(dz);
  backward.dh = data(dh);
  backward.dc = data(dc);
  backward.failure = lltm::cuda::failure_word();
  backward.steps = steps;
  lltm::cuda::mark_absent(backward.dz, static_cast<int64_t>(dz.nbytes()), stream);
  EXPECT_TRUE(
      lltm::cuda::launch_persistent_backward<float>(
          lltm::Lltm::kCell, {1, {backward}}, 1, 1, stream));
  EXPECT_TRUE(dz.slice(0, 1).view({3, 2, 144}).select(1, 0).isnan().all().item<bool>());
  EXPECT_FALSE(dz.slice(0, 1).view({3, 2, 144}).select(1, 1).isnan().any().item<bool>());
  const at::Tensor ones = at::ones_like(results[0]), none;
  expect_an_error_once([&] {
    lltm::cuda::sequence_backward(
        {sequence_args(a, /*save=*/true),
         results[0],
         results[3],
         ones,
         none,
         none,
         /*output_mask=*/{true, true, true, true}});
  });
}

// At the first launch or a later one: then the results of all steps are those of the other engine.
TEST(PersistentLaunch, ARefusedOneLeavesTheCallToTheStepwiseEngine) {
  for (const Arguments& a :
       {sequence_problem({3, 70, 4, 24}, at::kHalf, 1),
        packed_problem(
            {5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2,
             2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1},
            3,
            24,
            at::kHalf,
            1)}) {
    const Temporarily small(multiprocessors, int64_t{2});
    const Tensors gradients = random_like(eager_sequence(a), 2);
    const auto run = [&](bool persistent) {
      const PersistentSetting setting(persistent);
      return evaluate(engine_sequence, a, gradients);
    };
    const Evaluation stepwise = run(false);
    // Of forward and of backward, so that each is refused at its first launch and later.
    const int64_t all = launches([&] { run(true); });
    EXPECT_GE(all, 4);
    for (int64_t left = 0; left < all / 2; ++left) {
      const Temporarily refused(launches_left, left);
      const Evaluation ours = run(true);
      EXPECT_TRUE(identical(ours.outputs, stepwise.outputs)) << left;
      EXPECT_TRUE(identical(ours.gradients, stepwise.gradients)) << left;
    }
  }
}

TEST(PersistentLaunch, ARefusedBackwardLeavesOnlyItselfToTheStepwiseEngine) {
  const Temporarily small(multiprocessors, int64_t{2});
  const Arguments a = sequence_problem({3, 70, 4, 24}, at::kHalf, 1);
  const PersistentSetting persistent(true);
  const Tensors saved = forward(a);
  const at::Tensor ones = at::ones_like(saved[0]), none;
  const auto backward = [&] {
    return as_list(
        lltm::cuda::sequence_backward(
            {sequence_args(a, /*save=*/true),
             saved[0],
             saved[3],
             ones,
             none,
             none,
             /*output_mask=*/{true, true, true, true}}));
  };
  const int64_t all = launches(backward);
  EXPECT_GT(all, 1);
  Tensors stepwise;
  {
    const PersistentSetting off(false);
    stepwise = backward();
  }
  for (int64_t left = 0; left < all; ++left) {
    const Temporarily refused(launches_left, left);
    EXPECT_TRUE(identical(backward(), stepwise)) << left;
  }
}

// ---- every kernel ---------------------------------------------------------

// One problem whose results all have many elements, judged by itself.
void check_one(const Arguments& a, int64_t expected_launches) {
  const Temporarily tf32(allow_tf32, true);
  const Tensors gradients = random_like(eager_sequence(a), 2);
  Evaluation ours;
  EXPECT_EQ(launches([&] { ours = evaluate(engine_sequence, a, gradients); }), expected_launches);
  const Evaluation eager = evaluate(eager_for(a.input.scalar_type()), a, gradients);
  const Expected expected = expect(a, gradients);
  for (size_t k = 0; k < ours.outputs.size(); ++k) {
    EXPECT_TRUE(is_accurate(ours.outputs[k], eager.outputs[k], expected.outputs[k])) << k;
  }
  for (size_t k = 0; k < ours.gradients.size(); ++k) {
    EXPECT_TRUE(is_accurate(ours.gradients[k], eager.gradients[k], expected.gradients[k]))
        << kArgumentNames[k];
  }
}

// A kernel for each number of units of K that a warp has, and each number of tiles. The
// largest size of each kernel, and one that is just too large for the one before: sizes are H in
// 16 bits, and half of them in float32, whose kernels are as many.
class PersistentKernels : public testing::TestWithParam<std::tuple<bool, int64_t, int>> {};
std::string kernel_name(const testing::TestParamInfo<PersistentKernels::ParamType>& info) {
  const auto [tf32, size, tiles] = info.param;
  return (tf32 ? "tf32_H" : "H") + std::to_string(tf32 ? size / 2 : size) + "_tiles" +
         std::to_string(tiles);
}
INSTANTIATE_TEST_SUITE_P(
    Sizes,
    PersistentKernels,
    testing::Combine(testing::Bool(), testing::Values(176, 264), testing::Values(1, 2, 4)),
    kernel_name);
INSTANTIATE_TEST_SUITE_P(
    SlowSizes,
    PersistentKernels,
    testing::Combine(
        testing::Bool(), testing::Values(256, 512, 520, 768, 776, 1024), testing::Values(1, 2, 4)),
    kernel_name);

TEST_P(PersistentKernels, ValuesAndGradientsMatchOracle) {
  const auto [tf32, size, tiles] = GetParam();
  const int64_t hidden = tf32 ? size / 2 : size;
  const PersistentSetting setting(true);
  const Temporarily one_group(multiprocessors, (hidden + 15) / 16);
  const at::ScalarType dtype = tf32 ? at::kFloat : tiles == 2 ? at::kHalf : at::kBFloat16;
  const int64_t rows = tiles == 1 ? 1 : 4 * tiles + 1;
  check_one(sequence_problem({2, rows, 64, hidden}, dtype, 1), /*expected_launches=*/2);
}

// Forward goes further than backward, which is the stepwise engine's from there on.
class PersistentForwardKernels
    : public testing::TestWithParam<std::tuple<at::ScalarType, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(
    SlowSizes,
    PersistentForwardKernels,
    testing::Combine(testing::Values(at::kHalf), testing::Values(1032, 1288, 1536)));
INSTANTIATE_TEST_SUITE_P(
    SlowTf32Sizes,
    PersistentForwardKernels,
    testing::Combine(testing::Values(at::kFloat), testing::Values(516, 644, 768)));

TEST_P(PersistentForwardKernels, ValuesAndGradientsMatchOracle) {
  const auto [dtype, hidden] = GetParam();
  const PersistentSetting setting(true);
  check_one(sequence_problem({2, 2, 64, hidden}, dtype, 1), /*expected_launches=*/1);
}

// More runs of equal steps than a launch has room for. Small weights, or rounding errors
// would grow over this many steps.
class PersistentRuns : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(SlowDirections, PersistentRuns, testing::Bool());

TEST_P(PersistentRuns, BatchSizesMayChangeAtEveryStep) {
  const PersistentSetting setting(true);
  std::vector<int64_t> lengths;
  for (int64_t length = lltm::cuda::kMostRuns + 9; length > 0; --length) lengths.push_back(length);
  Arguments a = packed_problem(lengths, 16, 40, at::kHalf, 1);
  a.weights = a.weights * 0.25;
  a.reverse = GetParam();
  check_one(a, /*expected_launches=*/4);
}

// Whose kernels keep the state to themselves: the other engine takes the call.
TEST(Persistent, LeavesResetsAndMasksToTheStepwiseEngine) {
  const PersistentSetting setting(true);
  Arguments a = sequence_problem({20, 9, 16, 40}, at::kHalf, 1);
  a.weights = a.weights * 0.5;
  check_one(a, /*expected_launches=*/2);
  Arguments masked = a;
  a.reset = random_reset(a, 1);
  check_one(a, /*expected_launches=*/0);
  masked.recurrent_mask = random_mask(masked, 1);
  check_one(masked, /*expected_launches=*/0);
}

}  // namespace
}  // namespace lltm_test
