// The persistent kernels: a sequence, or a chunk of its steps, by one kernel that keeps the
// recurrent weights in registers. Here are the arguments, and the functions that launch them.
//
// A thread block owns kSliceUnits hidden units of a group of rows. What the thread blocks of
// a group exchange are the results themselves: h of a step, or in backward dz, which a
// consumer polls until it is there. Memory that is "absent", all bits set, says that it is
// not: no value has that bit pattern, because every NaN is stored as the same one.
//
// T is one of the 16-bit types.
//
// No header of ATen: what nvcc compiles includes this file too.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "cuda/kernel/elementwise.h"

#include <cstdint>

namespace lltm::cuda {

constexpr int kSliceUnits = 16;  // M of an mma instruction: hidden units of a thread block
constexpr int kTileRows = 8;     // N of an mma instruction
constexpr int kWarps = 8;        // of a thread block; they split K
constexpr int kWarpLanes = 32;
constexpr std::int64_t slices_of(std::int64_t hidden) {
  return (hidden + kSliceUnits - 1) / kSliceUnits;
}

// How many tiles of rows a group may have; kernels exist for these.
constexpr int kTileCounts[] = {1, 2, 4};

// H has to be a multiple of this, so that 16 bytes of a state belong to one row and one gate. With
// more hidden units than these the weights of a thread would not fit in registers: of a cell with
// three slots that read h, 1536 forward and 1024 backward; with four 1024 and 768.
constexpr std::int64_t kHiddenMultiple = 8;
constexpr int kWarpUnits = 32;  // the K of a warp is a multiple of this
constexpr int kMostUnitsBackward = 12;
constexpr int most_units_forward(const CellInfo& cell) {
  return 18 / cell.h.count();
}
constexpr std::int64_t most_hidden_forward(const CellInfo& cell) {
  return most_units_forward(cell) * kWarps * kWarpUnits;
}
constexpr std::int64_t most_hidden_backward(const CellInfo& cell) {
  return kMostUnitsBackward * kWarps * kWarpUnits / cell.h.count();
}

// `count` steps of `rows` rows each.
struct StepRun {
  std::int32_t count, rows;
};

// The steps of a launch in its order, as few runs of equal size: a kernel parameter, so that
// nothing has to be copied to the device.
constexpr int kMostRuns = 128;
struct LaunchSteps {
  // Whether each step's rows (steps.h) follow those of the step before, or precede them.
  bool ascending;
  std::int64_t edge;  // where the first step begins or, descending, where it ends
  std::int64_t time;  // the first step's number in the sequence
  // The step before the first one, of an earlier launch; without one, no rows.
  std::int64_t previous_offset, previous_rows;
  int runs;
  StepRun run[kMostRuns + 1];  // backward adds a step without rows
};

// Row `row` of a step of a tensor (T, B, H), or (N, H) packed, of any strides: one of
// time_stride and offset_stride is zero. Null data: absent.
template <typename T>
struct StepMatrix {
  T* data = nullptr;
  std::int64_t time_stride = 0, offset_stride = 0, row_stride = 0, col_stride = 0;
};

// What the thread blocks of a launch tell beside their results. Each counts itself in `begun` when
// it begins, which then is `blocks`, whatever it was before.
struct LaunchWords {
  std::uint32_t* begun = nullptr;
  std::uint32_t blocks = 0;
  std::uint32_t* failure = nullptr;  // failure_word()
};

// Both structs: N rows of all steps, B rows of the state, S slots, of which Sx read x and Sh h, G
// blocks of a bias, and A saved values (cell.h). Where no strides are given, matrices are
// contiguous. What is read or exchanged 16 bytes at a time is marked (16) and begins at a multiple
// of 16 bytes, the rest at one of 8. A launch computes rows [first_row, first_row + groups * tiles
// * kTileRows) of the state.
template <typename T>
struct PersistentForwardArgs {
  static constexpr bool kIsForward = true;
  std::int64_t hidden = 0;
  std::int64_t batch = 0;
  std::int64_t first_row = 0;
  const T* weights = nullptr;     // (Sh * H, H), those that multiply h, in the order of slots (16)
  Matrix<const T> bias_ih;        // (G * H) with row stride 0; or absent
  Matrix<const T> bias_hh;        // the same
  const float* gates = nullptr;   // (rows of the launch's steps, Sx * H): x W_x^T
  std::int64_t gates_offset = 0;  // the row of the sequence that is the first of `gates`
  const T* h_0 = nullptr;         // (B, H) (16)
  T* h = nullptr;                 // (B, H), the state, updated in place; not h_0
  T* c = nullptr;                 // (B, H), the state, updated in place
  T* output = nullptr;            // (N, H); of the launch's steps absent before it (16)
  T* activations = nullptr;       // (N, A * H), or null
  LaunchWords words;
  LaunchSteps steps;
};

// Steps are in the order of backward. A last step without rows has the gradient of h carried
// back to the initial state.
template <typename T>
struct PersistentBackwardArgs {
  static constexpr bool kIsForward = false;
  std::int64_t hidden = 0;
  std::int64_t batch = 0;
  std::int64_t first_row = 0;
  const T* weights = nullptr;      // (H, Sh * H), the transpose of forward's (16)
  const T* activations = nullptr;  // (N, A * H)
  StepMatrix<const T> grad_output;
  T* dz = nullptr;      // (N, S * H); of the launch's steps absent before it (16)
  float* dh = nullptr;  // (B, H), updated in place
  float* dc = nullptr;  // (B, H), updated in place
  LaunchWords words;
  LaunchSteps steps;
};

// A kernel's parameters may have 4 KiB on every GPU.
static_assert(sizeof(PersistentForwardArgs<float>) <= 4096);
static_assert(sizeof(PersistentBackwardArgs<float>) <= 4096);

// A word that a kernel on any device sets where it has waited in vain: it then ends
// about a second after all its blocks have begun, with NaN for what it waited for.
std::uint32_t* failure_word();
// Whether one has since the last call. Waits for nothing.
bool take_failure();

// Whether the cell has kernels.
bool has_persistent_kernels(const CellInfo& cell);

// Below, Args is one of the two structs.

// The thread blocks of a kernel that the current device runs at once; 0 where it cannot run
// them at all. A launch of more than that would never end, and is refused.
template <typename Args>
std::int64_t resident_blocks(const CellInfo& cell, std::int64_t hidden, int tiles);

// Queues one kernel of the cell, of `groups` groups of `tiles` tiles, on a stream of the current
// device. False where it is refused for want of multiprocessors: the process may have fewer than
// the device says.
template <typename Args>
bool launch_persistent(
    const CellInfo& cell, const Args& args, std::int64_t groups, int tiles, Stream stream);

// Makes memory absent.
void mark_absent(void* data, std::int64_t bytes, Stream stream);

}  // namespace lltm::cuda
