#include "cpu/schedule.h"

#include "cpu/gemm/formats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace lltm::cpu {
namespace {

// ---- the cost model --------------------------------------------------------------
//
// Time of a call on a grid, in float32 multiply-adds of a thread at its peak (50 per ns on Zen 4,
// 130 on Zen 5). Fitted to 84 measured calls (LSTM, GRU and LLTM, inference and training, float32,
// two threads of Zen 4, one thread or two by rows or columns): the chosen grid is 0.5 % slower than
// the best of the three, at most 13 %. kSharedByte: fitted to 18 LSTM shapes with 16 threads of
// Emerald Rapids. Constants for several L3 caches: from published latencies.
struct Costs {
  // R rows take as long as R + 2 at the peak.
  static constexpr double kRows = 2;
  // The element-wise kernel, per hidden unit and row.
  static constexpr double kElementwise = 50;
  // Per byte of weights that L2 does not hold, from L3 or memory. A fifth of the shorter of reading
  // and computing does not overlap with the other.
  static constexpr double kL3Byte = 1.5, kMemoryByte = 12, kNotOverlapped = 0.2;
  // Per byte of weights that a thread with other rows has packed, once a call.
  static constexpr double kPackedByte = 12;
  // Per byte of the state that another thread has written, for the first reader and for later ones
  // in the same L3, and in another L3.
  static constexpr double kNearByte = 40, kSharedByte = 12, kFarByte = 80;
  // A barrier of threads in one L3, for each of them, and of threads in several L3s.
  static constexpr double kBarrier = 24000, kBarrierThread = 3000, kFarBarrier = 80000;
  // A parallel region, and for each of its threads.
  static constexpr double kRegion = 150000, kRegionThread = 25000;

  static double region(const Machine& machine) {
    return kRegion + kRegionThread * static_cast<double>(machine.threads);
  }
};

struct Model {
  const Machine& machine;
  int64_t batch, steps, units, align, heads;
  // Per hidden unit: K of a step's GEMMs, and bytes of their weights.
  int64_t k = 0, bytes = 0;
  int64_t state_bytes = 0;  // per batch row that other threads read
  double rate;              // multiply-adds per float32 multiply-add
  bool tiles;               // AMX: rows are multiples of 16

  double step(const Grid& grid) const {
    const auto rows = static_cast<double>(divide_up(batch, grid.rows));
    const int64_t readers = grid.sharing(heads), of_head = units / heads;
    const auto own = static_cast<double>(
        std::min(divide_up(divide_up(of_head, align), readers) * align, of_head) * heads * readers /
        grid.columns);
    const auto columns = static_cast<double>(grid.columns);
    const double full = tiles ? std::ceil(rows / 16) * 16 : rows + Costs::kRows;
    double cost = full * own * static_cast<double>(k) / rate;
    const double own_bytes = own * static_cast<double>(bytes);
    const double beyond_l2 = own_bytes - 0.75 * static_cast<double>(machine.l2);
    if (beyond_l2 > 0) {
      // Threads of an L3 that have different columns read different weights.
      const double sharing = std::min(columns, static_cast<double>(machine.l3_cores));
      const bool in_l3 = own_bytes * sharing <= 0.8 * static_cast<double>(machine.l3);
      const double read = beyond_l2 * (in_l3 ? Costs::kL3Byte : Costs::kMemoryByte);
      cost = std::max(cost, read) + Costs::kNotOverlapped * std::min(cost, read);
    }
    cost += rows * own * Costs::kElementwise;
    if (readers == 1) return cost;
    const bool far = grid.columns > machine.l3_cores;
    const auto others = static_cast<double>(readers - 1);
    const double share = rows * static_cast<double>(state_bytes) / columns;
    if (far) return cost + share * Costs::kFarByte * others + Costs::kFarBarrier;
    return cost + share * (Costs::kNearByte + Costs::kSharedByte * (others - 1)) + Costs::kBarrier +
           Costs::kBarrierThread * columns;
  }

  double call(const Grid& grid) const {
    if (grid.workers() == 1) return static_cast<double>(steps) * step(grid);
    const double foreign =
        1 / static_cast<double>(grid.columns) - 1 / static_cast<double>(grid.workers());
    return static_cast<double>(steps) * step(grid) + Costs::region(machine) +
           Costs::kPackedByte * static_cast<double>(units * bytes) * foreign;
  }

