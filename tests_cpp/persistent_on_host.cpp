#include "persistent_on_host.h"

#include "cuda_on_host.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

namespace lltm::cuda {
namespace {

// One block to a multiprocessor.
std::int64_t resident_blocks() {
  return lltm_test::multiprocessors;
}

void run_grid(
    std::int64_t hidden,
    std::int64_t groups,
    std::size_t sums,
    const lltm_test::HostBlock::Body& body) {
  const std::int64_t slices = (hidden + kSliceUnits - 1) / kSliceUnits;
  TORCH_CHECK(slices * groups <= resident_blocks(), "a launch that would never end");
  ++lltm_test::persistent_launches;
  lltm_test::run_grid(
      static_cast<int>(slices), static_cast<int>(groups), sums, body, lltm_test::schedule_seed++);
}

}  // namespace

template <typename T>
std::int64_t resident_forward_blocks(std::int64_t, int) {
  return resident_blocks();
}

template <typename T>
std::int64_t resident_backward_blocks(std::int64_t, int) {
  return resident_blocks();
}

// One that the tuning table can't know.
GpuKind current_gpu() {
  return {0, static_cast<int>(lltm_test::multiprocessors)};
}

void mark_absent(void* data, std::int64_t bytes, Stream) {
  std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
}

template <typename T>
void launch_persistent_forward(
    const PersistentForwardArgs<T>& args, std::int64_t groups, int tiles, Stream) {
  lltm_test::last_poll_nanoseconds = args.poll_nanoseconds;
  visit_forward_kernel<T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
    run_grid(
        args.hidden,
        groups,
        shared_sums<tile_count, kSlots>(),
        [&](lltm_test::HostBlock::Lane& lane) {
          persistent_forward<units_k, tile_count>(args, lane);
        });
  });
}

template <typename T>
void launch_persistent_backward(
    const PersistentBackwardArgs<T>& args, std::int64_t groups, int tiles, Stream) {
  lltm_test::last_poll_nanoseconds = args.poll_nanoseconds;
  visit_backward_kernel<T>(args.hidden, tiles, [&](auto units_k, auto tile_count) {
    run_grid(
        args.hidden, groups, shared_sums<tile_count, 1>(), [&](lltm_test::HostBlock::Lane& lane) {
          persistent_backward<units_k, tile_count>(args, lane);
        });
  });
}

template std::int64_t resident_forward_blocks<float>(std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::Half>(std::int64_t, int);
template std::int64_t resident_forward_blocks<c10::BFloat16>(std::int64_t, int);
template std::int64_t resident_backward_blocks<float>(std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::Half>(std::int64_t, int);
template std::int64_t resident_backward_blocks<c10::BFloat16>(std::int64_t, int);
template void launch_persistent_forward(
    const PersistentForwardArgs<float>&, std::int64_t, int, Stream);
template void launch_persistent_forward(
    const PersistentForwardArgs<c10::Half>&, std::int64_t, int, Stream);
template void launch_persistent_forward(
    const PersistentForwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<float>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<c10::Half>&, std::int64_t, int, Stream);
template void launch_persistent_backward(
    const PersistentBackwardArgs<c10::BFloat16>&, std::int64_t, int, Stream);

}  // namespace lltm::cuda
