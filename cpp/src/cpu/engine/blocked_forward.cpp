// The blocked engine, forward.
//
// For each block of hidden units, in a step:
//     z = x W_x^T + h W_h^T      two GEMMs
//     h', c' from z              element-wise, while z is in its cache
// A step may have several stages (cell/program.h). z of all blocks is then kept for later stages,
// which begin with GEMMs of products' operands.
//
// A grid position (schedule.h) has some batch rows and blocks. Threads synchronize after each stage
// only if they share rows. Out-of-range values stop a bf16x3 run; int8 records the row.
#include "common/memory.h"
#include "common/steps.h"
#include "cpu/dispatch.h"
#include "cpu/engine/between_stages.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/plan.h"
#include "cpu/engine/step_io.h"
#include "cpu/gemm/gemm.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

template <typename Source>
Tensor as_source(const Tensor& tensor) {
  const Tensor source = tensor.to(kDtype<Source>);
  return source.stride(-1) == 1 ? source : source.contiguous();
}

template <typename T, typename Format>
class BlockedForward {
 public:
  using Operand = typename Format::Operand;
  using Source = typename Format::Source;
  static constexpr bool kNotesRows = std::is_same_v<Format, Int8Format>;

  BlockedForward(
      const SequenceArgs& args, const ForwardSchedule& schedule, PackedWeights<Format> weights)
      : args_(args),
        cell_(*args.cell),
        batch_(args.h_0->size(0)),
        hidden_(args.h_0->size(1)),
        input_size_(args.input->size(-1) - cell_.given * hidden_),
        weights_(std::move(weights)),
        blocks_(weights_.blocks),
        steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        io_(args, steps_),
        grid_(schedule.grid.within(blocks_)),
        plan_(steps_, batch_, grid_, blocks_.count),
        between_(cell_.forward(), batch_, hidden_, grid_.workers(), args.input->options()),
        merge_projection_(schedule.merge_projection),
        output_is_operand_(
            std::is_same_v<T, Operand> &&
            Format::fits_in_place(hidden_, cell_.output_columns() * hidden_) &&
            !args.recurrent_mask.defined()),
        input_(as_source<Source>(args.input)),
        input_rows_(input_),
        given_rows_(args.input) {
    input_in_place_ = input_.is_contiguous() && Format::fits_in_place(input_size_, input_.size(-1));
    // Unlike the input's, a group's rows for a merged projection have no gaps, and no given gates.
    if (merge_projection_ && grid_.rows > 1) input_in_place_ = false;
    const bool by_step = input_in_place_ && !merge_projection_;
    const int64_t most_steps = by_step ? 1 : std::max<int64_t>(1, schedule.chunk_rows / batch_);
    chunk_steps_ = most_steps;
    chunks_ = plan_chunks(steps_, most_steps * batch_, most_steps);
    if (merge_projection_) plan_.count_rows_before(chunks_, args.reverse);
    allocate();
  }