  // Skips grids with more threads but the same largest share.
  Grid best() const {
    Grid best;
    double least = call(best);
    if (least < Costs::region(machine)) return best;
    const int64_t parts = divide_up(units, align);
    for (int64_t columns = 1; columns <= std::min(machine.threads, parts); ++columns) {
      if (columns > 1 && divide_up(parts, columns) == divide_up(parts, columns - 1)) continue;
      const int64_t most = std::clamp<int64_t>(machine.threads / columns, 1, batch);
      for (int64_t rows = most; rows > 0; rows /= 2) {
        const Grid grid = {divide_up(batch, divide_up(batch, rows)), columns};
        const double cost = call(grid);
        if (cost < least) least = cost, best = grid;
      }
    }
    return best;
  }
};

// Multiply-adds per float32 multiply-add.
template <typename Format>
double rate(const Machine& machine) {
  switch (kFormat<Format>) {
    case GemmFormat::kBf16:
      return machine.matrix_unit ? 8 : 2;  // BFMMLA: 3 by its instructions, not timed
    case GemmFormat::kBf16x3:
      return 3;
    case GemmFormat::kInt8:
      return machine.matrix_unit ? 16 : 4;
    default:
      return 1;
  }
}

// Rows per thread for near-peak GEMM speed: half a register tile, or a bf16x3 tile.
template <typename Format>
constexpr int64_t kGoodRows = Format::kInPlace ? 4 : 16;

// Faster with two tiles of rows per thread, or four if threads synchronize after each step
// (measured with one and 16 threads of Emerald Rapids).
bool prefer_bf16x3(const Grid& grid, const LayerShape& shape) {
  constexpr int64_t kTile = kGoodRows<Bf16x3Format>;
  return shape.batch / grid.rows >= (grid.sharing(shape.heads) > 1 ? 4 : 2) * kTile;
}

// Pre-activations (forward) or dh (backward) of a step's rows stay in L2 between GEMM and
// element-wise kernel. Narrower blocks read A more often.
template <typename Format>
constexpr int64_t kForwardUnits = Format::kInPlace ? 64 : 128;
template <typename Format>
constexpr int64_t kBackwardUnits = Format::kVnniFactor == 1 && Format::kInPlace ? 128 : 256;

// Weights use half of L2, but at least 1 MiB: the GEMM reads them again for every few rows, but
// with 1 MiB L2 (Zen 4), narrower blocks are 10 % slower. bf16x3 prefetches and has no such limit.
template <typename Format>
int64_t widest_block(const Machine& machine, int64_t most, int64_t unit_bytes, int64_t multiple) {
  if (!Format::kInPlace) return most;
  const int64_t units = std::max<int64_t>(machine.l2 / 2, 1 << 20) / unit_bytes;
  return std::clamp(units / multiple * multiple, multiple, most);
}

// Their number divides evenly among `threads` threads, or fewer with the same largest share. No
// block has units of two heads.
Partition even_blocks(
    int64_t hidden, int64_t threads, int64_t widest, int64_t align, int64_t heads = 1) {
  const int64_t units = hidden / heads, sharing = Grid{1, threads}.sharing(heads);
  const int64_t parts = std::max<int64_t>(divide_up(units, align), 1);
  const int64_t shares = divide_up(parts, divide_up(parts, sharing));
  return {hidden, align, heads * std::min(round_up(divide_up(units, widest), shares), parts)};
}

template <typename Format>
int64_t forward_unit_bytes(const LayerShape& shape) {
  const int64_t k = shape.slots.x * Format::padded_k(shape.input) +
                    shape.slots.h * Format::padded_k(shape.head_units());
  return k * static_cast<int64_t>(sizeof(typename Format::Element));
}

template <typename Format>
int64_t backward_unit_bytes(const LayerShape& shape) {
  const int64_t k = Format::padded_k(shape.slots.h * Format::slot_pitch(shape.head_units()));
  return k * static_cast<int64_t>(sizeof(typename Format::Element));
}

template <typename Format>
Model model_of(const Machine& machine, const LayerShape& shape) {
  return {
      .machine = machine,
      .batch = shape.batch,
      .steps = divide_up(shape.rows, shape.batch),
      .units = shape.hidden,
      .align = Format::kUnitAlign,
      .heads = shape.heads,
      .rate = rate<Format>(machine),
      .tiles = machine.matrix_unit && kFormat<Format> != GemmFormat::kF32};
}

template <typename Format>
Model forward_model(const Machine& machine, const LayerShape& shape) {
  Model model = model_of<Format>(machine, shape);
  model.k = shape.slots.h * shape.head_units() + shape.slots.x * shape.input;
  model.bytes = forward_unit_bytes<Format>(shape);
  model.state_bytes = shape.hidden * static_cast<int64_t>(sizeof(float));
  return model;
}

template <typename Format>
Model backward_model(const Machine& machine, const LayerShape& shape) {
  Model model = model_of<Format>(machine, shape);
  model.k = shape.slots.h * shape.head_units();
  model.bytes = backward_unit_bytes<Format>(shape);
  model.state_bytes = shape.slots.h * shape.hidden * static_cast<int64_t>(sizeof(float));
  return model;
}

template <typename Format>
Partition forward_blocks(const Machine& machine, const LayerShape& shape, int64_t columns) {
  const int64_t unit_bytes = forward_unit_bytes<Format>(shape);
  int64_t widest =
      widest_block<Format>(machine, kForwardUnits<Format>, unit_bytes, Format::kUnitAlign);
  // A GEMM reads a block by panels of columns. If a thread's weights come from L3 in each step, a
  // block that is a single panel is up to 15 % faster: the panel is contiguous, which the hardware
  // prefetcher follows. A single row gains nothing, and kernels of stages are slower.
  constexpr int64_t kPanelColumns = 64;
  const bool from_l3 = unit_bytes * shape.hidden / columns > machine.l2;
  const bool gains = kFormat<Format> == GemmFormat::kF32 && shape.batch > 1 && !shape.slots.stages;
  if (gains && from_l3) {
    const int64_t units = kPanelColumns / std::max(shape.slots.x, shape.slots.h);
    widest = std::clamp(units, Format::kUnitAlign, widest);
  }
  return even_blocks(shape.hidden, columns, widest, Format::kUnitAlign, shape.heads);
}

template <typename Format>
Partition backward_blocks(const Machine& machine, const LayerShape& shape, int64_t columns) {
  // Fills the GEMM's vector registers.
  constexpr int64_t kColumns = 32;
  const int64_t widest = widest_block<Format>(
      machine, kBackwardUnits<Format>, backward_unit_bytes<Format>(shape), kColumns);
  return even_blocks(shape.hidden, columns, widest, Format::kUnitAlign, shape.heads);
}

constexpr int64_t kPackedInputRows = 256;
// Rows per pass over W_x, for few rows.
constexpr int64_t kMergedRows = 64;

// Rows per pass over W_x of each thread, or 0 for a GEMM per step. In bf16x3, a GEMM of a few steps
// is faster than a GEMM per step for batches, too, if the input is wide and z stays in L2: 0.65 to
// 0.95 of the time with two threads of a Xeon.
template <typename Format>
int64_t merged_rows(const Machine& machine, const LayerShape& shape, const Grid& grid) {
  if (2 * shape.batch <= kMergedRows) return kMergedRows;
  constexpr int64_t kRows = 256;
  const int64_t rows = divide_up(shape.batch, grid.rows);
  const int64_t z_bytes = std::max(shape.slots.x, shape.slots.h) * shape.hidden / grid.columns *
                          static_cast<int64_t>(sizeof(float));
  const bool merges = kFormat<Format> == GemmFormat::kBf16x3 && 2 * rows <= kRows &&
                      2 * shape.input >= shape.hidden && kRows * z_bytes <= machine.l2 / 2;
  return merges ? kRows : 0;
}

// Rows per backward chunk: enough for efficient GEMMs, few enough that dz stays in the cache.
// bfloat16 GEMMs are shorter than the overhead around them and need more.
constexpr int64_t kBackwardChunkRows = 512;
constexpr int64_t kBackwardChunkRowsPerThread = 64;
constexpr int64_t kBackwardChunkRowsBf16 = 4096;

// Minimum rows for which bf16x3 gradient GEMMs save more than packing costs.
constexpr int64_t kBf16x3GradientRows = 1024;

template <typename Format>
ForwardSchedule forward_schedule(const Machine& machine, const LayerShape& shape) {
  ForwardSchedule schedule = {};
  schedule.format = kFormat<Format>;
  schedule.grid = forward_model<Format>(machine, shape).best();
  schedule.blocks = forward_blocks<Format>(machine, shape, schedule.grid.columns);
  schedule.grid = schedule.grid.within(schedule.blocks);
  const int64_t merged = merged_rows<Format>(machine, shape, schedule.grid);
  schedule.merge_projection = merged > 0;
  schedule.chunk_rows = merged > 0 ? schedule.grid.rows * merged : kPackedInputRows;
  return schedule;
}

template <typename Format>
BackwardSchedule backward_schedule(const Machine& machine, const LayerShape& shape) {
  constexpr bool kBf16 = kFormat<Format> == GemmFormat::kBf16;
  BackwardSchedule schedule = {};
  schedule.format = kFormat<Format>;
  schedule.grid = backward_model<Format>(machine, shape).best();
  schedule.blocks = backward_blocks<Format>(machine, shape, schedule.grid.columns);
  schedule.chunk_rows = kBf16 ? kBackwardChunkRowsBf16
                              : std::clamp(
                                    machine.threads * kBackwardChunkRowsPerThread,
                                    kBackwardChunkRows,
                                    kBackwardChunkRowsBf16);
  schedule.gradient_format = schedule.format;
  // Weight and input gradients of a chunk.
  const int64_t rows = std::min(schedule.chunk_rows, shape.rows);
  const int64_t products =
      rows * shape.hidden * (shape.slots.h * shape.head_units() + shape.slots.x * shape.input);
  schedule.gradient_threads = std::clamp<int64_t>(products / kGemmGrain, 1, machine.threads);
  return schedule;
}

template <typename Body>
decltype(auto) visit_forward_format(GemmFormat format, const Body& body) {
  return format == GemmFormat::kInt8 ? body(Int8Format{}) : visit_format(format, body);
}

}  // namespace

