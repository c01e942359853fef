#include "cuda/context.h"
#include "cuda/kernel/compiled.h"
#include "cuda/kernel/persistent.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace lltm::cuda {

// In host memory that every device can write. Never freed: kernels may run until the process ends.
// PyTorch has fewer streams on eight devices; further streams share the last word.
std::uint32_t* failure_word(Stream stream) {
  constexpr std::size_t kWords = 1024;
  static std::mutex& mutex = *new std::mutex;
  static auto& indices = *new std::map<std::pair<c10::DeviceIndex, void*>, std::size_t>;
  static std::uint32_t* const words = [] {
    const OutsideOfCapture outside;
    void* memory = nullptr;
    check_driver(
        functions().cuMemHostAlloc(
            &memory, kWords * sizeof(std::uint32_t), kHostAllocPortable | kHostAllocDeviceMap));
    return new (memory) std::uint32_t[kWords]();
  }();
  void* const handle = is_capturing(stream) ? nullptr : stream.handle;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = indices.try_emplace({current_device(), handle}, indices.size());
  return words + std::min(found->second, kWords - 1);
}

bool take_failure(Stream stream) {
  return std::atomic_ref(*failure_word(stream)).exchange(0) != 0;
}

PersistentLimits persistent_limits() {
  const int capability = compute_capability();
  return {
      capability < 75                                       ? "compute capability is below 7.5"
      : attribute(DeviceAttribute::kCooperativeLaunch) == 0 ? "no cooperative launches"
                                                            : nullptr,
      capability < 80,
      attribute(DeviceAttribute::kMultiprocessorCount),
      attribute(DeviceAttribute::kMaxSharedBytes)};
}

void mark_absent(void* data, std::int64_t bytes, Stream stream) {
  check_driver(
      functions().cuMemsetD8Async(
          reinterpret_cast<Functions::Address>(data),
          0xFF,
          static_cast<std::size_t>(bytes),
          stream.handle));
}

template <typename Args>
bool spills_registers(const PersistentKernel& kernel) {
  constexpr int kMostBytes = 64;  // also a stack frame of sin or cos
  return local_bytes(form_of<Args>(kernel), shared_bytes<Args>(kernel)) > kMostBytes;
}

// After the device's earlier launch in another stream.
template <typename Launch>
bool launch_in_turn(Stream stream, const Launch& launch) {
  struct Last {
    void *event = nullptr, *stream = nullptr;
  };
  static std::mutex& mutex = *new std::mutex;
  static auto& launches = *new std::map<c10::DeviceIndex, Last>;
  const std::lock_guard<std::mutex> lock(mutex);
  Last& last = launches[current_device()];
  if (last.event == nullptr) {
    check_driver(functions().cuEventCreate(&last.event, kEventDisableTiming));
  } else if (last.stream != stream.handle) {
    check_driver(functions().cuStreamWaitEvent(stream.handle, last.event, 0));
  }
  const bool launched = launch();
  check_driver(functions().cuEventRecord(last.event, stream.handle));
  last.stream = stream.handle;
  return launched;
}

template <typename Args>
bool launch_persistent(
    const PersistentKernel& kernel,
    const DirectionArgs<Args>& args,
    std::int64_t groups,
    Stream stream) {
  // A kernel for one direction reads only the first.
  void* parameters[] = {const_cast<DirectionArgs<Args>*>(&args)};
  const Grid grid = {
      slices_of(args.of[0].hidden),
      groups,
      args.count,
      kBlockThreads,
      shared_bytes<Args>(kernel),
      /*cooperative=*/true};
  const auto launch = [&] {
    return launch_compiled(form_of<Args>(kernel), grid, parameters, stream);
  };
  return is_capturing(stream) ? launch() : launch_in_turn(stream, launch);
}

#define LLTM_PERSISTENT_OF(Args)                                 \
  template bool spills_registers<Args>(const PersistentKernel&); \
  template bool launch_persistent(                               \
      const PersistentKernel&, const DirectionArgs<Args>&, std::int64_t, Stream);
LLTM_PERSISTENT_OF(PersistentForwardArgs<float>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentForwardArgs<c10::BFloat16>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<float>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::Half>)
LLTM_PERSISTENT_OF(PersistentBackwardArgs<c10::BFloat16>)
#undef LLTM_PERSISTENT_OF

}  // namespace lltm::cuda