  std::optional<SequenceResult> run() {
    const Tensor h_0 = as_source<Source>(masked_h(args_.h_0, args_.recurrent_mask));
    if (Format::fits_in_place(hidden_, h_0.stride(0))) {
      h_0_ = Format::in_place(read<Source>(h_0));
    } else {
      packed_h_0_ = allocate_a<Format>(batch_, hidden_, h_0.options());
      const Range rows = {0, batch_};
      if (!pack(0, rows, hidden_, read<Source>(h_0), packed_h_0_.rows, /*state=*/true)) return {};
      h_0_ = as_const(packed_h_0_.rows);
    }
    const bool in_range =
        parallel_region(grid_.workers(), [&](Team& team) { run_thread(team); }, grid_.columns);
    if (!in_range) return {};
    return SequenceResult(
        io_.output, final_states(steps_, args_.h_0, io_.output_h()), c_, io_.saved());
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
  struct Worker : Part {
    float* z;     // for a block, or for all blocks in a chunk
    bool* notes;  // per batch row, out of range
    int64_t index;
  };

  void allocate() {
    const auto options = args_.input->options();
    c_ = at::empty(args_.c_0->sizes(), options).copy_(args_.c_0);
    bias_ = slot_bias(args_, hidden_);
    parameters_ = cell_parameters(cell_, args_.bias_ih);

    if (!input_in_place_) {
      packed_input_ = allocate_a<Format>(chunk_steps_ * batch_, input_size_, options);
    }
    if (output_is_operand_) {
      const int64_t columns = cell_.output_columns() * hidden_;
      states_.rows = {reinterpret_cast<Operand*>(io_.output.mutable_data_ptr()), columns};
    } else {
      states_ = allocate_a<Format>(2 * batch_, hidden_, options);
      Format::init_states(2 * batch_, hidden_, states_.rows);
    }
    const int64_t z_units = keeps_z() ? Format::padded_n(hidden_) : blocks_.width;
    const int64_t z_columns = cell_.slots * z_units;
    const int64_t z_rows = z_rows_of_block();
    constexpr int64_t kPadding = 16;  // the element-wise kernel may read past the end
    z_ = at::empty({grid_.workers(), z_rows * z_columns + kPadding}, options.dtype(at::kFloat));
    if (io_.resets.any()) {
      zero_h_ = allocate_a<Format>(1, hidden_, options);
      const Tensor zeros = at::zeros({1, hidden_}, options.dtype(kDtype<Source>));
      Format::pack_a(1, hidden_, read<Source>(zeros), zero_h_.rows);
      zero_products_ = at::empty({grid_.workers(), zero_columns()}, options.dtype(at::kFloat));
    }
    for (int p = 0; p < cell_.operands().count; ++p) {
      operands_.push_back(allocate_a<Format>(batch_, hidden_, options));
      Format::init_states(batch_, hidden_, operands_.back().rows);
    }
    if (kNotesRows) notes_ = std::make_unique<bool[]>(grid_.columns * batch_);

    kernel_args_.cell = &cell_;
    kernel_args_.layer_hidden = hidden_;
    kernel_args_.gates_padded = true;
    kernel_args_.bias = read_row<float>(bias_);
    kernel_args_.parameters = read_row<float>(parameters_);
    kernel_args_.c = read<T>(c_);
    kernel_args_.c_next = write<T>(c_);
    kernel_args_.h_factor = read<T>(args_.recurrent_mask);
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
          if (stage > 0) return later_stage(k, stage, worker);
          if (merge_projection_ && k == chunk.first) project_chunk(chunk, worker);
          return step(chunk, k, worker);
        });
        team.barrier();
      }
    }
  }

  bool keeps_z() const { return merge_projection_ || between_.count() > 1; }
  int64_t z_rows_of_block() const { return merge_projection_ ? group_rows() : batch_; }

  int64_t group_rows() const { return plan_.most_rows_in_chunk(); }

  Worker worker_of(int64_t index) const {
    return {
        plan_.part_of(index),
        z_.mutable_data_ptr<float>() + index * z_.size(1),
        notes(index),
        index};
  }

  int64_t zero_columns() const { return cell_.direct.count() * Format::padded_n(hidden_); }
  float* zero_product(const Worker& worker, int64_t block) const {
    if (!io_.resets.any()) return nullptr;
    return zero_products_.mutable_data_ptr<float>() + worker.index * zero_columns() +
           cell_.direct.count() * blocks_.begin(block);
  }

  // B of the recurrent GEMM for `slots`.
  PackedB<const Operand> weights_h(int64_t block, SlotRange slots) const {
    PackedB<const Operand> b = weights_.h(block);
    if (slots == cell_.h) return b;
    const int64_t width = weights_.slot_columns(block);
    b.data += (slots.begin - cell_.h.begin) * width * Format::kVnniFactor;
    b.n = slots.count() * width;
    return b;
  }

  bool multiply_zeros(const Worker& worker) const {
    if (cell_.direct.count() == 0) return true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      const Matrix<float> product = {zero_product(worker, block), weights_.columns(block)};
      const auto w = weights_h(block, cell_.direct);
      Format::gemm(1, as_const(zero_h_.rows), w, product, /*accumulate=*/false);
    }
    return true;
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
      Matrix<const Source> x,
      Matrix<Operand> to,
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
      const Range rows = plan_.rows_of_step(k, group);
      const Range part = share(rows.size(), grid_.columns, index % grid_.columns);
      const Range own = {rows.begin + part.begin, rows.begin + part.end};
      const auto x = input_rows_.of(steps_[k].offset).from(own.begin);
      const auto to = packed_input(chunk, k, group).from(part.begin);
      if (!pack(index, own, input_size_, x, to)) return false;
    }
    return true;
  }

  void project_chunk(const Chunk& chunk, const Worker& worker) const {
    const size_t begin = args_.reverse ? chunk.last - 1 : chunk.first;
    const size_t end = args_.reverse ? chunk.first : chunk.last - 1;
    const int64_t rows =
        plan_.rows_before(end, worker.group) + plan_.rows_of_step(end, worker.group).size();
    if (rows == 0) return;
    const auto x = input_of(chunk, begin, worker.group);
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      const auto z = z_of(worker, block, 0);
      if (cell_.x.count() > 0) {
        Format::gemm(rows, x, weights_.x(block), z, /*accumulate=*/false);
      }
      clear_slots_of_h(cell_, weights_.slot_columns(block), rows, z);
    }
  }

  bool step(const Chunk& chunk, size_t k, const Worker& worker) const {
    const Range units = {
        blocks_.begin(worker.blocks.begin), std::min(blocks_.begin(worker.blocks.end), hidden_)};
    io_.enter_c(k, kernel_args_.c_next.from(worker.rows.begin, units.begin), worker.rows, units);
    if (plan_.rows_of_step(k, worker.group).size() == 0) return true;
    if (grid_.needs_barrier() && k > 0) {
      const Range carried = intersect(worker.rows, {0, carried_rows(steps_, k)});
      prefetch_rows(as_const(state_of(k - 1)), carried, weights_.k_h);
    }
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      in_range &= step_block(chunk, k, worker, block);
    }
    return in_range;
  }

  bool step_block(const Chunk& chunk, size_t k, const Worker& worker, int64_t block) const {
    const Step& step = steps_[k];
    const Range rows = plan_.rows_of_step(k, worker.group);
    const Matrix<float> z = z_of_step(k, worker, block);
    const int64_t width = weights_.slot_columns(block);
    if (!merge_projection_) {
      if (cell_.x.count() > 0) {
        const auto x = input_of(chunk, k, worker.group);
        Format::gemm(rows.size(), x, weights_.x(block), z.from(rows.begin), /*accumulate=*/false);
      }
      clear_slots_of_h(cell_, width, rows.size(), z.from(rows.begin));
    }
    if (cell_.given > 0) copy_given(k, rows, block, z.from(rows.begin));
    const Matrix<float> z_h = z.from(0, cell_.direct.begin * width);
    const auto add_recurrent = [&](Range part, Matrix<const Operand> h) {
      if (part.size() == 0 || cell_.direct.count() == 0) return;
      const auto z_part = z_h.from(part.begin);
      const auto w = weights_h(block, cell_.direct);
      const auto a = h.from(part.begin, weights_.first_of_h(block));
      Format::gemm(part.size(), a, w, z_part, /*accumulate=*/true, step.rows);
    };
    const int64_t columns = cell_.direct.count() * width;
    io_.enter_z(k, z_h, rows, columns, zero_product(worker, block), [&] {
      const int64_t carried = carried_rows(steps_, k);
      if (k > 0) add_recurrent(intersect(rows, {0, carried}), as_const(state_of(k - 1)));
      add_recurrent(intersect(rows, {carried, step.rows}), h_0_);
    });
    return run_stage(k, 0, worker, block, z);
  }

  bool later_stage(size_t k, int stage, const Worker& worker) const {
    const Range rows = plan_.rows_of_step(k, worker.group);
    if (rows.size() == 0) return true;
    const unsigned products = between_.stage(stage - 1).operands;
    between_.average(stage - 1, rows, worker.index);
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      const Matrix<float> z = z_of_step(k, worker, block);
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
      in_range &= run_stage(k, stage, worker, block, z);
    }
    return in_range;
  }

  // The columns of the input that are the pre-activations of given gates.
  void copy_given(size_t k, Range rows, int64_t block, Matrix<float> z) const {
    for_each_given(cell_, hidden_, args_.input->size(-1), [&](int gate, int64_t column) {
      const auto from =
          given_rows_.of(steps_[k].offset).from(rows.begin, column + blocks_.begin(block));
      const auto to = z.from(0, gate * weights_.slot_columns(block));
      for (int64_t r = 0; r < rows.size(); ++r) widen(from.from(r), to.row(r), blocks_.size(block));
    });
  }

  bool run_stage(size_t k, int stage, const Worker& worker, int64_t block, Matrix<float> z) const {
    const Range rows = plan_.rows_of_step(k, worker.group);
    const Range units = blocks_.range(block);
    const int64_t unit = units.begin;
    ForwardArgs<T, Operand> part = kernel_args_;
    part.hidden = blocks_.size(block);
    part.gates = as_const(z.from(rows.begin));
    part.gates_step = weights_.slot_columns(block);
    part.bias = part.bias.from(0, unit);
    part.parameters = part.parameters.from(0, unit);
    part.h_factor = part.h_factor.from(rows.begin, unit);
    part.c = part.c.from(rows.begin, unit);
    part.c_next = part.c_next.from(rows.begin, unit);
    part.h_next = io_.h_next(k, rows, units);
    if (!output_is_operand_) part.h_operand = state_of(k).from(rows.begin, unit);
    part.activations = io_.saved_values(k, rows, units);
    bool out_of_range = false;
    part.out_of_range =
        kNotesRows ? Matrix<bool>{worker.notes + rows.begin, 1} : Matrix<bool>{&out_of_range, 0};
    const auto run = [&] {
      elementwise<T, Operand>(cell_).forward(part, 0, rows.size() * part.hidden);
      if (stage + 1 == between_.count()) io_.leave_c(k, part.c_next, rows, units);
      return !out_of_range;
    };
    if (between_.count() == 1) return run();
    const StageMemory<float> stages = between_.memory(stage, worker.index).from(rows.begin, unit);
    Matrix<Operand> operands[CellInfo::kMostSlots];
    for (size_t p = 0; p < operands_.size(); ++p) {
      operands[p] = operands_[p].rows.from(rows.begin, unit);
    }
    part.stages = &stages;
    part.operands = operands;
    return run();
  }

  // Groups have separate memory, because some are a chunk ahead.
  Matrix<Operand> packed_input(const Chunk& chunk, size_t k, int64_t group) const {
    const int64_t first = plan_.rows_of_group(group).begin;
    return packed_input_.rows.from(
        merge_projection_ ? first * chunk_steps_ + plan_.rows_before(k, group)
                          : static_cast<int64_t>(k - chunk.first) * batch_ + first);
  }

  Matrix<const Operand> input_of(const Chunk& chunk, size_t k, int64_t group) const {
    if (!input_in_place_) return as_const(packed_input(chunk, k, group));
    const int64_t row = steps_[k].offset + plan_.rows_of_group(group).begin;
    const int64_t columns = input_.size(-1);
    return Format::in_place({input_rows_.of(0).data + row * columns, columns, 1});
  }

  Matrix<Operand> state_of(size_t k) const {
    return states_.rows.from(
        output_is_operand_ ? steps_[k].offset : static_cast<int64_t>(k % 2) * batch_);
  }

  Matrix<float> z_of(const Worker& worker, int64_t block, int64_t row) const {
    Matrix<float> z = {worker.z, weights_.columns(block)};
    if (keeps_z()) z.data += cell_.slots * blocks_.begin(block) * z_rows_of_block();
    return z.from(row);
  }

  // From row 0 of the batch on.
  Matrix<float> z_of_step(size_t k, const Worker& worker, int64_t block) const {
    const int64_t begin = plan_.rows_of_step(k, worker.group).begin;
    return z_of(worker, block, merge_projection_ ? plan_.rows_before(k, worker.group) - begin : 0);
  }

  const SequenceArgs& args_;
  const CellInfo& cell_;
  const int64_t batch_, hidden_, input_size_;
  const PackedWeights<Format> weights_;
  const Blocks& blocks_;
  const std::vector<Step> steps_;
  const ForwardIO<T> io_;
  const Grid grid_;
  Plan plan_;
  const BetweenStages<float> between_;
  bool merge_projection_, input_in_place_, output_is_operand_;
  // Steps whose input is packed or multiplied together.
  std::vector<Chunk> chunks_;
  int64_t chunk_steps_;  // maximum per chunk

  Tensor input_;
  StepRows<Source> input_rows_;
  StepRows<T> given_rows_;  // not rounded to the operands' type
  OperandA<Format> packed_input_;
  Matrix<const Operand> h_0_;
  OperandA<Format> packed_h_0_;
  OperandA<Format> states_;  // two steps alternate; unused if the output is the operand
  OperandA<Format> zero_h_;  // one row
  std::vector<OperandA<Format>> operands_;  // of products
  Tensor bias_, parameters_, z_, zero_products_;
  std::unique_ptr<bool[]> notes_;  // per grid column and batch row
  Tensor c_;
  ForwardArgs<T, Operand> kernel_args_;
};

