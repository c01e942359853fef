// The blocked engine, forward. In a step, for each block of hidden units:
//
//     0. c is stored for a checkpoint, and reset      step_io.h
//     1. z = x W_x^T                                  GEMM, per step or chunk of steps
//     2. z = z + h W_h^T                              GEMM
//     3. h', c' and saved values from z + b and c     element-wise, while z is in its cache
//     4. states of c' are copied to the output        step_io.h
//
// A step may have several stages (cell/program.h). z of all blocks is then kept for later stages,
// which begin with GEMMs of products' operands, instead of 0 to 2.
//
// A worker (schedule.h) has some batch rows and blocks. Workers synchronize after each stage only
// if they share rows. Out-of-range values stop a bf16x3 run; int8 records the row.
//
// The small-batch engine is the same with other GEMMs and another element-wise kernel
// (small_batch.h), and c in float64.
#include "common/memory.h"
#include "common/steps.h"
#include "cpu/engine/between_stages.h"
#include "cpu/engine/forward_call.h"
#include "cpu/engine/shares.h"
#include "cpu/engine/small_batch.h"
#include "cpu/engine/step_io.h"
#include "cpu/gemm/operands.h"
#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "cpu/prefetch.h"
#include "cpu/threads/parallel.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

template <typename T, typename Format, typename Weights = PackedWeights<Format>>
class BlockedForward {
 public:
  using Element = typename Format::Element;
  using Unpacked = typename Format::Unpacked;
  static constexpr bool kSmallBatch = !std::is_same_v<Weights, PackedWeights<Format>>;
  using C = std::conditional_t<kSmallBatch, double, T>;  // of c
  static constexpr bool kNotesRows = std::is_same_v<Format, Int8Format>;

  BlockedForward(const ForwardCall& call, const ForwardSchedule& schedule, Weights weights)
      : call_(call),
        cell_(call.cell),
        batch_(call.batch),
        hidden_(call.hidden),
        input_size_(call.input_size - cell_.given * hidden_),
        weights_(std::move(weights)),
        heads_(weights_.heads),
        units_(hidden_ / heads_),
        blocks_(weights_.blocks),
        steps_(call.steps),
        io_(call),
        grid_(schedule.grid.within(blocks_)),
        shares_(steps_, batch_, grid_, blocks_.count),
        between_(cell_.forward(), batch_, hidden_, grid_.workers()),
        merge_projection_(schedule.merge_projection),
        exchanges_(grid_.sharing(heads_) > 1 || between_.has_means()),
        output_is_operand_(
            std::is_same_v<T, Element> &&
            Format::fits_in_place(hidden_, cell_.output_columns() * hidden_) &&
            call.recurrent_mask.data == nullptr) {
    input_in_place_ =
        call.input_is_contiguous && Format::fits_in_place(input_size_, call.input_size);
    // Unlike the input's, a group's rows for a merged projection have no gaps, and no given gates.
    if (merge_projection_ && grid_.rows > 1) input_in_place_ = false;
    const bool by_step = input_in_place_ && !merge_projection_;
    const int64_t at_most = by_step ? 1 : std::max<int64_t>(1, schedule.chunk_rows / batch_);
    if constexpr (kSmallBatch) {
      chunks_ = plan_chunks(steps_, schedule.chunk_rows);
    } else {
      chunks_ = plan_chunks(steps_, at_most * batch_, at_most);
    }
    for (const Chunk& chunk : chunks_) {
      chunk_steps_ = std::max(chunk_steps_, static_cast<int64_t>(chunk.last - chunk.first));
    }
    if (merge_projection_) shares_.count_rows_before(chunks_, call.reverse);
    allocate();
  }

  bool run() {
    const auto h_0 = call_.h_0.as<const Unpacked>();
    if (Format::fits_in_place(hidden_, h_0.row_stride)) {
      h_0_ = Format::in_place(h_0);
    } else {
      packed_h_0_ = allocate_states(batch_);
      if (!pack_states(batch_, h_0, packed_h_0_.rows)) return false;
      h_0_ = as_const(packed_h_0_.rows);
    }
    const bool in_range =
        parallel_region(grid_.workers(), [&](Team& team) { run_thread(team); }, grid_.columns);
    if (!in_range) return false;
    io_.leave_last({static_cast<T*>(call_.h_n), hidden_});
    if constexpr (kSmallBatch) {
      const int64_t columns = c_rows_.row_stride;
      const Matrix<T> c_n = {static_cast<T*>(call_.c_n), columns};
      if (c_n.data != nullptr) copy_rows(as_const(c_rows_), c_n, batch_, columns);
    }
    return true;
  }

