// The CUDA backend without a GPU: host versions of CUDA's functions and of launch_compiled, which
// executes the kernels' PTX (ptx.h).
#pragma once

#include "cuda/functions.h"
#include "cuda/kernel/compiled.h"

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace lltm_test {
inline bool has_nvrtc = true;
// As in a graph's capture, kernels run unchecked except in test_cuda_self_check.cpp.
inline bool capturing = true;
inline void* stream = nullptr;  // the current stream
// tf32: GEMMs or kernels use TF32 even if PyTorch forbids it.
enum class Fault { none, wrong, fails, tf32 };
// Of element-wise kernels.
inline int64_t step_launches = 0;
inline Fault fault = Fault::none, persistent_fault = Fault::none;
// Limits persistent_fault to launches of which this is true.
struct LaunchKind {
  int tiles, directions;
  bool backward = false, second = false, mask = false, checkpoints = false, ascending = false,
       later = false, later_rows = false;
};
inline std::function<bool(const LaunchKind&)> has_fault;
// Events of other streams that launches waited for.
inline int64_t event_waits = 0;
// torch.backends.cuda.matmul.allow_tf32.
inline bool allow_tf32 = false;
inline int last_math_mode = lltm::cuda::kDefaultMath;
// A matrix address, leading dimension or extent is not a multiple of 16 bytes, as cuBLAS's 16-byte
// kernels require.
inline int64_t gemm_calls = 0, unaligned_gemm_calls = 0;
// GEMMs round each partial sum in order, as cuBLAS may; otherwise sums are nearly exact.
inline bool sums_in_order = false;

inline int capability = 80;
// Concurrent thread blocks of a persistent kernel, and their shared memory.
inline int64_t multiprocessors = 132, shared_bytes = 227 << 10;
// Only one unit of K has its weights in registers.
inline bool prefers_shared = false;
// Of the next launch's schedule; changed by each launch.
inline uint64_t schedule_seed = 1;
inline int64_t persistent_launches = 0;
inline std::set<lltm::cuda::KernelForm> launched_forms;
// Kernels of custom cells with more tiles spill registers.
inline int tiles_without_spills = 4;
// For each fill with absent words: earlier launches, and bytes.
inline std::vector<std::pair<int64_t, int64_t>> filled;
// Launches before launches fail.
inline int64_t launches_left = std::numeric_limits<int64_t>::max();

// Polls of a word before a lane counts, as in persistent_gpu.h.
inline int most_polls = 1 << 22;
// The last thread block begins after this many rounds of all warps.
inline int late_rounds = 0;
// Kernels may access memory that no tensor has allocated, without checks.
inline bool any_memory = false;
// Words that a thread of a slice publishes never arrive if this returns true.
inline std::function<bool(int slice, int thread)> lost;

// Calls body with a null pointer to the type.
template <typename Body>
decltype(auto) visit_type(lltm::cuda::KernelType type, const Body& body) {
  switch (type) {
    case lltm::cuda::KernelType::kDouble:
      return body(static_cast<double*>(nullptr));
    case lltm::cuda::KernelType::kFloat:
      return body(static_cast<float*>(nullptr));
    case lltm::cuda::KernelType::kHalf:
      return body(static_cast<c10::Half*>(nullptr));
    default:
      return body(static_cast<c10::BFloat16*>(nullptr));
  }
}

template <typename Body>
int64_t launches(const Body& body) {
  const int64_t before = persistent_launches;
  body();
  return persistent_launches - before;
}

// ATen operations that compute or copy, GEMMs, fills and launches.
int64_t device_operations(const std::function<void()>& body);

// Sets a variable.
template <typename T>
class Temporarily {
 public:
  Temporarily(T& variable, T value)
      : variable_(variable), before_(std::exchange(variable, value)) {}
  ~Temporarily() { variable_ = before_; }
  Temporarily(const Temporarily&) = delete;
  Temporarily& operator=(const Temporarily&) = delete;

 private:
  T& variable_;
  T before_;
};
}  // namespace lltm_test