ForwardSchedule schedule_forward(const Machine& machine, const LayerShape& shape) {
  if (has_bf16_operands(machine, shape)) {
    return forward_schedule<Bf16Format>(machine, shape);
  }
  if (!shape.bf16 && machine.bf16x3 &&
      prefer_bf16x3(forward_model<Bf16x3Format>(machine, shape).best(), shape)) {
    return forward_schedule<Bf16x3Format>(machine, shape);
  }
  return forward_schedule<F32Format>(machine, shape);
}

BackwardSchedule schedule_backward(const Machine& machine, const LayerShape& shape) {
  if (has_bf16_operands(machine, shape)) {
    return backward_schedule<Bf16Format>(machine, shape);
  }
  const bool bf16x3 = !shape.bf16 && machine.bf16x3;
  if (bf16x3 && prefer_bf16x3(backward_model<Bf16x3Format>(machine, shape).best(), shape)) {
    return backward_schedule<Bf16x3Format>(machine, shape);
  }
  BackwardSchedule schedule = backward_schedule<F32Format>(machine, shape);
  if (bf16x3 && shape.rows >= kBf16x3GradientRows) {
    schedule.gradient_format = GemmFormat::kBf16x3;
  }
  return schedule;
}

ForwardSchedule schedule_forward_int8(const Machine& machine, const LayerShape& shape) {
  return forward_schedule<Int8Format>(machine, shape);
}

