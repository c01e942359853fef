// Schedules: maps call sizes and the host to a plain struct that describes how engines run the
// call. schedule.cpp has the tuning constants for sequences.
//
// No torch header, so that tests can check schedules for any host.
#pragma once

#include "cell/cell.h"
#include "cpu/machine.h"
#include "cpu/range.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace lltm::cpu {

// GEMM operand formats (formats.h).
enum class GemmFormat { kF32, kBf16, kBf16x3, kInt8 };

constexpr int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}
constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return divide_up(n, multiple) * multiple;
}

// Divides hidden units or columns into blocks.
class Blocks {
 public:
  Blocks() = default;
  // Makes `blocks` blocks with widths as equal as possible. Each begins at a multiple of `align`.
  Blocks(int64_t all, int64_t align, int64_t blocks) : total(all), count(blocks), align_(align) {
    const int64_t parts = divide_up(all, align), divisor = std::max<int64_t>(count, 1);
    width = divide_up(parts, divisor) * align;
    step_ = divide_up(parts << kFraction, divisor);
  }
  // Makes blocks with width block_width; the last block may be narrower.
  Blocks(int64_t all, int64_t block_width)
      : Blocks(all, block_width, divide_up(all, block_width)) {}

  int64_t begin(int64_t block) const { return (block * step_ >> kFraction) * align_; }
  int64_t size(int64_t block) const { return std::min(begin(block + 1), total) - begin(block); }
  Range range(int64_t block) const { return {begin(block), begin(block) + size(block)}; }

  int64_t total = 0;
  int64_t width = 0;  // widest block
  int64_t count = 0;

 private:
  static constexpr int kFraction = 32;

  int64_t align_ = 1;
  int64_t step_ = 0;  // distance between block starts: in multiples of align, a binary fraction
};

// A thread grid: `rows` groups divide the batch rows, and the `columns` threads in a group divide
// the hidden-unit blocks. A slot is a grid position: the share of the work that one thread runs.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t slots() const { return rows * columns; }
  // Threads that share rows synchronize after each step.
  bool needs_barrier() const { return columns > 1; }
  // Returns this grid with at most one column per block.
  Grid within(const Blocks& blocks) const { return {rows, std::min(columns, blocks.count)}; }
};

// How many pre-activations x contributes to, and how many h (cell.h).
struct SlotCounts {
  int64_t x, h;
};
constexpr SlotCounts slots_of(const CellInfo& cell) {
  return {cell.x.count(), cell.h.count() > 0 ? cell.h.count() : 1};  // schedules divide by it
}

// Sizes for one layer and direction: B, I, H, and the row count over all steps.
struct LayerShape {
  int64_t batch, input, hidden, rows;
  bool bf16;  // GEMM operands may be bfloat16
  SlotCounts slots;
  bool packed = false;  // packed sequence: batch rows end at different steps
};

struct ForwardSchedule {
  GemmFormat format;
  Grid grid;
  Blocks blocks;  // hidden-unit blocks
  // True if a step has few rows: one GEMM then computes x W_x^T for all steps in a chunk.
  bool merge_projection;
  // Rows per step chunk: for that GEMM, or for packing the input if it cannot be read in place.
  int64_t chunk_rows;
};

struct BackwardSchedule {
  GemmFormat format;
  Grid grid;
  Blocks blocks;
  int64_t chunk_rows;          // rows between updates of the weight and input gradients
  GemmFormat gradient_format;  // for the GEMMs over a chunk's rows
};

ForwardSchedule schedule_forward(const Machine& machine, const LayerShape& shape);
BackwardSchedule schedule_backward(const Machine& machine, const LayerShape& shape);
// For weights prepacked in int8.
ForwardSchedule schedule_forward_int8(const Machine& machine, const LayerShape& shape);

