// Persistent kernels keep the recurrent weights in registers for a chunk of steps.
//
// A thread block has kSliceUnits hidden units for a group of rows. A group's blocks synchronize
// through their results: h in forward, dz in backward. Before a launch, every bit of this memory is
// 1 ("absent"); a consumer polls each 32-bit word until it changes. Every NaN is stored as the same
// value, so published words are never absent.
//
// No ATen header: also compiled by NVRTC.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "cuda/kernel/elementwise.h"

#include <cstdint>

namespace lltm::cuda {

constexpr int kSliceUnits = 16;  // hidden units per thread block: M in an mma instruction
constexpr int kTileRows = 8;     // rows per tile: N in an mma instruction
constexpr int kWarps = 8;        // per thread block; they split K
constexpr int kWarpLanes = 32;
constexpr int kBlockThreads = kWarps * kWarpLanes;
constexpr std::int64_t slices_of(std::int64_t hidden) {
  return (hidden + kSliceUnits - 1) / kSliceUnits;
}

constexpr int kTileCounts[] = {1, 2, 4};
// In float32, several tiles of two directions would spill registers.
template <typename T>
constexpr int most_tiles(int directions) {
  return directions > 1 && sizeof(T) == sizeof(float) ? 1 : 4;
}

// 16 adjacent bytes in a row of a state are a lane's operands, in four lanes a unit of K. A
// multiple of kHiddenMultiple units makes them belong to one row and gate.
template <typename T>
constexpr int kLaneUnits = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kWarpUnits = 4 * kLaneUnits<T>;
constexpr std::int64_t kHiddenMultiple = 8;

// Partial sums for two adjacent units, over a warp's K.
struct alignas(8) Sums {
  float values[2];
};
constexpr int kTileSums = kTileRows * kSliceUnits / 2;

// A step's element-wise part reads one half while warps that are ahead write the other.
constexpr int shared_sums(int tiles, int outputs) {
  return 2 * kWarps * tiles * outputs * kTileSums;
}

// Outputs of a thread block's GEMM: pre-activations that depend on h, in backward dh.
template <typename Args>
constexpr int outputs_of(const CellInfo& cell) {
  return Args::kIsForward ? cell.h.count() : 1;
}

// A kernel for a direction and T: Args.
struct PersistentKernel {
  const CellInfo* cell;
  int tiles;
  bool tf32;           // float32: products in TF32, otherwise 3xTF32
  int units;           // of K per warp, with weights in registers
  int shared_units;    // further units, with weights in shared memory, in chunks
  bool heads = false;  // K has the units of a head
  int directions = 1;  // most in a launch
};

// Of 255 registers, a unit's weights occupy 8 per output and its states 4. 3xTF32 and addresses of
// shared memory need more. `make check-cuda-build` compiles the largest kernels without spills.
constexpr int kMostOutputs = 12;  // cells with more run per step
constexpr int most_register_units(int outputs, bool shares, bool tf32) {
  if (shares) return outputs == 1 ? (tf32 ? 6 : 8) : outputs == 12 ? 1 : (tf32 ? 11 : 13) / outputs;
  return outputs == 1 ? 12 : 16 / outputs;
}
static_assert(most_register_units(kMostOutputs, /*shares=*/true, /*tf32=*/true) > 0);
constexpr int shared_chunk(int outputs) {
  return outputs == 1 ? 4 : 2;
}

// `head_units`: H, or H / heads.
template <typename Args>
PersistentKernel persistent_kernel(
    const CellInfo& cell, std::int64_t head_units, int tiles, bool tf32 = false) {
  const int outputs = outputs_of<Args>(cell), chunk = shared_chunk(outputs);
  const std::int64_t k = Args::kIsForward ? head_units : cell.h.count() * head_units;
  const int piece = kWarps * kWarpUnits<typename Args::Element>;
  const auto units = static_cast<int>((k + piece - 1) / piece);
  if (units <= most_register_units(outputs, /*shares=*/false, tf32))
    return {&cell, tiles, tf32, units, 0};
  const int most = most_register_units(outputs, /*shares=*/true, tf32);
  const int shared = (units - most + chunk - 1) / chunk * chunk;
  return {&cell, tiles, tf32, units > shared ? units - shared : 1, shared};
}

// Shared memory of a thread block.
template <typename Args>
constexpr std::int64_t shared_bytes(const PersistentKernel& kernel) {
  const int outputs = outputs_of<Args>(*kernel.cell);
  const std::int64_t fragments = std::int64_t{kWarps} * outputs * kernel.shared_units * 2;
  return std::int64_t{shared_sums(kernel.tiles, outputs)} * static_cast<int>(sizeof(Sums)) +
         fragments * kWarpLanes * 16;
}

struct StepRun {
  std::int32_t count, rows;
};

// Kernel-order steps as runs with equal row counts, as a kernel parameter: no copy to the device.
constexpr int kMostRuns = 128;
struct LaunchSteps {
  // A step's rows (steps.h) follow the previous step's, otherwise precede them.
  bool ascending;
  std::int32_t edge;  // start of the first step's rows, or their end if descending
  std::int32_t time;  // the first step's time step
  // In an earlier launch; 0 rows if none.
  std::int32_t previous_offset, previous_rows;
  int runs;
  StepRun run[kMostRuns + 1];  // backward adds a step without rows
};

// (T, B, H) or packed (N, H) with any 32-bit strides, or null. time_stride or offset_stride is
// zero.
template <typename T>
struct StepMatrix {
  T* data = nullptr;
  std::int32_t time_stride = 0, offset_stride = 0, row_stride = 0, col_stride = 0;
};

// Thread blocks increment `begun`, up to `blocks`, across launches. All bits are set before the
// first, and the count starts from there.
struct LaunchWords {
  std::uint32_t* begun = nullptr;
  std::uint32_t blocks = 0xFFFFFFFF;
  std::uint32_t* failure = nullptr;  // failure_word(stream)
};

// N, B: rows over all steps and in the state, 32-bit, as a GPU multiplies 64 bits in four
// instructions. S pre-activations: Sx depend on x, Sh on h. G: blocks in a bias. K states, P
// parameters, A saved values (cell.h). Matrices without strides are contiguous. Alignment: 16 bytes
// if marked (16), else 8. A launch computes rows [first_row, first_row + groups * tiles *
// kTileRows) in the state.
template <typename T>
struct PersistentForwardArgs {
  using Element = T;
  static constexpr bool kIsForward = true;
  std::int32_t hidden = 0;
  std::int32_t head_units = 0;  // U: H, or H / heads, a multiple of kSliceUnits
  std::int32_t batch = 0;
  std::int32_t first_row = 0;
  const T* weights = nullptr;         // (heads, Sh * U, U), in pre-activation order (16)
  Matrix<const T> bias_ih;            // (G * H), row stride 0; or null
  Matrix<const T> bias_hh;            // (G * H), row stride 0; or null
  Matrix<const T> parameters;         // (P * H), row stride 0; or null
  const float* gates = nullptr;       // (rows in the launch's steps, Sx * H): x W_x^T
  std::int32_t gates_offset = 0;      // the sequence's row at which `gates` begins
  const T* h_0 = nullptr;             // (B, H), with the mask (16)
  const T* h_before = nullptr;        // (B, H), before the launch; may be h
  const T* c_before = nullptr;        // (B, K * H), before the launch; may be c
  T* h = nullptr;                     // (B, H), after the launch; not h_0
  T* c = nullptr;                     // (B, K * H), after the launch
  T* output = nullptr;                // (N, H)
  const T* recurrent_mask = nullptr;  // (B, H), or null
  // (N, H): h with the mask, as other thread blocks read it; without a mask, output. Before the
  // launch, its steps are absent (16).
  T* operand = nullptr;
  T* activations = nullptr;     // (N, A * H), or null
  const bool* reset = nullptr;  // (N): true before steps from initial states; or null
  // (ceil(T / checkpoint_steps), B, K * H): c before every checkpoint_steps-th step; or null.
  T* checkpoints = nullptr;
  std::int32_t checkpoint_steps = 0, last_time = 0;
  LaunchWords words;
  LaunchSteps steps;

