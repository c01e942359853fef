#include "persistent_on_host.h"

#include "cuda_on_host.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <utility>

namespace lltm::cuda {
namespace {

// One block to a multiprocessor.
std::int64_t resident_blocks() {
  return lltm_test::multiprocessors;
}

bool run_grid(
    std::int64_t hidden,
    std::int64_t groups,
    std::size_t sums,
    const lltm_test::HostBlock::Body& body) {
  const std::int64_t slices = (hidden + kSliceUnits - 1) / kSliceUnits;
  TORCH_CHECK(slices * groups <= resident_blocks(), "a launch that would never end");
  if (lltm_test::launches_left == 0) return false;
  --lltm_test::launches_left;
  ++lltm_test::persistent_launches;
  lltm_test::run_grid(
      static_cast<int>(slices), static_cast<int>(groups), sums, body, lltm_test::schedule_seed++);
  return true;
}

std::uint32_t failure = 0;

}  // namespace

template <typename T>
std::int64_t resident_forward_blocks(const CellInfo&, std::int64_t, int) {
  return resident_blocks();
}

template <typename T>
std::int64_t resident_backward_blocks(const CellInfo&, std::int64_t, int) {
  return resident_blocks();
}

// One that the tuning table can't know.
GpuKind current_gpu() {
  return {0, static_cast<int>(lltm_test::multiprocessors)};
}

std::uint32_t* failure_word() {
  return &failure;
}

bool take_failure() {
  return std::exchange(failure, 0) != 0;
}

void mark_absent(void* data, std::int64_t bytes, Stream) {
  std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
}

template <typename T>
bool launch_persistent_forward(
    const CellInfo& cell,
    const PersistentForwardArgs<T>& args,
    std::int64_t groups,
    int tiles,
    Stream) {
  lltm_test::last_poll_nanoseconds = args.poll_nanoseconds;
  bool launched = false;
  visit_cell(cell, [&]<typename Page>(Page) {
    visit_forward_kernel<Page, T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
      launched = run_grid(
          args.hidden,
          groups,
          shared_sums<tile_count, kRecurrent<Page>>(),
          [&](lltm_test::HostBlock::Lane& lane) {
            lane.report_to(args.failure);
            persistent_forward<Page, units_k, tile_count>(args, lane);
          });
    });
  });
  return launched;
}

template <typename T>
bool launch_persistent_backward(
    const CellInfo& cell,
    const PersistentBackwardArgs<T>& args,
    std::int64_t groups,
    int tiles,
    Stream) {
  lltm_test::last_poll_nanoseconds = args.poll_nanoseconds;
  bool launched = false;
  visit_cell(cell, [&]<typename Page>(Page) {
    visit_backward_kernel<Page, T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
      launched = run_grid(
          args.hidden, groups, shared_sums<tile_count, 1>(), [&](lltm_test::HostBlock::Lane& lane) {
            lane.report_to(args.failure);
            persistent_backward<Page, units_k, tile_count>(args, lane);
          });
    });
  });
  return launched;
}

template std::int64_t resident_forward_blocks<float>(const CellInfo&, std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::Half>(const CellInfo&, std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::BFloat16>(const CellInfo&, std::int64_t, int);
template std::int64_t resident_backward_blocks<float>(const CellInfo&, std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::Half>(const CellInfo&, std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::BFloat16>(const CellInfo&, std::int64_t, int);
template bool launch_persistent_forward(
    const CellInfo&, const PersistentForwardArgs<float>&, std::int64_t, int, Stream);
template bool launch_persistent_forward(
    const CellInfo&, const PersistentForwardArgs<c10::Half>&, std::int64_t, int, Stream);
template bool launch_persistent_forward(
    const CellInfo&, const PersistentForwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const PersistentBackwardArgs<float>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const PersistentBackwardArgs<c10::Half>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const PersistentBackwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);

}  // namespace lltm::cuda