// True if a layer's two directions run concurrently, each on one thread, instead of one after the
// other on all threads. This avoids barriers, but each thread reads all weights of its direction
// instead of a part. In training, it applies to forward and backward.
bool schedule_side_by_side(const Machine& machine, const LayerShape& shape, bool training);

// Prepacked weights: the batch size that they are packed for, their blocks, and the largest block
// width on any host.
int64_t prepack_batch(GemmFormat format);
Blocks prepack_blocks(const Machine& machine, GemmFormat format, const LayerShape& shape);
int64_t max_forward_block_width(GemmFormat format);

// The split-K GEMM for the weight gradients: C (M, N) += A^T B over all rows.
struct GradientGemmSchedule {
  int64_t slice_rows;    // K rows per pass over C
  int64_t group_rows;    // C rows per pass over the column panels
  int64_t accumulators;  // copies of C, each for a share of the rows
};
GradientGemmSchedule schedule_gradient_gemm(
    const Machine& machine, GemmFormat format, int64_t m, int64_t n);

// True if rounding errors in the state need float64 accumulators. With so few elements, the steps'
// errors are not averaged out. The LLTM's c, which has no forget gate, even accumulates them: in
// float32 its error would be 1.5 times PyTorch's error (few_rows.cpp).
inline bool has_few_elements(int64_t batch, int64_t hidden) {
  return batch <= 4 || hidden <= 16;
}

// Maximum rows per call for the kernels with weights in place (InPlaceGemm).
constexpr int64_t kMostProductRows = 4;

struct FewRowsSchedule {
  Grid grid;  // one row or one column
  Blocks blocks;
  int64_t chunk_rows;  // rows per GEMM that computes x W_x^T
  bool in_place;       // weights are read in place, without packing (few steps)
};
FewRowsSchedule schedule_few_rows(
    const Machine& machine, const LayerShape& shape, int64_t steps, bool prepacked);

// A single step (step_forward.cpp, step_backward.cpp).
enum class Storage { kF64, kF32, kF16, kBf16 };  // tensor dtype
struct StepShape {
  int64_t batch, input, hidden;
  Storage storage;
  int64_t weights_stride;  // row stride in elements; 0 if rows are not contiguous
  SlotCounts slots;
};
// How a step computes its GEMMs: with ATen, with dot products, or block by block with the GEMM
// kernels.
enum class StepGemm { kAten, kProducts, kBlocked };
struct StepSchedule {
  StepGemm forward, backward;
  GemmFormat backward_format;  // float32 or bfloat16, for blocked GEMMs
  int64_t threads;
  Blocks blocks;
};
StepSchedule schedule_step(const Machine& machine, const StepShape& shape);
// Tile sizes for a single step: batch rows per pass over the weights, columns per weight-gradient
// tile, and columns per tile for the h and input gradients.
constexpr int64_t kStepRows = 64;
constexpr int64_t kStepWeightColumns = 256;
constexpr int64_t kStepColumns = 64;
// Batch rows per weight-gradient GEMM; its operands stay in the cache.
constexpr int64_t kStepChunkRows = 512;

// Maximum rows per task in a GEMM over many rows.
constexpr int64_t kMaxRows = 64;

// Rows per weight-gradient GEMM in the per-step engine.
constexpr int64_t kGradientChain = 256;

// Columns per packed column panel of B in a GEMM over many rows. Rows in an unpacked B are far
// apart, and with a power-of-two stride they map to few cache sets.
constexpr int64_t kGemmBand = 64;

// Minimum work per thread: elements for element-wise work, and elements of a matrix to pack.
constexpr int64_t kElementwiseGrain = 2048;
constexpr int64_t kPackGrain = 16384;

// One-line descriptions for logging.
std::string to_string(GemmFormat format);
std::string to_string(const ForwardSchedule& schedule);
std::string to_string(const FewRowsSchedule& schedule);
std::string to_string(const StepSchedule& schedule);
std::string to_string(const BackwardSchedule& schedule);

}  // namespace lltm::cpu