  std::vector<int64_t> rows_out_of_range() const {
    std::vector<int64_t> rows;
    for (int64_t r = 0; r < batch_; ++r) {
      bool noted = false;
      for (int64_t column = 0; column < grid_.columns; ++column) noted |= notes(column)[r];
      if (noted) rows.push_back(r);
    }
    return rows;
  }

 private:
  struct Worker : Share {
    float* z;     // for a block, or for all blocks in a chunk
    bool* notes;  // per batch row, out of range
    int64_t index;
  };

  void allocate() {
    if (!input_in_place_) {
      packed_input_ = allocate_a<Format>(chunk_steps_ * batch_, input_size_);
    }
    if (output_is_operand_) {
      const int64_t columns = cell_.output_columns() * hidden_;
      states_.rows = {static_cast<Element*>(call_.output), columns};
    } else {
      states_ = allocate_states(2 * batch_);
    }
    const int64_t z_units = keeps_z() ? Format::padded_n(hidden_) : blocks_.width;
    const int64_t z_columns = cell_.slots * z_units;
    const int64_t z_rows = z_rows_of_block();
    constexpr int64_t kPadding = 16;  // the element-wise kernel may read past the end
    z_size_ = z_rows * z_columns + kPadding;
    allocate_workspace();
    if (io_.resets.any()) {
      zero_h_ = allocate_states(1);
      pack_states(1, {std::vector<Unpacked>(hidden_).data(), hidden_}, zero_h_.rows);
      const int64_t zeros = grid_.workers() * zero_columns();
      zero_products_ = Workspace<float>(zeros);
      std::fill_n(zero_products_.data(), zeros, 0.0f);
    }
    for (int p = 0; p < cell_.operands().count; ++p) operands_.push_back(allocate_states(batch_));
    if (kNotesRows) notes_ = std::make_unique<bool[]>(grid_.columns * batch_);

    kernel_args_.cell = &cell_;
    kernel_args_.layer_hidden = hidden_;
    kernel_args_.z_padded = true;
    kernel_args_.bias = {call_.bias, 0};
    kernel_args_.parameters = {call_.parameters, 0};
    if constexpr (!kSmallBatch) {
      kernel_args_.c = as_const(c_rows_);
      kernel_args_.c_next = c_rows_;
    }
    kernel_args_.recurrent_mask = call_.recurrent_mask.as<const T>();
  }

  // A GEMM operand of states, and a unit's column in it.
  OperandA<Format> allocate_states(int64_t rows) const {
    auto states = allocate_a<Format>(rows, hidden_, heads_);
    for (int64_t head = 0; head < heads_; ++head) {
      Format::init_states(rows, units_, states.rows.from(0, operand_column(head * units_)));
    }
    return states;
  }
  int64_t operand_column(int64_t unit) const {
    return heads_ == 1 ? unit : unit / units_ * Format::head_stride(units_) + unit % units_;
  }
  bool pack_states(int64_t rows, Matrix<const Unpacked> h, Matrix<Element> to) const {
    bool in_range = true;
    for (int64_t unit = 0; unit < hidden_; unit += units_) {
      const auto of_head = to.from(0, operand_column(unit));
      in_range &= pack(0, {0, rows}, units_, h.from(0, unit), of_head, /*state=*/true);
    }
    return in_range;
  }

  // One allocation for z and a float64 c: allocations are noticeable in a streaming step.
  void allocate_workspace() {
    constexpr int64_t kLine = 64 / sizeof(double), kFloats = sizeof(double) / sizeof(float);
    const int64_t columns = cell_.state_columns() * hidden_;
    const int64_t c = kSmallBatch ? round_up(batch_ * columns, kLine) : 0;
    workspace_ = Workspace<double>(c + divide_up(grid_.workers() * z_size_, kFloats));
    z_ = reinterpret_cast<float*>(workspace_.data() + c);
    if constexpr (kSmallBatch) {
      c_rows_ = {workspace_.data(), columns};
    } else {
      c_rows_ = {static_cast<T*>(call_.c_n), columns};
    }
    copy_rows(call_.c_0.as<const T>(), c_rows_, batch_, columns);
  }

  void run_thread(Team& team) {
    if (io_.resets.any()) {
      team.for_each_worker([&](int64_t worker) { return multiply_zeros(worker_of(worker)); });
    }
    for (const Chunk& chunk : chunks_) run_chunk(team, chunk);
  }

