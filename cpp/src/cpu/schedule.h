// Schedules: how engines run a call, from its sizes and the CPU. No torch header: tests can check
// schedules for any host.
#pragma once

#include "cell/cell.h"
#include "cpu/machine.h"
#include "cpu/range.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

namespace lltm::cpu {

enum class GemmFormat { kF32, kBf16, kBf16x3, kInt8 };

constexpr int64_t divide_up(int64_t n, int64_t divisor) {
  return (n + divisor - 1) / divisor;
}
constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return divide_up(n, multiple) * multiple;
}

// A division of [0, total) into blocks.
class Partition {
 public:
  Partition() = default;
  // Blocks of nearly equal width that begin at multiples of `align`.
  Partition(int64_t all, int64_t align, int64_t blocks) : total(all), count(blocks), align_(align) {
    const int64_t parts = divide_up(all, align), divisor = std::max<int64_t>(count, 1);
    width = divide_up(parts, divisor) * align;
    step_ = divide_up(parts << kFraction, divisor);
  }
  // The last block may be narrower.
  Partition(int64_t all, int64_t block_width)
      : Partition(all, block_width, divide_up(all, block_width)) {}

  int64_t begin(int64_t block) const { return (block * step_ >> kFraction) * align_; }
  int64_t size(int64_t block) const { return std::min(begin(block + 1), total) - begin(block); }
  Range range(int64_t block) const { return {begin(block), begin(block) + size(block)}; }

  int64_t total = 0;
  int64_t width = 0;  // widest block
  int64_t count = 0;

 private:
  static constexpr int kFraction = 32;

  int64_t align_ = 1;
  int64_t step_ = 0;  // distance of block starts in multiples of align, a binary fraction
};

// `rows` groups divide the batch rows; a group's `columns` threads divide the blocks. A worker is a
// grid position: one thread's share.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t workers() const { return rows * columns; }
  // Consecutive columns that share heads. A column with entire heads reads no other's state.
  int64_t sharing(int64_t heads) const { return columns / std::gcd(columns, heads); }
  // At most one column per block.
  Grid within(const Partition& blocks) const { return {rows, std::min(columns, blocks.count)}; }
};

// Pre-activations that depend on x, and on h (cell.h), and whether a step has several stages.
struct SlotCounts {
  int64_t x, h;
  bool stages = false;
};
constexpr SlotCounts slots_of(const CellInfo& cell) {
  const int64_t h = cell.h.count() > 0 ? cell.h.count() : 1;  // schedules divide by it
  return {cell.x.count(), h, cell.has_stages()};
}

struct LayerShape {
  int64_t batch, input, hidden, rows;
  bool bf16;  // GEMM operands may be bfloat16
  SlotCounts slots;
  int64_t heads = 1;  // of recurrent weights that are packed by head
  int64_t head_units() const { return hidden / heads; }
};

inline bool has_bf16_operands(const Machine& machine, const LayerShape& shape) {
  return shape.bf16 && machine.bf16 && machine.fast_bf16;
}

struct ForwardSchedule {
  GemmFormat format;
  Grid grid;
  Partition blocks;
  // For few rows: one GEMM computes x W_x^T for a chunk.
  bool merge_projection;
  // For that GEMM, or for packing an input that cannot be read in place.
  int64_t chunk_rows;
};

struct BackwardSchedule {
  GemmFormat format;
  Grid grid;
  Partition blocks;
  int64_t chunk_rows;          // rows between updates of weight and input gradients
  GemmFormat gradient_format;  // over a chunk's rows
  int64_t gradient_threads;
};

ForwardSchedule schedule_forward(const Machine& machine, const LayerShape& shape);
BackwardSchedule schedule_backward(const Machine& machine, const LayerShape& shape);
ForwardSchedule schedule_forward_int8(const Machine& machine, const LayerShape& shape);

// The cost model's time of all steps in float32, in multiply-adds of a thread at its peak.
double predicted_time(
    const Machine& machine, const LayerShape& shape, bool backward, const Grid& grid);