double predicted_time(
    const Machine& machine, const LayerShape& shape, bool backward, const Grid& grid) {
  return (backward ? backward_model<F32Format>(machine, shape)
                   : forward_model<F32Format>(machine, shape))
      .call(grid);
}

bool schedule_side_by_side(const Machine& machine, const LayerShape& shape, bool training) {
  if (machine.threads < 2 || shape.batch == 0 || shape.rows == 0) return false;
  Machine half = machine;
  half.threads /= 2;
  const auto gain = [&]<typename Format>(Format) {
    const auto saved = [](const Model& all, const Model& own) {
      return 2 * all.call(all.best()) - own.call(own.best());
    };
    const double forward =
        saved(forward_model<Format>(machine, shape), forward_model<Format>(half, shape));
    if (!training) return forward;
    return forward +
           saved(backward_model<Format>(machine, shape), backward_model<Format>(half, shape));
  };
  return (has_bf16_operands(machine, shape) ? gain(Bf16Format{}) : gain(F32Format{})) > 0;
}

Partition prepack_blocks(const Machine& machine, GemmFormat format, const LayerShape& shape) {
  return visit_forward_format(format, [&]<typename Format>(Format) {
    return forward_schedule<Format>(machine, shape).blocks;
  });
}

int64_t max_forward_block_width(GemmFormat format) {
  return visit_forward_format(
      format, []<typename Format>(Format) { return kForwardUnits<Format>; });
}