  void run_chunk(Team& team, const Chunk& chunk) {
    if (!input_in_place_) {
      team.for_each_worker([&](int64_t worker) { return pack_input(chunk, worker); });
      team.barrier();
    }
    for (size_t k = chunk.first; k < chunk.last; ++k) {
      for (int stage = 0; stage < between_.count(); ++stage) {
        team.for_each_worker([&](int64_t index) {
          const Worker worker = worker_of(index);
          if constexpr (!kSmallBatch) {
            if (stage > 0) return later_stage(k, stage, worker);
          }
          if (merge_projection_ && k == chunk.first) project_chunk(chunk, worker);
          return step(chunk, k, worker);
        });
        const bool is_last = k + 1 == chunk.last && stage + 1 == between_.count();
        if (exchanges_ || (is_last && !input_in_place_)) team.barrier();
      }
    }
  }

  bool keeps_z() const { return merge_projection_ || between_.count() > 1; }
  int64_t z_rows_of_block() const { return merge_projection_ ? group_rows() : batch_; }

  int64_t group_rows() const { return shares_.most_rows_in_chunk(); }

  Worker worker_of(int64_t index) const {
    return {shares_.share_of(index), z_ + index * z_size_, notes(index), index};
  }

  // As z (1, S * width).
  int64_t zero_columns() const { return cell_.slots * Format::padded_n(hidden_); }
  Matrix<float> zero_product(const Worker& worker, int64_t block) const {
    const Matrix<float> all = {zero_products_.data(), zero_columns()};
    return all.from(worker.index, cell_.slots * blocks_.begin(block));
  }

  // B of the recurrent GEMM for `slots`.
  PackedB<const Element> weights_h(int64_t block, SlotRange slots) const {
    PackedB<const Element> b = weights_.h(block);
    if (slots == cell_.h) return b;
    const int64_t width = weights_.slot_columns(block);
    b.data += (slots.begin - cell_.h.begin) * width * Format::kVnniFactor;
    b.n = slots.count() * width;
    return b;
  }