  void continue_from_here() {
    h_before = h;
    c_before = c;
  }
};

// In backward order. A last step without rows propagates the h gradient to the initial state.
template <typename T>
struct PersistentBackwardArgs {
  using Element = T;
  static constexpr bool kIsForward = false;
  std::int32_t hidden = 0;
  std::int32_t head_units = 0;  // as in forward
  std::int32_t batch = 0;
  std::int32_t first_row = 0;
  const T* weights = nullptr;      // (heads, U, Sh * U), forward's weights, transposed (16)
  const T* activations = nullptr;  // (N, A * H)
  Matrix<const T> parameters;      // as in forward
  StepMatrix<const T> grad_output;
  const bool* reset = nullptr;        // as in forward
  const T* recurrent_mask = nullptr;  // as in forward
  // (N, (S + P) * H): pre-activations, then parameters. Before the launch, its steps are absent
  // (16).
  T* dz = nullptr;
  const float* dh_before = nullptr;  // (B, H), before the launch; may be dh; zeros if null
  const float* dc_before = nullptr;  // (B, K * H), as dh_before
  float* dh = nullptr;               // (B, H), after the launch
  float* dc = nullptr;               // (B, K * H), after the launch
  LaunchWords words;
  LaunchSteps steps;

  void continue_from_here() {
    dh_before = dh;
    dc_before = dc;
  }
};

// A kernel's parameter, at most 4 KiB: calls that run concurrently, one per blockIdx.z. Only the
// number of groups must agree.
template <typename Args>
struct DirectionArgs {
  Args of[2];
  int count = 0;
};
static_assert(sizeof(DirectionArgs<PersistentForwardArgs<float>>) <= 4096);
static_assert(sizeof(DirectionArgs<PersistentBackwardArgs<float>>) <= 4096);

// Kernels on the stream of the current device set this word on a timeout. Such a kernel ends two to
// four seconds after all blocks have begun; missing words become NaN. A graph replays on any
// stream: during capture, the word is that of the default stream.
std::uint32_t* failure_word(Stream stream);
// Since the last call for this stream. Does not wait.
bool take_failure(Stream stream);

// Limits of the current device, or why it cannot run the kernels.
struct PersistentLimits {
  const char* why_not = nullptr;
  bool only_half = false;            // mma has neither TF32 nor bfloat16
  std::int64_t multiprocessors = 0;  // each runs a thread block
  std::int64_t shared_bytes = 0;     // for a thread block
};
PersistentLimits persistent_limits();

// Queues the kernel, after its compilation at the first use. A grid larger than the limits would
// never end and is rejected. Waits for the device's earlier launch in another stream: two launches
// that each occupy a part of the multiprocessors would wait for each other. Launches of graphs and
// of other processes do not wait. Returns false if too few multiprocessors are available, perhaps
// fewer than the device reports.
template <typename Args>
bool launch_persistent(
    const PersistentKernel& kernel,
    const DirectionArgs<Args>& args,
    std::int64_t groups,
    Stream stream);

// Compiles the kernel at the first use.
template <typename Args>
bool spills_registers(const PersistentKernel& kernel);

void mark_absent(void* data, std::int64_t bytes, Stream stream);

}  // namespace lltm::cuda