int64_t prepack_batch(GemmFormat format) {
  return visit_forward_format(format, []<typename Format>(Format) { return kGoodRows<Format>; });
}

GradientGemmSchedule schedule_gradient_gemm(
    const Machine& machine, GemmFormat format, int64_t threads, int64_t m, int64_t n) {
  // K rows per pass over C: 2 kB per A^T column. For bf16x3, all of A^T stays in L2.
  constexpr int64_t kSliceRows = 512, kSliceRowsBf16 = 1024, kSliceRowsBf16x3 = 128;
  // C rows whose part in A^T stays in L2 while all column panels pass.
  constexpr int64_t kGroupRows = 512;
  constexpr int64_t kAccumulatorBytes = 32 << 20;
  GradientGemmSchedule schedule = {};
  const bool bf16x3 = format == GemmFormat::kBf16x3;
  schedule.slice_rows = bf16x3                        ? kSliceRowsBf16x3
                        : format == GemmFormat::kBf16 ? kSliceRowsBf16
                                                      : kSliceRows;
  schedule.group_rows = bf16x3 ? m : kGroupRows;
  const int64_t bytes = m * round_up(n, kGemmBand) * static_cast<int64_t>(sizeof(float));
  // C stays in L2, and each accumulator has enough rows.
  constexpr int64_t kRowsPerAccumulator = 128;
  const int64_t chunk_rows =
      format == GemmFormat::kBf16 ? kBackwardChunkRowsBf16 : kBackwardChunkRows;
  const int64_t most = bf16x3 ? kAccumulatorBytes / bytes
                              : std::min(machine.l2 / bytes, chunk_rows / kRowsPerAccumulator);
  // The largest share of a thread, in panels of 64 rows of C, decides.
  const int64_t panels = divide_up(n, kGemmBand), tiles = divide_up(m, kMaxRows);
  double least = std::numeric_limits<double>::infinity();
  for (int64_t copies = std::clamp<int64_t>(most, 1, threads); copies > 0; --copies) {
    for (int64_t columns = 1; columns <= std::min(threads / copies, panels); ++columns) {
      const int64_t rows = std::min(threads / copies / columns, tiles);
      const auto share = static_cast<double>(divide_up(panels, columns) * divide_up(tiles, rows));
      if (share / static_cast<double>(copies) >= least) continue;
      least = share / static_cast<double>(copies);
      schedule.accumulators = copies;
      schedule.grid = {rows, columns};
    }
  }
  return schedule;
}

SmallBatchSchedule schedule_small_batch(
    const Machine& machine, const LayerShape& shape, int64_t steps, bool prepacked) {
  // Packing costs more than it saves. Affects rounding: the same on every CPU.
  constexpr int64_t kFewSteps = 32;
  SmallBatchSchedule schedule = {};
  schedule.grid = forward_model<F32Format>(machine, shape).best();
  schedule.blocks = forward_blocks<F32Format>(machine, shape, schedule.grid.columns);
  schedule.grid = schedule.grid.within(schedule.blocks);
  schedule.chunk_rows = kMergedRows;
  // With more rows, which take several passes over the weights, if these are many. A single step
  // has an engine that does not pack.
  constexpr int64_t kMostPasses = 8, kManyWeights = 1 << 17;
  const int64_t passes = steps * divide_up(shape.batch, kMostProductRows);
  const int64_t weights =
      (shape.slots.x * shape.input + shape.slots.h * shape.head_units()) * shape.hidden;
  const bool few = shape.batch <= kMostProductRows
                       ? steps <= kFewSteps
                       : steps > 1 && passes <= kMostPasses && weights >= kManyWeights;
  schedule.in_place = few && !prepacked;
  return schedule;
}