  bool multiply_zeros(const Worker& worker) const {
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      recur(1, as_const(zero_h_.rows), block, zero_product(worker, block), 1);
    }
    return true;
  }

  // z (rows, S * width) = x W_x^T, and zeros in the columns without a term in x.
  void project(int64_t rows, Matrix<const Element> x, int64_t block, Matrix<float> z) const {
    if constexpr (kSmallBatch) {
      weights_.project(rows, x, block, z);
    } else if (cell_.x.count() > 0) {
      Format::gemm(rows, x, weights_.x(block), z, /*accumulate=*/false);
    }
    clear_slots_of_h(cell_, weights_.slot_columns(block), rows, z);
  }

  // z += h W_h^T, for `rows` of `all_rows` of a step.
  void recur(
      int64_t rows,
      Matrix<const Element> h,
      int64_t block,
      Matrix<float> z,
      int64_t all_rows) const {
    if constexpr (kSmallBatch) {
      weights_.recur(rows, h, block, z);
    } else if (cell_.direct.count() > 0) {
      const auto w = weights_h(block, cell_.direct);
      const auto to = z.from(0, cell_.direct.begin * weights_.slot_columns(block));
      const auto a = h.from(0, weights_.first_of_h(block));
      Format::gemm(rows, a, w, to, /*accumulate=*/true, all_rows);
    }
  }

  // One flag per batch row, separate for threads that share rows.
  bool* notes(int64_t index) const {
    return kNotesRows ? notes_.get() + index % grid_.columns * batch_ : nullptr;
  }

  // x is the first row. Returns false to stop the run.
  bool pack(
      int64_t index,
      Range rows,
      int64_t k,
      Matrix<const Unpacked> x,
      Matrix<Element> to,
      bool state = false) const {
    if constexpr (kNotesRows) {
      // States have the same scale in every step: a split sequence has equal results.
      const float least = state ? 1 : 0;
      if (Format::pack_a(rows.size(), k, x, to, least)) return true;
      for (int64_t r = 0; r < rows.size(); ++r) {  // the other rows are still needed
        if (!Format::pack_a(1, k, x.from(r), to.from(r), least)) {
          notes(index)[rows.begin + r] = true;
        }
      }
      return true;
    } else {
      return Format::pack_a(rows.size(), k, x, to);
    }
  }

  bool pack_input(const Chunk& chunk, int64_t index) const {
    const int64_t group = index / grid_.columns;
    for (size_t k = chunk.first; k < chunk.last; ++k) {
      const Range rows = shares_.rows_of_step(k, group);
      const Range part = share(rows.size(), grid_.columns, index % grid_.columns);
      const Range own = {rows.begin + part.begin, rows.begin + part.end};
      const auto x = call_.input.of(steps_[k].offset).as<const Unpacked>().from(own.begin);
      const auto to = packed_input(chunk, k, group).from(part.begin);
      if (!pack(index, own, input_size_, x, to)) return false;
    }
    return true;
  }

  void project_chunk(const Chunk& chunk, const Worker& worker) const {
    const size_t begin = call_.reverse ? chunk.last - 1 : chunk.first;
    const size_t end = call_.reverse ? chunk.first : chunk.last - 1;
    const int64_t rows =
        shares_.rows_before(end, worker.group) + shares_.rows_of_step(end, worker.group).size();
    if (rows == 0) return;
    const auto x = input_of(chunk, begin, worker.group);
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      project(rows, x, block, z_of(worker, block, 0));
    }
  }

  bool step(const Chunk& chunk, size_t k, const Worker& worker) const {
    // 0. All blocks of the worker at once, also for sequences that have ended.
    if (io_.changes_c(k)) {
      const Range units = {
          blocks_.begin(worker.blocks.begin), std::min(blocks_.begin(worker.blocks.end), hidden_)};
      const auto c = c_rows_.from(worker.rows.begin, units.begin);
      io_.enter_c(k, c, worker.rows, units);
    }
    const Range rows = shares_.rows_of_step(k, worker.group);
    if (rows.size() == 0) return true;
    if constexpr (!kSmallBatch) {
      if (exchanges_ && k > 0) {
        const Range carried = intersect(rows, {0, carried_rows(steps_, k)});
        prefetch_rows(as_const(state_of(k - 1)), carried, weights_.k_h);
      }
    }
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      in_range &= step_block(chunk, k, worker, rows, block);
    }
    return in_range;
  }

  bool step_block(
      const Chunk& chunk, size_t k, const Worker& worker, Range rows, int64_t block) const {
    const Step& step = steps_[k];
    const Matrix<float> z = z_of_step(k, worker, rows, block);
    // 1. A merged projection has computed z for all steps of the chunk.
    if (!merge_projection_) {
      project(rows.size(), input_of(chunk, k, worker.group), block, z.from(rows.begin));
    }
    if (cell_.given > 0) copy_given(k, rows, block, z.from(rows.begin));
    const auto recur_rows = [&](Range part, Matrix<const Element> h) {
      if (part.size() == 0) return;
      recur(part.size(), h.from(part.begin), block, z.from(part.begin), step.rows);
    };
    // 2. Rows of sequences that begin in this step, as reversed packed ones do late, read h_0.
    const auto add_recurrent = [&] {
      const int64_t carried = carried_rows(steps_, k);
      if (k > 0) recur_rows(intersect(rows, {0, carried}), as_const(state_of(k - 1)));
      recur_rows(intersect(rows, {carried, step.rows}), h_0_);
    };
    if (io_.resets.any()) {
      const SlotRange of_h = kSmallBatch ? SlotRange{0, cell_.slots} : cell_.direct;
      const int64_t width = weights_.slot_columns(block), first = of_h.begin * width;
      const float* const zeros = zero_product(worker, block).row(0) + first;
      io_.enter_z(k, z.from(0, first), rows, of_h.count() * width, zeros, add_recurrent);
    } else {
      add_recurrent();
    }
    // 3 and 4.
    return run_stage(k, 0, worker, rows, block, z);
  }

  bool later_stage(size_t k, int stage, const Worker& worker) const {
    const Range rows = shares_.rows_of_step(k, worker.group);
    if (rows.size() == 0) return true;
    const unsigned products = between_.stage(stage - 1).operands;
    between_.average(stage - 1, rows, worker.index);
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      const Matrix<float> z = z_of_step(k, worker, rows, block);
      for (size_t p = 0; p < operands_.size(); ++p) {
        if ((products >> p & 1) == 0) continue;
        for (const SlotRange slots : cell_.operands()[p].gates) {
          if (slots.count() == 0) continue;
          const auto v = as_const(operands_[p].rows.from(rows.begin, weights_.first_of_h(block)));
          const auto to = z.from(rows.begin, slots.begin * weights_.slot_columns(block));
          const auto w = weights_h(block, slots);
          Format::gemm(rows.size(), v, w, to, /*accumulate=*/true, steps_[k].rows);
        }
      }
      in_range &= run_stage(k, stage, worker, rows, block, z);
    }
    return in_range;
  }

  // The columns of the input that are the pre-activations of given gates.
  void copy_given(size_t k, Range rows, int64_t block, Matrix<float> z) const {
    for_each_given(cell_, hidden_, call_.input_size, [&](int gate, int64_t column) {
      const auto from = call_.given.of(steps_[k].offset)
                            .as<const T>()
                            .from(rows.begin, column + blocks_.begin(block));
      const auto to = z.from(0, gate * weights_.slot_columns(block));
      for (int64_t r = 0; r < rows.size(); ++r) widen(from.from(r), to.row(r), blocks_.size(block));
    });
  }

  bool run_stage(
      size_t k, int stage, const Worker& worker, Range rows, int64_t block, Matrix<float> z) const {
    const Range units = blocks_.range(block);
    const int64_t unit = units.begin;
    if constexpr (kSmallBatch) {
      SmallBatchArgs args;
      args.cell = &cell_;
      args.hidden = args.z_stride = units.size();
      args.layer_hidden = hidden_;
      args.z = as_const(z.from(rows.begin));
      args.bias = kernel_args_.bias.from(0, unit).data;
      args.parameters = kernel_args_.parameters.from(0, unit).data;
      args.c = c_rows_.from(rows.begin, unit);
      args.h_next = io_.h_next(k, rows, units);
      args.saved = io_.saved_values(k, rows, units);
      kernels().cells[cell_.native].small_batch(args, rows.size());
      io_.leave_c(k, args.c, rows, units);
      if (!output_is_operand_) io_.leave_h(k, state_of(k).from(rows.begin, unit), rows, units);
      return true;
    }
    ForwardArgs<T, Element> of_block = kernel_args_;
    of_block.hidden = blocks_.size(block);
    of_block.z = as_const(z.from(rows.begin));
    of_block.z_stride = weights_.slot_columns(block);
    of_block.bias = of_block.bias.from(0, unit);
    of_block.parameters = of_block.parameters.from(0, unit);
    of_block.recurrent_mask = of_block.recurrent_mask.from(rows.begin, unit);
    of_block.c = of_block.c.from(rows.begin, unit);
    of_block.c_next = of_block.c_next.from(rows.begin, unit);
    of_block.h_next = io_.h_next(k, rows, units);
    const int64_t column = operand_column(unit);
    if (!output_is_operand_) of_block.h_operand = state_of(k).from(rows.begin, column);
    of_block.saved = io_.saved_values(k, rows, units);
    bool out_of_range = false;
    of_block.out_of_range =
        kNotesRows ? Matrix<bool>{worker.notes + rows.begin, 1} : Matrix<bool>{&out_of_range, 0};
    const auto run = [&] {
      elementwise<T, Element>(cell_).forward(of_block, 0, rows.size() * of_block.hidden);
      if (stage + 1 == between_.count()) io_.leave_c(k, of_block.c_next, rows, units);
      return !out_of_range;
    };
    if (between_.count() == 1) return run();
    const StageMemory<float> stages = between_.memory(stage, worker.index).from(rows.begin, unit);
    Matrix<Element> operands[CellInfo::kMostSlots];
    for (size_t p = 0; p < operands_.size(); ++p) {
      operands[p] = operands_[p].rows.from(rows.begin, column);
    }
    of_block.stages = &stages;
    of_block.operands = operands;
    return run();
  }

  // Groups have separate memory, because some are a chunk ahead.
  Matrix<Element> packed_input(const Chunk& chunk, size_t k, int64_t group) const {
    const int64_t first = shares_.rows_of_group(group).begin;
    return packed_input_.rows.from(
        merge_projection_ ? first * chunk_steps_ + shares_.rows_before(k, group)
                          : static_cast<int64_t>(k - chunk.first) * batch_ + first);
  }

  Matrix<const Element> input_of(const Chunk& chunk, size_t k, int64_t group) const {
    if (!input_in_place_) return as_const(packed_input(chunk, k, group));
    const int64_t row = steps_[k].offset + shares_.rows_of_group(group).begin;
    const Matrix<const Unpacked> rows = {
        static_cast<const Unpacked*>(call_.input.first.data), call_.input_size};
    return Format::in_place(rows.from(row));
  }

  Matrix<Element> state_of(size_t k) const {
    return states_.rows.from(
        output_is_operand_ ? steps_[k].offset : static_cast<int64_t>(k % 2) * batch_);
  }

  Matrix<float> z_of(const Worker& worker, int64_t block, int64_t row) const {
    Matrix<float> z = {worker.z, cell_.slots * weights_.slot_columns(block)};
    if (keeps_z()) z.data += cell_.slots * blocks_.begin(block) * z_rows_of_block();
    return z.from(row);
  }

  // From row 0 of the batch on.
  Matrix<float> z_of_step(size_t k, const Worker& worker, Range rows, int64_t block) const {
    return z_of(
        worker, block, merge_projection_ ? shares_.rows_before(k, worker.group) - rows.begin : 0);
  }

  const ForwardCall& call_;
  const CellInfo& cell_;
  const int64_t batch_, hidden_, input_size_;
  const Weights weights_;
  const int64_t heads_, units_;  // units per head
  const Partition& blocks_;
  const std::vector<Step>& steps_;
  const ForwardIO<T> io_;
  const Grid grid_;
  Shares shares_;
  const BetweenStages<float> between_;
  const bool merge_projection_;
  const bool exchanges_;  // threads that share rows read each other's states or means
  bool input_in_place_, output_is_operand_;
  // Steps whose input is packed or multiplied together.
  std::vector<Chunk> chunks_;
  int64_t chunk_steps_ = 0;  // maximum per chunk

  OperandA<Format> packed_input_;
  Matrix<const Element> h_0_;
  OperandA<Format> packed_h_0_;
  OperandA<Format> states_;  // two steps alternate; unused if the output is the operand
  OperandA<Format> zero_h_;  // one row
  std::vector<OperandA<Format>> operands_;  // of products
  Workspace<float> zero_products_;
  Workspace<double> workspace_;
  float* z_ = nullptr;
  int64_t z_size_ = 0;             // per worker
  std::unique_ptr<bool[]> notes_;  // per grid column and batch row
  Matrix<C> c_rows_;
  ForwardArgs<T, Element> kernel_args_;
};