// Two directions run concurrently, each on half of the threads: barriers have fewer threads, but
// each thread reads more weights.
bool schedule_side_by_side(const Machine& machine, const LayerShape& shape, bool training);

// For prepacking: the batch size, the blocks, and the largest block width on any CPU.
int64_t prepack_batch(GemmFormat format);
Partition prepack_blocks(const Machine& machine, GemmFormat format, const LayerShape& shape);
int64_t max_forward_block_width(GemmFormat format);

struct GradientGemmSchedule {
  int64_t slice_rows;    // K rows per pass over C
  int64_t group_rows;    // C rows per pass over the column panels
  int64_t accumulators;  // copies of C, each for a share of the rows
  Grid grid;             // the threads of an accumulator: its tiles of rows, and column panels
};
GradientGemmSchedule schedule_gradient_gemm(
    const Machine& machine, GemmFormat format, int64_t threads, int64_t m, int64_t n);

// Rounding errors in the state need float64 accumulators: with so few elements, they are not
// averaged out.
inline bool has_few_elements(int64_t batch, int64_t hidden) {
  return batch <= 4 || hidden <= 16;
}

// Row limit of kernels with weights in place (InPlaceGemm).
constexpr int64_t kMostProductRows = 4;

struct SmallBatchSchedule {
  Grid grid;
  Partition blocks;
  int64_t chunk_rows;  // rows per GEMM that computes x W_x^T
  bool in_place;       // weights are not packed (few steps)
};
SmallBatchSchedule schedule_small_batch(
    const Machine& machine, const LayerShape& shape, int64_t steps, bool prepacked);

enum class Storage { kF64, kF32, kF16, kBf16 };  // tensor dtype
struct StepShape {
  int64_t batch, input, hidden;
  Storage storage;
  int64_t weights_stride;  // row stride; 0 if rows are not contiguous
  SlotCounts slots;
};
// The kernels' condition on both matrices' row strides: an odd stride, if any, because the bfloat16
// kernel requires even strides (VNNI pairs).
constexpr int64_t weights_stride(int64_t ih, int64_t hh) {
  if (ih == 0 || hh == 0) return 0;
  return ih % 2 != 0 ? ih : hh;
}
enum class StepGemm { kAten, kProducts, kBlocked };
struct StepSchedule {
  StepGemm forward, backward;
  GemmFormat forward_format, backward_format;  // float32 or bfloat16, for blocked GEMMs
  int64_t threads;
  Partition blocks;
};
StepSchedule schedule_step(const Machine& machine, const StepShape& shape);
// Of a single step: batch rows per pass over the weights, columns per weight-gradient tile and per
// tile for h and input gradients.
constexpr int64_t kStepRows = 64;
constexpr int64_t kStepWeightColumns = 256;
constexpr int64_t kStepColumns = 64;
// Per weight-gradient GEMM, whose operands stay in the cache.
constexpr int64_t kStepChunkRows = 512;

// Rows per task in a GEMM over many rows.
constexpr int64_t kMaxRows = 64;

// Rows per weight-gradient GEMM in the per-step engine.
constexpr int64_t kGradientChain = 256;

// Columns per packed B panel in a GEMM over many rows. Unpacked rows with a power-of-two stride map
// to few cache sets.
constexpr int64_t kGemmBand = 64;

// K rows of B that a thread packs are a multiple of it: pack_b writes zeros up to a multiple.
constexpr int64_t kPackedRows = 32;

// Minimum multiply-adds per thread.
constexpr int64_t kGemmGrain = 1 << 18;

// Minimum elements per thread.
constexpr int64_t kElementwiseGrain = 2048;
constexpr int64_t kPackGrain = 16384;

std::string to_string(GemmFormat format);
std::string to_string(const ForwardSchedule& schedule);
std::string to_string(const SmallBatchSchedule& schedule);
std::string to_string(const StepSchedule& schedule);
std::string to_string(const BackwardSchedule& schedule);

}  // namespace lltm::cpu
