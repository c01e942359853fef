// The CUDA backend without CUDA: host versions of CUDA's functions and of launch_compiled.
#pragma once

#include "cuda/functions.h"
#include "cuda/kernel/compiled.h"

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
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
inline int faulty_tiles = 0;  // limits persistent_fault, unless 0
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

bool launch_persistent_on_host(
    const lltm::cuda::KernelForm& form, const lltm::cuda::Grid& grid, void** parameters);

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

// Inputs of a cell's program. Values of a hidden unit, H apart. Omitted values are zero.
template <typename T>
void append(
    std::vector<double>& to,
    const lltm::Matrix<const T>& matrix,
    int64_t row,
    int64_t col,
    int64_t hidden,
    int count) {
  for (int k = 0; k < count; ++k) {
    const int64_t column = col + k * hidden;
    to.push_back(
        matrix.data == nullptr ? 0.0
                               : static_cast<double>(matrix.row(row)[column * matrix.col_stride]));
  }
}
template <typename T>
std::vector<double> forward_inputs(
    const lltm::CellInfo& cell, const lltm::cuda::ForwardArgs<T>& args, int64_t row, int64_t unit) {
  const int64_t hidden = args.hidden;
  std::vector<double> in, bias;
  append(in, args.gates, row, unit, hidden, cell.slots);
  for (int k = 0; k < cell.slots; ++k) {
    if (cell.x.contains(k)) append(bias, args.bias_ih, 0, unit + cell.x_blocks[k] * hidden, 0, 1);
    if (cell.h.contains(k)) append(bias, args.bias_hh, 0, unit + cell.h_blocks[k] * hidden, 0, 1);
    for (; !bias.empty(); bias.pop_back()) in[k] += bias.back();
  }
  append(in, args.c, row, unit, hidden, cell.state_columns());
  append(in, args.parameters, 0, unit, hidden, cell.parameters);
  return in;
}

template <typename T, typename D>
std::vector<double> backward_inputs(
    const lltm::CellInfo& cell,
    const lltm::cuda::BackwardArgs<T, D>& args,
    int64_t row,
    int64_t unit) {
  const int64_t hidden = args.hidden;
  const int own = cell.reads_h ? 1 : 0;
  std::vector<double> in, dh;
  append(in, args.activations, row, unit, hidden, cell.saved);
  append(in, args.parameters, 0, unit, hidden, cell.parameters);
  append(dh, args.grad_h, row, unit, hidden, 1);
  append(dh, args.grad_h_state, row, unit, hidden, 1);
  append(dh, args.grad_c, row, unit, hidden, own);
  in.push_back(std::accumulate(dh.begin(), dh.end(), 0.0));
  append(in, args.grad_c, row, unit + own * hidden, hidden, cell.states);
  return in;
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