template <typename T, typename Format>
bool forward(const ForwardCall& call, const ForwardSchedule& schedule) {
  if (!call.packed.empty()) {
    return BlockedForward<T, Format>(call, schedule, read_packed<Format>(call.cell, call.packed))
        .run();
  }
  auto weights = pack_weights<Format>(call.cell, call.weights, schedule.blocks);
  if (!weights.has_value()) return false;
  return BlockedForward<T, Format>(call, schedule, *std::move(weights)).run();
}

template <typename T>
std::vector<int64_t> int8_forward(const ForwardCall& call, const ForwardSchedule& schedule) {
  BlockedForward<T, Int8Format> engine(
      call, schedule, read_packed<Int8Format>(call.cell, call.packed));
  engine.run();
  return engine.rows_out_of_range();
}

}  // namespace

std::vector<int64_t> run_blocked_int8(const ForwardCall& call, const ForwardSchedule& schedule) {
  if (call.storage == Storage::kF16) return int8_forward<Half>(call, schedule);
  return call.storage == Storage::kF32 ? int8_forward<float>(call, schedule)
                                       : int8_forward<BFloat16>(call, schedule);
}

void run_small_batch(const ForwardCall& call, const SmallBatchSchedule& schedule) {
  const ForwardSchedule as_blocked = {
      GemmFormat::kF32,
      schedule.grid,
      schedule.blocks,
      /*merge_projection=*/true,
      schedule.chunk_rows};
  const auto run = [&]<typename Weights>(Weights weights) {
    BlockedForward<float, F32Format, Weights>(call, as_blocked, std::move(weights)).run();
  };
  if (schedule.in_place) {
    return visit_packed_storage<F32Format>(call.weights.storage, [&]<typename T>(T*) {
      run(SmallBatchWeightsInPlace<T>(call.cell, call.weights, schedule.blocks));
    });
  }
  PackedWeights<F32Format> packed =
      call.packed.empty() ? *pack_weights<F32Format>(call.cell, call.weights, schedule.blocks)
                          : read_packed<F32Format>(call.cell, call.packed);
  run(SmallBatchPackedWeights(std::move(packed), call.batch));
}

bool run_blocked(const ForwardCall& call, const ForwardSchedule& schedule) {
  return visit_storage_and_format(
      call.storage, schedule.format, [&]<typename T, typename Format>(T, Format) {
        return forward<T, Format>(call, schedule);
      });
}

}  // namespace lltm::cpu
