// The persistent kernels under the thread sanitizer, with a CPU thread per thread block, compared
// bitwise with a single thread. Without ATen, so that the sanitizer instruments the entire program.
#include "persistent_on_host.h"

#include "cell/cells.h"
#include "cell/record_definition.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cstring>

namespace lltm_test {
namespace {

namespace cuda = lltm::cuda;

// Values at multiples of 16 bytes.
template <typename V>
class Values {
 public:
  Values(std::int64_t count, float scale, std::uint64_t seed)
      : bytes_(static_cast<std::size_t>(count) * sizeof(V)),
        data_(static_cast<V*>(::operator new(bytes_, std::align_val_t(16)))) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t n = 0; n < count; ++n) new (data_ + n) V(scale * normal(random));
  }
  ~Values() { ::operator delete(data_, std::align_val_t(16)); }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;

  V* data() const { return data_; }
  void mark_absent() { std::memset(static_cast<void*>(data_), 0xFF, bytes_); }
  bool equals(const Values& other) const { return std::memcmp(data_, other.data_, bytes_) == 0; }

 private:
  std::size_t bytes_;
  V* data_;
};

// Two slices, and two groups with one tile. The batch size decreases.
constexpr std::int64_t kHidden = 24, kBatch = 11;
constexpr cuda::StepRun kRuns[] = {{2, 11}, {1, 9}, {2, 3}};
constexpr std::int64_t kRows = 2 * 11 + 9 + 2 * 3;
constexpr bool kReset[kRows] = {false, true, false, false, true};
constexpr int kSlices = 2, kGroups = 2, kTiles = 1;

cuda::LaunchSteps steps(bool ascending) {
  cuda::LaunchSteps steps = {};
  steps.ascending = ascending;
  steps.edge = ascending ? 0 : kRows;
  steps.runs = 3;
  for (int n = 0; n < 3; ++n) steps.run[n] = kRuns[ascending ? n : 2 - n];
  return steps;
}

using Run = decltype(&run_grid);

template <typename Definition, typename T>
struct Forward {
  Values<T> weights{cuda::kRecurrent<Definition> * kHidden * kHidden, 0.15F, 1};
  Values<float> gates{kRows * Definition::kSlots * kHidden, 1, 2};
  Values<T> h_0{kBatch * kHidden, 1, 3}, h{kBatch * kHidden, 1, 3}, c{kBatch * kHidden, 1, 4};
  Values<T> output{kRows * kHidden, 0, 5}, activations{kRows * Definition::kSaved * kHidden, 0, 6};

  void run(Run run_on, bool ascending, std::uint64_t seed) {
    output.mark_absent();
    cuda::PersistentForwardArgs<T> args;
    args.hidden = kHidden;
    args.batch = kBatch;
    args.weights = weights.data();
    args.gates = gates.data();
    args.h_0 = h_0.data();
    args.h_before = args.h = h.data();
    args.c_before = args.c = c.data();
    args.output = args.operand = output.data();
    args.reset = kReset;
    args.activations = activations.data();
    std::uint32_t begun = 0;
    args.words = {&begun, kSlices * kGroups, nullptr};
    args.steps = steps(ascending);
    run_on(
        {kSlices, kGroups, cuda::shared_sums(kTiles, cuda::kRecurrent<Definition>)},
        [&](HostBlock::Lane& lane) {
          lane.use(args.words);
          cuda::run_steps<lltm::DefinitionRegisters<Definition>, 1, 0, kTiles, false, false>(
              args, lane);
        },
        seed);
  }
};

template <typename Definition, typename T>
struct Backward {
  Values<T> weights{cuda::kRecurrent<Definition> * kHidden * kHidden, 0.15F, 1};
  Values<T> activations{kRows * Definition::kSaved * kHidden, 0.5F, 2};
  Values<T> grad_output{kRows * kHidden, 1, 3}, dz{kRows * Definition::kSlots * kHidden, 0, 4};
  Values<float> dh{kBatch * kHidden, 1, 5}, dc{kBatch * kHidden, 1, 6};

  void run(Run run_on, bool ascending, std::uint64_t seed) {
    dz.mark_absent();
    cuda::PersistentBackwardArgs<T> args;
    args.hidden = kHidden;
    args.batch = kBatch;
    args.weights = weights.data();
    args.activations = activations.data();
    args.grad_output = {grad_output.data(), 0, kHidden, kHidden, 1};
    args.dz = dz.data();
    args.reset = kReset;
    args.dh_before = args.dh = dh.data();
    args.dc_before = args.dc = dc.data();
    std::uint32_t begun = 0;
    args.words = {&begun, kSlices * kGroups, nullptr};
    args.steps = steps(ascending);
    args.steps.run[args.steps.runs++] = {1, 0};
    run_on(
        {kSlices, kGroups, cuda::shared_sums(kTiles, 1)},
        [&](HostBlock::Lane& lane) {
          lane.use(args.words);
          cuda::run_steps<lltm::DefinitionRegisters<Definition>, 2, 0, kTiles, false, false>(
              args, lane);
        },
        seed);
  }
};

template <typename Kernels>
class PersistentThreads : public testing::Test {};
template <typename P, typename V>
struct Kernels {
  using Definition = P;
  using T = V;
};
using Types = testing::Types<
    Kernels<lltm::Lltm, c10::BFloat16>,
    Kernels<lltm::Lltm, c10::Half>,
    Kernels<lltm::Lstm, c10::Half>,
    Kernels<lltm::Lstm, float>,
    Kernels<lltm::Gru, c10::Half>>;
TYPED_TEST_SUITE(PersistentThreads, Types);

TYPED_TEST(PersistentThreads, ForwardIsBitwiseIdentical) {
  for (const bool ascending : {true, false}) {
    Forward<typename TypeParam::Definition, typename TypeParam::T> one, many;
    one.run(run_grid, ascending, 1);
    many.run(run_grid_on_threads, ascending, 2);
    EXPECT_TRUE(many.output.equals(one.output));
    EXPECT_TRUE(many.activations.equals(one.activations));
    EXPECT_TRUE(many.h.equals(one.h));
    EXPECT_TRUE(many.c.equals(one.c));
  }
}

TYPED_TEST(PersistentThreads, BackwardIsBitwiseIdentical) {
  for (const bool ascending : {true, false}) {
    Backward<typename TypeParam::Definition, typename TypeParam::T> one, many;
    one.run(run_grid, ascending, 1);
    many.run(run_grid_on_threads, ascending, 2);
    EXPECT_TRUE(many.dz.equals(one.dz));
    EXPECT_TRUE(many.dh.equals(one.dh));
    EXPECT_TRUE(many.dc.equals(one.dc));
  }
}

}  // namespace
}  // namespace lltm_test
