// How a call is computed: from the sizes and the machine to a plain struct, in one place. The
// tuning constants of sequences stand in schedule.cpp.
//
// No header of torch, so that the tests can check schedules for machines other than theirs.
#pragma once

#include "cell/cell.h"
#include "cpu/machine.h"
#include "cpu/range.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace lltm::cpu {

// The formats of GEMM operands (formats.h).
enum class GemmFormat { kF32, kBf16, kBf16x3, kInt8 };

constexpr int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}
constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return divide_up(n, multiple) * multiple;
}

// Units, or columns, in blocks.
class Blocks {
 public:
  Blocks() = default;
  // `blocks` of them, each beginning at a multiple of `align`, as equal in width as that allows.
  Blocks(int64_t all, int64_t align, int64_t blocks) : total(all), count(blocks), align_(align) {
    const int64_t parts = divide_up(all, align), divisor = std::max<int64_t>(count, 1);
    width = divide_up(parts, divisor) * align;
    step_ = divide_up(parts << kFraction, divisor);
  }
  // Of one width, the last one perhaps narrower.
  Blocks(int64_t all, int64_t block_width)
      : Blocks(all, block_width, divide_up(all, block_width)) {}

  int64_t begin(int64_t block) const { return (block * step_ >> kFraction) * align_; }
  int64_t size(int64_t block) const { return std::min(begin(block + 1), total) - begin(block); }
  Range range(int64_t block) const { return {begin(block), begin(block) + size(block)}; }

  int64_t total = 0;
  int64_t width = 0;  // of the widest
  int64_t count = 0;

 private:
  static constexpr int kFraction = 32;

  int64_t align_ = 1;
  int64_t step_ = 0;  // from one block to the next in multiples of align, a binary fraction
};

// Threads in `rows` groups, each with its own rows of the batch, of `columns` threads, each
// with its own blocks of hidden units. A slot is one position in the grid: one thread's work.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t slots() const { return rows * columns; }
  // Threads that share rows have to wait for each other after each step.
  bool needs_barrier() const { return columns > 1; }
  // With no more columns than there are blocks.
  Grid within(const Blocks& blocks) const { return {rows, std::min(columns, blocks.count)}; }
};

// In how many slots of a cell input and state have a part (cell.h).
struct SlotCounts {
  int64_t x, h;
};
constexpr SlotCounts slots_of(const CellInfo& cell) {
  return {cell.x.count(), cell.h.count() > 0 ? cell.h.count() : 1};  // schedules divide
}

// One layer and direction: B, I, H, and the rows of all steps together.
struct LayerShape {
  int64_t batch, input, hidden, rows;
  bool bf16;  // operands of GEMMs may be bfloat16
  SlotCounts slots;
  bool packed = false;  // rows end before others
};

struct ForwardSchedule {
  GemmFormat format;
  Grid grid;
  Blocks blocks;  // of hidden units
  // Few rows a step: x W_x^T is one GEMM for all steps of a chunk.
  bool merge_projection;
  // Rows of a chunk of steps: those of that GEMM, or those of the input that are packed
  // together, where it cannot be read in place.
  int64_t chunk_rows;
};

struct BackwardSchedule {
  GemmFormat format;
  Grid grid;
  Blocks blocks;
  int64_t chunk_rows;  // after which the gradients of weights and input are brought up to date
  GemmFormat gradient_format;  // of the GEMMs over the rows of a chunk
};

ForwardSchedule schedule_forward(const Machine& machine, const LayerShape& shape);
BackwardSchedule schedule_backward(const Machine& machine, const LayerShape& shape);
// With weights that were prepacked in int8.
ForwardSchedule schedule_forward_int8(const Machine& machine, const LayerShape& shape);

// Whether the two directions of a layer run side by side, each by one thread, rather than one after
// the other, each by all: no barriers, but of each weight no thread has a part of its own. In
// training forward and backward do.
bool schedule_side_by_side(const Machine& machine, const LayerShape& shape, bool training);