StepSchedule schedule_step(const Machine& machine, const StepShape& shape) {
  const auto [batch, input, hidden, storage, weights_stride, slots] = shape;
  // With fewer rows, packing bfloat16 weights costs more than widening them.
  constexpr int64_t kBf16BackwardRows = 16;
  // Up to so many rows, passes of dot products over the weights take less than the float32 GEMM,
  // whose vectors are partly empty, with packing x and h and transposing its result.
  constexpr int64_t kF32ProductRows = 8, kProductRows16 = 12;
  constexpr int64_t kWidest = 64;
  const bool in_place = weights_stride > 0 && batch > 0 && input > 0 && hidden > 0;
  StepSchedule schedule = {};
  const bool bf16 = storage == Storage::kBf16 && machine.bf16 && machine.fast_bf16;
  // K can end in a partial tile, which costs less than a copy.
  constexpr int64_t kVnni = Bf16Format::kVnniFactor;
  const bool pairs = hidden % kVnni == 0 && input % kVnni == 0 && weights_stride % kVnni == 0;
  const auto format = [](bool is_bf16) { return is_bf16 ? GemmFormat::kBf16 : GemmFormat::kF32; };
  schedule.forward_format = format(bf16 && pairs);
  schedule.backward_format = format(bf16 && batch >= kBf16BackwardRows);
  if (in_place && storage != Storage::kF64) {
    if (machine.f32) schedule.forward = schedule.backward = StepGemm::kBlocked;
    const bool is_float32 = machine.f32 && schedule.forward_format == GemmFormat::kF32;
    const int64_t most = !is_float32                ? kMostProductRows
                         : storage == Storage::kF32 ? kF32ProductRows
                                                    : kProductRows16;
    if (batch <= most) schedule.forward = StepGemm::kProducts;
  }
  const double work = (static_cast<double>(batch) + Costs::kRows) *
                      static_cast<double>((slots.h * hidden + slots.x * input) * hidden);
  schedule.threads = work / 2 < Costs::region(machine) ? 1 : machine.threads;
  schedule.blocks = even_blocks(hidden, schedule.threads, kWidest, F32Format::kUnitAlign);
  return schedule;
}

std::string to_string(GemmFormat format) {
  switch (format) {
    case GemmFormat::kF32:
      return "float32";
    case GemmFormat::kBf16:
      return "bfloat16";
    case GemmFormat::kInt8:
      return "int8";
    default:
      return "bf16x3";
  }
}

namespace {

std::string to_string(const Grid& grid) {
  std::ostringstream text;
  text << "threads " << grid.rows << " x " << grid.columns << " (rows x blocks)";
  return text.str();
}

std::string to_string(const Partition& blocks) {
  std::ostringstream text;
  text << "blocks of up to " << blocks.width << " units";
  return text.str();
}

}  // namespace

std::string to_string(const ForwardSchedule& s) {
  std::ostringstream text;
  text << "forward: GEMM " << to_string(s.format) << ", " << to_string(s.grid) << ", "
       << to_string(s.blocks) << ", chunks of " << s.chunk_rows << " rows, input projection "
       << (s.merge_projection ? "per chunk" : "per step");
  return text.str();
}

std::string to_string(const SmallBatchSchedule& s) {
  std::ostringstream text;
  const char* const weights = s.in_place ? "in place" : "packed";
  text << "forward: small batch, weights " << weights << ", " << to_string(s.grid) << ", "
       << to_string(s.blocks) << ", chunks of " << s.chunk_rows << " rows";
  return text.str();
}

std::string to_string(const StepSchedule& s) {
  const auto kernel = [](GemmFormat format) { return "the " + to_string(format) + " kernel"; };
  std::ostringstream text;
  text << "cell: threads " << s.threads << ", " << to_string(s.blocks) << ", forward by "
       << (s.forward == StepGemm::kProducts  ? "dot products"
           : s.forward == StepGemm::kBlocked ? kernel(s.forward_format)
                                             : "ATen")
       << ", backward by "
       << (s.backward == StepGemm::kBlocked ? kernel(s.backward_format) : "ATen");
  return text.str();
}

std::string to_string(const BackwardSchedule& s) {
  std::ostringstream text;
  text << "backward: GEMM " << to_string(s.format) << ", " << to_string(s.grid) << ", "
       << to_string(s.blocks) << ", chunks of " << s.chunk_rows << " rows, gradient GEMMs "
       << to_string(s.gradient_format);
  return text.str();
}

}  // namespace lltm::cpu
