#include "cpu/schedule.h"

#include "cpu/gemm/formats.h"

#include <algorithm>
#include <sstream>

namespace lltm::cpu {
namespace {

// Minimum multiply-adds per step for a second thread: 10 us on one core, about twice a barrier.
constexpr int64_t kSerialStep = 150000;

// The same per sequence of shorter steps, for threads with separate rows, which synchronize only at
// the end. kElementwiseProducts: element-wise cost per hidden unit, H rounded up to full vectors.
constexpr int64_t kSerialSequence = 4000000;
constexpr int64_t kElementwiseProducts = 100;

// Rows per thread for near-peak GEMM speed: half a register tile, or a bf16x3 tile.
template <typename Format>
constexpr int64_t kGoodRows = Format::kInPlace ? 4 : 16;

// Maximum packed weights that every thread reads completely; otherwise threads have separate blocks
// and a barrier per step, unless they have many rows. Three quarters of L2 leave room for a step's
// rows. The minimum is for 1 MiB L2 (Zen 4): barriers cost 5 to 20 % more than reading the rest
// from L3.
int64_t private_weight_bytes(const Machine& machine) {
  return std::max<int64_t>(machine.l2 / 4 * 3, 1536 << 10);
}

// Rows per thread from which every thread reads even larger weights completely, if L3 can hold
// them: 6 to 13 % faster than barriers (two threads on Zen 5, weights up to 9 MB). AMX would need
// more rows; packed sequences give threads unequal shares.
constexpr int64_t kManyRows = 64;
constexpr int64_t kSharedWeightBytes = 16 << 20;
template <typename Format>
bool has_many_rows(const Machine& machine, const LayerShape& shape, int64_t weight_bytes) {
  const bool by_vectors = kFormat<Format> == GemmFormat::kF32 || !machine.matrix_unit;
  return by_vectors && !shape.packed && weight_bytes <= kSharedWeightBytes &&
         shape.batch >= machine.threads * kManyRows;
}

template <typename Format>
Grid choose_grid(const Machine& machine, const LayerShape& shape, int64_t weight_bytes) {
  Grid grid;
  const int64_t recurrent = shape.slots.h * shape.hidden * shape.hidden;
  const int64_t all = recurrent + shape.slots.x * shape.input * shape.hidden +
                      kElementwiseProducts * round_up(shape.hidden, Format::kUnitAlign);
  const bool serial_step = shape.batch * recurrent < kSerialStep;
  if (serial_step && shape.rows * all < kSerialSequence) return grid;
  if (weight_bytes <= private_weight_bytes(machine)) {
    const int64_t rows = serial_step ? 1 : kGoodRows<Format>;
    grid.rows = std::clamp<int64_t>(shape.batch / rows, 1, machine.threads);
  } else if (has_many_rows<Format>(machine, shape, weight_bytes)) {
    grid.rows = machine.threads;
  }
  if (serial_step) return grid;
  const int64_t most_columns = (shape.hidden + Format::kUnitAlign - 1) / Format::kUnitAlign;
  grid.columns = std::clamp<int64_t>(machine.threads / grid.rows, 1, most_columns);
  return grid;
}

// Faster with a tile of rows per thread, or two if threads synchronize after each step.
bool prefer_bf16x3(const Grid& grid, int64_t batch) {
  constexpr int64_t kTile = kGoodRows<Bf16x3Format>;
  return batch / grid.rows >= (grid.needs_barrier() ? 2 : 1) * kTile;
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

// Their number divides evenly among `threads` threads, or fewer with the same largest share.
Blocks even_blocks(int64_t hidden, int64_t threads, int64_t widest, int64_t align) {
  const int64_t parts = std::max<int64_t>(divide_up(hidden, align), 1);
  const int64_t shares = divide_up(parts, divide_up(parts, threads));
  return {hidden, align, std::min(round_up(divide_up(hidden, widest), shares), parts)};
}

template <typename Format>
int64_t forward_unit_bytes(const LayerShape& shape) {
  const int64_t k = shape.slots.x * Format::padded_k(shape.input) +
                    shape.slots.h * Format::padded_k(shape.hidden);
  return k * static_cast<int64_t>(sizeof(typename Format::Operand));
}

template <typename Format>
int64_t backward_unit_bytes(const LayerShape& shape) {
  const int64_t k = Format::padded_k(shape.slots.h * Format::slot_pitch(shape.hidden));
  return k * static_cast<int64_t>(sizeof(typename Format::Operand));
}

template <typename Format>
Grid forward_grid(const Machine& machine, const LayerShape& shape) {
  return choose_grid<Format>(machine, shape, shape.hidden * forward_unit_bytes<Format>(shape));
}

template <typename Format>
Grid backward_grid(const Machine& machine, const LayerShape& shape) {
  return choose_grid<Format>(machine, shape, shape.hidden * backward_unit_bytes<Format>(shape));
}

template <typename Format>
Blocks forward_blocks(const Machine& machine, const LayerShape& shape, int64_t columns) {
  const int64_t widest = widest_block<Format>(
      machine, kForwardUnits<Format>, forward_unit_bytes<Format>(shape), Format::kUnitAlign);
  return even_blocks(shape.hidden, columns, widest, Format::kUnitAlign);
}

template <typename Format>
Blocks backward_blocks(const Machine& machine, const LayerShape& shape, int64_t columns) {
  // Fills the GEMM's vector registers.
  constexpr int64_t kColumns = 32;
  const int64_t widest = widest_block<Format>(
      machine, kBackwardUnits<Format>, backward_unit_bytes<Format>(shape), kColumns);
  return even_blocks(shape.hidden, columns, widest, Format::kUnitAlign);
}

// Multiply-adds per step that take a thread about as long as a few barriers.
constexpr int64_t kSideBySideProducts = 1 << 17;

// Rows per step from which weights are reused often enough, whichever cache holds them.
constexpr int64_t kSideBySideRows = 16;

// Rows per pass over W_x.
constexpr int64_t kMergedRows = 64;
constexpr int64_t kPackedInputRows = 256;

// Rows per backward chunk: enough for efficient GEMMs, few enough that dz stays in the cache.
// bfloat16 GEMMs are shorter than the overhead around them and need more.
constexpr int64_t kBackwardChunkRows = 512;
constexpr int64_t kBackwardChunkRowsBf16 = 4096;

// Minimum rows for which bf16x3 gradient GEMMs save more than packing costs.
constexpr int64_t kBf16x3GradientRows = 1024;

template <typename Format>
ForwardSchedule forward_schedule(const Machine& machine, const LayerShape& shape) {
  ForwardSchedule schedule = {};
  schedule.format = kFormat<Format>;
  schedule.grid = forward_grid<Format>(machine, shape);
  schedule.blocks = forward_blocks<Format>(machine, shape, schedule.grid.columns);
  schedule.grid = schedule.grid.within(schedule.blocks);
  schedule.merge_projection = 2 * shape.batch <= kMergedRows;
  schedule.chunk_rows =
      schedule.merge_projection ? schedule.grid.rows * kMergedRows : kPackedInputRows;
  return schedule;
}

template <typename Format>
BackwardSchedule backward_schedule(const Machine& machine, const LayerShape& shape) {
  constexpr bool kBf16 = kFormat<Format> == GemmFormat::kBf16;
  BackwardSchedule schedule = {};
  schedule.format = kFormat<Format>;
  schedule.grid = backward_grid<Format>(machine, shape);
  schedule.blocks = backward_blocks<Format>(machine, shape, schedule.grid.columns);
  schedule.chunk_rows = kBf16 ? kBackwardChunkRowsBf16 : kBackwardChunkRows;
  schedule.gradient_format = schedule.format;
  return schedule;
}

template <typename Body>
decltype(auto) visit_forward_format(GemmFormat format, const Body& body) {
  return format == GemmFormat::kInt8 ? body(Int8Format{}) : visit_format(format, body);
}

}  // namespace

ForwardSchedule schedule_forward(const Machine& machine, const LayerShape& shape) {
  if (shape.bf16 && machine.bf16) {
    return forward_schedule<Bf16Format>(machine, shape);
  }
  if (!shape.bf16 && machine.bf16x3 &&
      prefer_bf16x3(forward_grid<Bf16x3Format>(machine, shape), shape.batch)) {
    return forward_schedule<Bf16x3Format>(machine, shape);
  }
  return forward_schedule<F32Format>(machine, shape);
}

BackwardSchedule schedule_backward(const Machine& machine, const LayerShape& shape) {
  if (shape.bf16 && machine.bf16) {
    return backward_schedule<Bf16Format>(machine, shape);
  }
  const bool bf16x3 = !shape.bf16 && machine.bf16x3;
  if (bf16x3 && prefer_bf16x3(backward_grid<Bf16x3Format>(machine, shape), shape.batch)) {
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

bool schedule_side_by_side(const Machine& machine, const LayerShape& shape, bool training) {
  // Two threads that share weights and synchronize after each step are slower than two that each
  // read a direction's weights, even beyond L2 (Zen 5). With more threads, one direction at a time
  // is faster, unless threads would mostly wait.
  const int64_t recurrent = shape.slots.h * shape.hidden * shape.hidden;
  if (training) {
    // More threads all share the weight gradients. Two threads with few rows take 1.1 to 1.2 times
    // as long concurrently if L2 holds half of the weights but not all (Zen 5).
    const int64_t bytes = recurrent * (shape.bf16 && machine.bf16 ? 2 : 4);
    return machine.threads == 2 && (shape.batch >= kSideBySideRows || bytes <= machine.l2);
  }
  return machine.threads == 2 ||
         (machine.threads > 2 && recurrent * shape.batch <= kSideBySideProducts);
}

Blocks prepack_blocks(const Machine& machine, GemmFormat format, const LayerShape& shape) {
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
    const Machine& machine, GemmFormat format, int64_t m, int64_t n) {
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
  schedule.accumulators = std::clamp<int64_t>(most, 1, machine.threads);
  return schedule;
}

FewRowsSchedule schedule_few_rows(
    const Machine& machine, const LayerShape& shape, int64_t steps, bool prepacked) {
  // Packing costs more than it saves. Affects rounding: the same on every CPU.
  constexpr int64_t kFewSteps = 32;
  const int64_t bytes = shape.hidden * forward_unit_bytes<F32Format>(shape);
  FewRowsSchedule schedule = {};
  schedule.grid = choose_grid<F32Format>(machine, shape, bytes);
  schedule.blocks = forward_blocks<F32Format>(machine, shape, schedule.grid.columns);
  schedule.grid = schedule.grid.within(schedule.blocks);
  schedule.chunk_rows = kMergedRows;
  schedule.in_place = shape.batch <= kMostProductRows && steps <= kFewSteps && !prepacked;
  return schedule;
}

namespace {

// K can end in a partial tile, which costs less than a copy.
bool blocks_forward(const Machine& machine, const StepShape& shape) {
  if (shape.storage == Storage::kF32) return machine.f32;
  constexpr int64_t kVnni = Bf16Format::kVnniFactor;
  return shape.storage == Storage::kBf16 && machine.bf16 && shape.hidden % kVnni == 0 &&
         shape.input % kVnni == 0 && shape.weights_stride % kVnni == 0;
}

}  // namespace

StepSchedule schedule_step(const Machine& machine, const StepShape& shape) {
  const auto [batch, input, hidden, storage, weights_stride, slots] = shape;
  // With fewer rows, packing bfloat16 weights costs more than widening them.
  constexpr int64_t kBf16BackwardRows = 16;
  constexpr int64_t kWidest = 64;
  const bool in_place = weights_stride > 0 && batch > 0 && input > 0 && hidden > 0;
  StepSchedule schedule = {};
  if (in_place && batch <= kMostProductRows && storage != Storage::kF64) {
    schedule.forward = StepGemm::kProducts;
  } else if (in_place && blocks_forward(machine, shape)) {
    schedule.forward = StepGemm::kBlocked;
  }
  const bool bf16 = storage == Storage::kBf16 && machine.bf16 && batch >= kBf16BackwardRows;
  schedule.backward_format = bf16 ? GemmFormat::kBf16 : GemmFormat::kF32;
  if (in_place && machine.f32 && storage != Storage::kF64) schedule.backward = StepGemm::kBlocked;
  const bool one_thread = schedule.forward == StepGemm::kProducts
                              ? batch * slots.h * hidden * hidden < kSerialStep
                              : batch * hidden < kElementwiseGrain;
  schedule.threads = one_thread ? 1 : machine.threads;
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

std::string to_string(const Blocks& blocks) {
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

std::string to_string(const FewRowsSchedule& s) {
  std::ostringstream text;
  const char* const weights = s.in_place ? "in place" : "packed, accumulated in float64";
  text << "forward: small batch, weights " << weights << ", " << to_string(s.grid) << ", "
       << to_string(s.blocks) << ", chunks of " << s.chunk_rows << " rows";
  return text.str();
}

std::string to_string(const StepSchedule& s) {
  std::ostringstream text;
  text << "cell: threads " << s.threads << ", " << to_string(s.blocks) << ", forward by "
       << (s.forward == StepGemm::kProducts  ? "dot products"
           : s.forward == StepGemm::kBlocked ? "the GEMM kernel"
                                             : "ATen")
       << ", backward by ";
  if (s.backward == StepGemm::kAten) {
    text << "ATen";
  } else {
    text << "the " << to_string(s.backward_format) << " kernel";
  }
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