// Weights that are packed ahead of time: the batch size that they are packed for, their blocks,
// and the largest width of one on any machine.
int64_t prepack_batch(GemmFormat format);
Blocks prepack_blocks(const Machine& machine, GemmFormat format, const LayerShape& shape);
int64_t max_forward_block_width(GemmFormat format);

// The GEMM over all rows that accumulates the gradient of the weights, C (M, N) += A^T B.
struct GradientGemmSchedule {
  int64_t slice_rows;    // of K per pass over C
  int64_t group_rows;    // of C per pass over the bands
  int64_t accumulators;  // copies of C, each for its share of the rows
};
GradientGemmSchedule schedule_gradient_gemm(
    const Machine& machine, GemmFormat format, int64_t m, int64_t n);

// A sequence that follows few trajectories carries the rounding errors of each step on, and
// with so few elements nothing averages them out. c of the LLTM, which forgets nothing, even adds
// them up: in float32 its errors would be 1.5 times those of plain PyTorch (few_rows.cpp).
inline bool has_few_elements(int64_t batch, int64_t hidden) {
  return batch <= 4 || hidden <= 16;
}

// The most rows that the kernels for weights in place (InPlaceGemm) multiply at once.
constexpr int64_t kMostProductRows = 4;

struct FewRowsSchedule {
  Grid grid;  // of one row or of one column
  Blocks blocks;
  int64_t chunk_rows;  // of x W_x^T in one GEMM
  bool in_place;       // the weights are read as they lie, for few steps
};
FewRowsSchedule schedule_few_rows(
    const Machine& machine, const LayerShape& shape, int64_t steps, bool prepacked);

// One step (step_forward.cpp, step_backward.cpp).
enum class Storage { kF64, kF32, kF16, kBf16 };  // the dtype
struct StepShape {
  int64_t batch, input, hidden;
  Storage storage;
  int64_t weights_stride;  // from one row to the next; 0 where rows are not contiguous
  SlotCounts slots;
};
// How its GEMMs are computed: by ATen; by scalar products; block by block, by the GEMM kernels.
enum class StepGemm { kAten, kProducts, kBlocked };
struct StepSchedule {
  StepGemm forward, backward;
  GemmFormat backward_format;  // of the blocked GEMMs: float32 or bfloat16
  int64_t threads;
  Blocks blocks;
};
StepSchedule schedule_step(const Machine& machine, const StepShape& shape);
// Its GEMMs: rows of the batch that one pass over the weights multiplies, columns of a tile of
// the gradient of the weights, and of those of h and input.
constexpr int64_t kStepRows = 64;
constexpr int64_t kStepWeightColumns = 256;
constexpr int64_t kStepColumns = 64;
// Rows of the batch that one GEMM of the gradient of the weights accumulates: its operands stay in
// the cache.
constexpr int64_t kStepChunkRows = 512;

// Rows of a task of a GEMM over many rows.
constexpr int64_t kMaxRows = 64;

// Rows that the stepwise engine's gradient of the weights accumulates in one GEMM.
constexpr int64_t kGradientChain = 256;

// Columns of B that one packed band of a GEMM over many rows covers. Read in place, its rows
// are far apart, and a stride that is a power of two leaves them few sets of the cache.
constexpr int64_t kGemmBand = 64;

// Work below which a second thread does not pay: elements of element-wise work, and elements
// of a matrix to pack.
constexpr int64_t kElementwiseGrain = 2048;
constexpr int64_t kPackGrain = 16384;

// For people: what was chosen, on one line.
std::string to_string(GemmFormat format);
std::string to_string(const ForwardSchedule& schedule);
std::string to_string(const FewRowsSchedule& schedule);
std::string to_string(const StepSchedule& schedule);
std::string to_string(const BackwardSchedule& schedule);

}  // namespace lltm::cpu