template <typename T, typename Format>
std::optional<SequenceResult> forward(const SequenceArgs& args, const ForwardSchedule& schedule) {
  if (args.prepacked()) {
    return BlockedForward<T, Format>(
               args, schedule, read_packed<Format>(*args.cell, args.weight_ih))
        .run();
  }
  constexpr at::ScalarType dtype = kDtype<typename Format::Source>;
  auto weights = pack_weights<Format>(*args.cell, weights_of(args, dtype), schedule.blocks);
  if (!weights.has_value()) return {};
  return BlockedForward<T, Format>(args, schedule, *std::move(weights)).run();
}

template <typename T>
Int8Result int8_forward(const SequenceArgs& args, const ForwardSchedule& schedule) {
  BlockedForward<T, Int8Format> engine(
      args, schedule, read_packed<Int8Format>(*args.cell, args.weight_ih));
  SequenceResult result = *engine.run();
  return {std::move(result), engine.rows_out_of_range()};
}

}  // namespace

Int8Result blocked_int8_forward(const SequenceArgs& args, const ForwardSchedule& schedule) {
  const at::ScalarType dtype = args.input->scalar_type();
  if (dtype == at::kHalf) return int8_forward<Half>(args, schedule);
  return dtype == at::kFloat ? int8_forward<float>(args, schedule)
                             : int8_forward<BFloat16>(args, schedule);
}

std::optional<SequenceResult> blocked_forward(
    const SequenceArgs& args, const ForwardSchedule& schedule) {
  return visit_dtype_and_format(
      args.input->scalar_type(), schedule.format, [&]<typename T, typename Format>(T, Format) {
        return forward<T, Format>(args, schedule);
      });
}

}  // namespace lltm::cpu
