#include "persistent_on_host.h"

#include "cuda/kernel/persistent_launch.h"
#include "cuda_on_host.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <utility>

namespace lltm::cuda {
namespace {

std::uint32_t failure = 0;

}  // namespace

bool has_persistent_kernels(const CellInfo& cell) {
  return visit_persistent_cell(cell, [](auto) {});
}

template <typename Args>
std::int64_t resident_blocks(const CellInfo&, std::int64_t, int) {
  return lltm_test::multiprocessors;
}

std::uint32_t* failure_word() {
  return &failure;
}

bool take_failure() {
  return std::exchange(failure, 0) != 0;
}

void mark_absent(void* data, std::int64_t bytes, Stream) {
  std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
  lltm_test::filled.emplace_back(lltm_test::persistent_launches, bytes);
}

template <typename Args>
bool launch_persistent(
    const CellInfo& cell, const DirectionArgs<Args>& args, std::int64_t groups, int tiles, Stream) {
  const std::int64_t hidden = args.of[0].hidden, slices = slices_of(hidden);
  TORCH_CHECK(
      args.count * slices * groups <= lltm_test::multiprocessors, "a launch that would never end");
  TORCH_CHECK(lltm_test::persistent_fault != lltm_test::Fault::fails, "an illegal instruction");
  if (lltm_test::launches_left == 0) return false;
  --lltm_test::launches_left;
  ++lltm_test::persistent_launches;
  visit_persistent_cell(cell, [&]<typename Definition>(Definition) {
    visit_kernel<Definition, Args>(hidden, tiles, [&](auto units_k, auto tile_count) {
      lltm_test::run_grid(
          {static_cast<int>(slices),
           static_cast<int>(groups),
           shared_sums<tile_count, kOutputsOf<Definition, Args>>(),
           args.count},
          [&](lltm_test::HostBlock::Lane& lane) {
            const Args& mine = args.of[lane.direction()];
            lane.use(mine.words);
            run_steps<Definition, units_k, tile_count>(mine, lane);
          },
          lltm_test::schedule_seed++);
    });
  });
  for (int n = 0; n < args.count; ++n) {
    const LaunchWords& words = args.of[n].words;
    TORCH_CHECK(*words.begun == words.blocks, "blocks are expected that never begin");
  }
  if constexpr (Args::kIsForward) {
    if (lltm_test::persistent_fault == lltm_test::Fault::wrong) args.of[0].h[hidden - 1] = 2.0F;
  }
  return true;
}

#define LLTM_PERSISTENT_OF(Args)                                                   \
  template std::int64_t resident_blocks<Args>(const CellInfo&, std::int64_t, int); \
  template bool launch_persistent(                                                 \
      const CellInfo&, const DirectionArgs<Args>&, std::int64_t, int, Stream);
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::BFloat16>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::BFloat16>)
#undef LLTM_PERSISTENT_OF

}  // namespace lltm::cuda
