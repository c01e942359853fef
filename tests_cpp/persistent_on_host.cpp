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

// body(call, lane)
template <typename Args, typename Body>
bool run_grid(const Calls<Args>& calls, std::int64_t groups, std::size_t sums, const Body& body) {
  const Args& first = calls.call[0];
  const std::int64_t slices = (first.hidden + kSliceUnits - 1) / kSliceUnits;
  TORCH_CHECK(slices * groups * calls.count <= resident_blocks(), "a launch that would never end");
  if (lltm_test::launches_left == 0) return false;
  --lltm_test::launches_left;
  ++lltm_test::persistent_launches;
  if (calls.count == 2) ++lltm_test::launches_of_two;
  lltm_test::last_poll_nanoseconds = first.poll_nanoseconds;
  lltm_test::run_grid(
      {static_cast<int>(slices), static_cast<int>(groups), calls.count, sums},
      [&](lltm_test::HostBlock::Lane& lane) {
        const Args& args = calls.call[lane.call()];
        lane.report_to(args.failure);
        body(args, lane);
      },
      lltm_test::schedule_seed++);
  return true;
}

// What a launch reads of what a GEMM has written.
template <typename Page, typename T>
void read_gates(const PersistentForwardArgs<T>& args) {
  std::int64_t rows = 0;
  for (int n = 0; n < args.steps.runs; ++n) {
    rows += std::int64_t{args.steps.run[n].count} * args.steps.run[n].rows;
  }
  const std::int64_t columns = Page::kCell.x.count() * args.hidden;
  const std::int64_t begin =
      args.steps.edge - (args.steps.ascending ? 0 : rows) - args.gates_offset;
  const auto bytes = static_cast<std::int64_t>(sizeof(float)) * rows * columns;
  lltm_test::access_memory(/*stream=*/0, args.gates + begin * columns, bytes, /*writes=*/false);
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
  lltm_test::operands_made = ++lltm_test::clocks[0][0];
}

template <typename T>
bool launch_persistent_forward(
    const CellInfo& cell, const ForwardCalls<T>& calls, std::int64_t groups, int tiles, Stream) {
  bool launched = false;
  visit_cell(cell, [&]<typename Page>(Page) {
    for (int k = 0; k < calls.count; ++k) read_gates<Page>(calls.call[k]);
    visit_forward_kernel<Page, T>(calls.call[0].hidden, tiles, [&](auto units_k, auto tile_count) {
      launched = run_grid(
          calls,
          groups,
          shared_sums<tile_count, kRecurrent<Page>>(),
          [=](const PersistentForwardArgs<T>& args, lltm_test::HostBlock::Lane& lane) {
            persistent_forward<Page, units_k, tile_count>(args, lane);
          });
    });
  });
  return launched;
}

template <typename T>
bool launch_persistent_backward(
    const CellInfo& cell, const BackwardCalls<T>& calls, std::int64_t groups, int tiles, Stream) {
  bool launched = false;
  visit_cell(cell, [&]<typename Page>(Page) {
    visit_backward_kernel<Page, T>(calls.call[0].hidden, tiles, [&](auto units_k, auto tile_count) {
      launched = run_grid(
          calls,
          groups,
          shared_sums<tile_count, 1>(),
          [=](const PersistentBackwardArgs<T>& args, lltm_test::HostBlock::Lane& lane) {
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
    const CellInfo&, const ForwardCalls<float>&, std::int64_t, int, Stream);
template bool launch_persistent_forward(
    const CellInfo&, const ForwardCalls<c10::Half>&, std::int64_t, int, Stream);
template bool launch_persistent_forward(
    const CellInfo&, const ForwardCalls<c10::BFloat16>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const BackwardCalls<float>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const BackwardCalls<c10::Half>&, std::int64_t, int, Stream);
template bool launch_persistent_backward(
    const CellInfo&, const BackwardCalls<c10::BFloat16>&, std::int64_t, int, Stream);

}  // namespace lltm::cuda
