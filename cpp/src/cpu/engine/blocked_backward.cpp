// The blocked engine, backward. In a step, from the last to the first, for each block of hidden
// units:
//
//     1. dc = dc + gradients of states in the output  step_io.h
//     2. dh = dz' W_h                                 GEMM, with dz' from the next step
//     3. dh times the recurrent mask, cut at resets   step_io.h
//     4. dz, dc from dh + dy, dc and saved values     element-wise, while dh is in the cache
//     5. dc is cut at resets                          step_io.h
//
// In a step with several stages (cell/program.h), a stage may follow whose dv = dz W is another
// GEMM, for the operand v of products. Then dh and dv of all blocks are kept.
//
// Gradients for input, weights and biases are one GEMM each per chunk, while dz is in the cache.
// Workers are as in blocked_forward.cpp.
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/engine/between_stages.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/sequence_gradients.h"
#include "cpu/engine/shares.h"
#include "cpu/engine/step_io.h"
#include "cpu/gemm/gemm.h"
#include "cpu/prefetch.h"
#include "cpu/threads/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Everything that enters or leaves a step of backward (step_io.h).
template <typename T>
class BackwardIO : public RowsIO<T> {
  using Rows = RowsIO<T>;
  using Rows::cell_, Rows::hidden_, Rows::steps_;

 public:
  using C = compute_t<T>;

  BackwardIO(const SequenceBackwardArgs& args, const std::vector<Step>& steps)
      : Rows(*args.cell, args.h_0->size(1), steps, data_or_null<bool>(contiguous(args.reset))),
        grad_output_(steps_view(args.grad_output)),
        wide_mask_(widened(args.recurrent_mask)),
        wide_grad_states_(widened(args.grad_states)),
        grad_states_(steps_view(wide_grad_states_)) {
    Rows::mask_ = read<C>(wide_mask_);
  }

  // Before a step: the gradient of h' in the output, and of states of c' there.
  Matrix<const T> grad_of_output(size_t k, Range rows, Range units) const {
    return grad_output_.of(steps_[k].offset).template as<const T>().from(rows.begin, units.begin);
  }
  void add_grad_of_states(size_t k, Matrix<C> grad_c, Range rows, Range units) const {
    if (!wide_grad_states_.defined()) return;
    for (int n = 0; n < cell_.outputs; ++n) {
      const auto from = grad_states_.of(steps_[k].offset)
                            .template as<const C>()
                            .from(rows.begin, n * hidden_ + units.begin);
      const auto to = grad_c.from(0, cell_.output_states[n] * hidden_);
      for (int64_t r = 0; r < rows.size(); ++r) {
        for (int64_t j = 0; j < units.size(); ++j) {
          to.row(r)[j] += from.row(r)[j * from.col_stride];
        }
      }
    }
  }

  // After a step: no gradient goes beyond a reset.
  void cut_grad_c(size_t k, Matrix<C> grad_c, Range rows, Range units) const {
    for (int n = 0; n < cell_.state_columns(); ++n) {
      Rows::fill(k, grad_c.from(0, n * hidden_), rows, units, 0);
    }
  }

 private:
  static Tensor contiguous(const Tensor& tensor) {
    return tensor.defined() ? tensor.contiguous() : tensor;
  }
  static Tensor widened(const Tensor& tensor) {
    constexpr at::ScalarType dtype = std::is_same_v<C, double> ? at::kDouble : at::kFloat;
    return tensor.defined() ? tensor.to(dtype) : tensor;
  }

  const StepsView grad_output_;
  const Tensor wide_mask_, wide_grad_states_;  // of states: (T, B, outputs * H), or packed
  const StepsView grad_states_;
};

template <typename T, typename Format>
class BlockedBackward {
 public:
  using Element = typename Format::Element;
  using Unpacked = typename Format::Unpacked;

  BlockedBackward(const SequenceBackwardArgs& args, const BackwardSchedule& schedule)
      : args_(args),
        cell_(*args.cell),
        batch_(args.h_0->size(0)),
        hidden_(args.h_0->size(1)),
        slot_pitch_(Format::slot_pitch(hidden_)),
        grid_(schedule.grid),
        heads_(heads_of(args.weight_hh)),
        units_(hidden_ / heads_),
        blocks_(schedule.blocks),
        steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        shares_(steps_, batch_, grid_, blocks_.count),
        io_(args, steps_),
        chunks_(plan_chunks(steps_, schedule.chunk_rows)),
        between_(cell_.backward(), batch_, hidden_, grid_.workers()),
        exchanges_(grid_.sharing(heads_) > 1 || between_.has_means()),
        weights_(slot_weights(args)),
        gradients_(args, steps_, weights_, schedule) {
    allocate();
  }

  std::optional<Gradients> run() {
    if (!pack_weights()) return {};
    for (size_t c = chunks_.size(); c-- > 0;) {
      if (!run_chunk(c)) return {};
      const Chunk& chunk = chunks_[c];
      const Tensor dz = dz_tensor(c).slice(0, 0, chunk.rows).slice(1, 0, cell_.slots * hidden_);
      if (!gradients_.add(chunk.first, chunk.last, dz)) return {};
    }
    return gradients_.finish(dc_, parameter_sums_);
  }

 private:
  // Otherwise a packed copy of dz is the next GEMM's operand.
  static constexpr bool kDzIsOperand = Format::kInPlace;

  struct Worker : Share {
    float* dh;  // for one block, or with several stages for all
    int64_t index;
  };

  static Weights slot_weights(const SequenceBackwardArgs& args) {
    const Tensor& given_hh = args.weight_hh;
    // Converting a concatenated matrix is faster than its columns.
    const auto [ih, hh] = weights_of(
        *args.cell,
        as_packed_dtype(args.weight_ih, kDtype<Unpacked>),
        given_hh.defined() ? as_packed_dtype(given_hh, kDtype<Unpacked>) : given_hh);
    const Tensor slots = h_slots(hh, *args.cell);
    return {
        x_slots(ih, *args.cell),
        has_heads(slots) ? slots.contiguous() : with_contiguous_rows(slots)};
  }

  // B of a GEMM from the gradients of `gates`, in packed_weights_.
  struct RecurrentGemm {
    SlotRange gates;
    int operand;  // -1: h
    int64_t k, offset;
  };

  void add_gemm(SlotRange gates, int operand) {
    if (gates.count() == 0) return;
    const int64_t pitch = heads_ == 1 ? slot_pitch_ : units_;
    const int64_t k = Format::padded_k(gates.count() * pitch);
    gemms_.push_back({gates, operand, k, packed_size_});
    packed_size_ += Format::padded_n(hidden_) * k;
  }

  void allocate() {
    add_gemm(cell_.direct, -1);
    const int operands = cell_.operands().count;
    for (int p = 0; p < operands; ++p) {
      for (const SlotRange gates : cell_.operands()[p].gates) add_gemm(gates, p);
    }
    const auto options = args_.input->options().dtype(at::kFloat);
    const int64_t chunk_rows = most_rows(chunks_);
    const int64_t columns = cell_.slots * hidden_;
    // Begins at the first pre-activation that depends on h; K is padded.
    const int64_t before = cell_.h.begin * hidden_;
    const int64_t stride =
        kDzIsOperand ? round_up(before + Format::a_stride(columns - before), Format::kVnniFactor) +
                           padding_of_gemms()
                     : columns;
    const auto dz_options = options.dtype(kDtype<Unpacked>);
    for (size_t k = 0; k < dz_.size(); ++k) {
      const bool used = k == 0 || (kDzIsOperand && chunks_.size() > 1);
      const int64_t rows = used ? chunk_rows : 0;
      dz_[k] = empty_large({rows, stride}, dz_options);
      if (stride != columns) dz_[k].zero_();
    }
    if (!kDzIsOperand) {
      packed_dz_ = allocate_a<Format>(2 * batch_, cell_.slots * slot_pitch_);
    }
    if (args_.grad_h_n.defined()) dh_n_ = args_.grad_h_n->to(at::kFloat);
    dc_ = copy_or_zeros(args_.grad_c_n, {batch_, cell_.state_columns() * hidden_}, options);
    parameters_ = cell_parameters(cell_, args_.bias_ih);
    if (cell_.parameters > 0) {
      parameter_sums_ =
          at::zeros({grid_.workers(), cell_.parameters * hidden_}, options.dtype(at::kDouble));
    }
    if (between_.count() == 1) {
      dh_ = at::empty({grid_.workers(), batch_ * blocks_.width}, options);
    } else {
      dh_ = at::empty({batch_, (1 + operands) * hidden_}, options);
    }

    kernel_args_.cell = &cell_;
    kernel_args_.layer_hidden = hidden_;
    kernel_args_.saved = read<T>(args_.saved);
    kernel_args_.parameters = read_row<float>(parameters_);
    kernel_args_.grad_c = read<float>(dc_);
    kernel_args_.grad_c_prev = write<float>(dc_);
    kernel_args_.operand_stride = slot_pitch_;
  }

  // Padding of K of an operand's product reads the dz that follows, perhaps not yet computed, times
  // zeros. So the rows are longer, and begin as zeros.
  int64_t padding_of_gemms() const {
    const bool of_operand = !gemms_.empty() && gemms_.back().operand >= 0;
    return of_operand ? kPackedRows : 0;
  }

  bool pack_weights() {
    const int64_t bytes = packed_size_ * static_cast<int64_t>(sizeof(Element));
    packed_weights_ = empty_large({bytes}, args_.input->options().dtype(at::kByte));
    bool in_range = true;
    for (const RecurrentGemm& gemm : gemms_) in_range &= pack_weights(gemm);
    return in_range;
  }

  bool pack_weights(const RecurrentGemm& gemm) {
    const Tensor matrix = weights_.hh.flatten(0, -2);  // heads' rows
    return visit_packed_storage<Format>(
        storage_of(matrix.scalar_type()),
        [&]<typename Weight>(Weight*) { return pack_weights(gemm, read<Weight>(matrix)); });
  }

  template <typename Weight>
  bool pack_weights(const RecurrentGemm& gemm, Matrix<const Weight> matrix) {
    const auto w = matrix.from((gemm.gates.begin - cell_.h.begin) * units_);
    const int64_t all = gemm.gates.count() * units_;
    // One call if the pre-activations are also adjacent in the operand. With heads, a B per gate.
    const int64_t rows = heads_ > 1 ? units_ : slot_pitch_ == hidden_ ? all : hidden_;
    return parallel_tasks(
        blocks_.count,
        hidden_ * gemm.k,
        kPackGrain,
        [&](int64_t block, int64_t part, int64_t parts) {
          const Range own = Partition(rows, kPackedRows, parts).range(part);
          bool in_range = true;
          const int64_t head = head_of(block);
          const auto w_head = w.from(head * cell_.h.count() * units_);
          for (int64_t row = 0; row < all && own.size() > 0; row += rows) {
            const auto x = w_head.from(row + own.begin, blocks_.begin(block) - head * units_);
            const int64_t gate = row / rows;
            const auto to =
                heads_ > 1 ? gate_of_weights(gemm, block, gate) : block_of_weights(gemm, block);
            const int64_t k0 = (heads_ > 1 ? 0 : gate * slot_pitch_) + own.begin;
            const int64_t n = blocks_.size(block);
            const auto pack = [&](const auto& from, int64_t first, int64_t count) {
              return Format::pack_b(to, k0 + first, 0, from, count, n);
            };
            in_range &= pack_widened<Unpacked>(x, own.size(), n, pack);
          }
          return in_range;
        });
  }

  bool run_chunk(size_t c) {
    const auto run_thread = [&](Team& team) {
      for (size_t k = chunks_[c].last; k-- > chunks_[c].first;) {
        for (int stage = 0; stage < between_.count(); ++stage) {
          team.for_each_worker([&](int64_t index) {
            const Worker worker = worker_of(index);
            return stage > 0 ? later_stage(c, k, stage, worker) : step(c, k, worker);
          });
          if (exchanges_) team.barrier();
        }
      }
    };
    return parallel_region(grid_.workers(), run_thread, grid_.columns);
  }

  Worker worker_of(int64_t index) const {
    float* const dh = dh_.mutable_data_ptr<float>();
    return {shares_.share_of(index), between_.count() == 1 ? dh + index * dh_.size(1) : dh, index};
  }

  bool step(size_t c, size_t k, const Worker& worker) const {
    const Range rows = shares_.rows_of_step(k, worker.group);
    if (rows.size() == 0) return true;
    const Range continued = intersect(rows, {0, carried_into_next(k)});
    if (exchanges_ && continued.size() > 0) {
      prefetch_rows(dz_operand(c, k + 1, cell_.direct), continued, k_of_state());
    }
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      in_range &= step_block(c, k, worker, block);
    }
    return in_range;
  }

  bool step_block(size_t c, size_t k, const Worker& worker, int64_t block) const {
    const Range rows = shares_.rows_of_step(k, worker.group);
    const Range units = blocks_.range(block);
    // 1.
    io_.add_grad_of_states(k, kernel_args_.grad_c_prev.from(rows.begin, units.begin), rows, units);
    const int64_t carried = carried_into_next(k);
    const Range continued = intersect(rows, {0, carried});
    const Range ended = intersect(rows, {carried, steps_[k].rows});
    const Matrix<float> dh = dh_of(worker, block);
    const auto dh_n = read<float>(dh_n_).from(ended.begin, blocks_.begin(block));
    // 2 and 3. Sequences that end in this step have no next one: their dh is that of h_n.
    if (continued.size() > 0) {
      const Matrix<float> to = dh.from(dh_row(continued));
      if (cell_.direct.count() > 0) {
        multiply(gemms_[0], c, k + 1, continued, block, to, /*accumulate=*/false);
      } else {
        fill(to, continued.size(), block, {});
      }
      io_.enter_h(k + 1, to, continued, units);
    }
    // 4 and 5.
    if (between_.count() > 1) {
      if (ended.size() > 0) fill(dh.from(ended.begin), ended.size(), block, dh_n);
      return finish_rows(c, k, 0, worker, rows, block, as_const(dh.from(rows.begin)));
    }
    bool in_range = true;
    if (continued.size() > 0) {
      in_range &= finish_rows(c, k, 0, worker, continued, block, as_const(dh));
    }
    if (ended.size() > 0) in_range &= finish_rows(c, k, 0, worker, ended, block, dh_n);
    return in_range;
  }

  bool later_stage(size_t c, size_t k, int stage, const Worker& worker) const {
    const Range rows = shares_.rows_of_step(k, worker.group);
    if (rows.size() == 0) return true;
    const unsigned operands = between_.stage(stage - 1).operands;
    between_.average(stage - 1, rows, worker.index);
    bool in_range = true;
    for (int64_t block = worker.blocks.begin; block < worker.blocks.end; ++block) {
      const Matrix<float> dh = dh_of(worker, block).from(rows.begin);
      unsigned written = 0;
      for (const RecurrentGemm& gemm : gemms_) {
        if (gemm.operand < 0 || (operands >> gemm.operand & 1) == 0) continue;
        const bool more = (written >> gemm.operand & 1) != 0;
        written |= 1u << gemm.operand;
        const auto to = dh.from(0, (1 + gemm.operand) * hidden_);
        multiply(gemm, c, k, rows, block, to, more);
      }
      in_range &= finish_rows(c, k, stage, worker, rows, block, as_const(dh));
    }
    return in_range;
  }

  int64_t head_of(int64_t block) const { return blocks_.begin(block) / units_; }

  // `to` = dz W or, if `accumulate`, += for the rows of step k. With heads, a GEMM per gate: its
  // columns of a head are adjacent.
  void multiply(
      const RecurrentGemm& gemm,
      size_t c,
      size_t k,
      Range rows,
      int64_t block,
      Matrix<float> to,
      bool accumulate) const {
    const auto dz = dz_operand(c, k, gemm.gates).from(rows.begin);
    if (heads_ == 1) {
      const auto w = as_const(block_of_weights(gemm, block));
      return Format::gemm(rows.size(), dz, w, to, accumulate);
    }
    for (int gate = 0; gate < gemm.gates.count(); ++gate) {
      const auto a = dz.from(0, gate * slot_pitch_ + head_of(block) * units_);
      const auto w = as_const(gate_of_weights(gemm, block, gate));
      Format::gemm(rows.size(), a, w, to, accumulate || gate > 0);
    }
  }

  // For a block: from row 0 of the continued rows on or, with several stages, of the batch.
  Matrix<float> dh_of(const Worker& worker, int64_t block) const {
    if (between_.count() == 1) return {worker.dh, Format::padded_n(blocks_.size(block))};
    return {worker.dh + blocks_.begin(block), dh_.size(1)};
  }
  int64_t dh_row(Range rows) const { return between_.count() == 1 ? 0 : rows.begin; }
  int64_t k_of_state() const { return cell_.direct.count() > 0 ? gemms_[0].k : 0; }

  void fill(Matrix<float> dh, int64_t rows, int64_t block, Matrix<const float> from) const {
    const int64_t n = between_.count() == 1 ? dh.row_stride : blocks_.size(block);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < n; ++j) {
        dh.row(r)[j] = from.data == nullptr ? 0 : from.row(r)[j * from.col_stride];
      }
    }
  }

  bool finish_rows(
      size_t c,
      size_t k,
      int stage,
      const Worker& worker,
      Range rows,
      int64_t block,
      Matrix<const float> dh_state) const {
    const int64_t unit = blocks_.begin(block);
    BackwardArgs<T, Element> of_block = kernel_args_;
    of_block.hidden = blocks_.size(block);
    of_block.saved = of_block.saved.from(steps_[k].offset + rows.begin, unit);
    of_block.parameters = of_block.parameters.from(0, unit);
    of_block.grad_h = io_.grad_of_output(k, rows, blocks_.range(block));
    of_block.grad_h_state = dh_state;
    of_block.grad_c = of_block.grad_c.from(rows.begin, unit);
    of_block.grad_c_prev = of_block.grad_c_prev.from(rows.begin, unit);
    of_block.dz = dz_of(c, k).from(rows.begin, unit);
    of_block.parameter_sums = write<double>(parameter_sums_).from(worker.index, unit).data;
    of_block.after_rows = (k > 0 ? steps_[k - 1].offset - steps_[k].offset : 0) - rows.size();
    bool out_of_range = false;
    if (!kDzIsOperand) {
      of_block.operand = packed_dz(k).from(rows.begin, unit);
      of_block.out_of_range = &out_of_range;
    }
    StageMemory<float> stages;
    if (between_.count() > 1) {
      stages = between_.memory(stage, worker.index).from(rows.begin, unit);
      of_block.stages = &stages;
      of_block.grad_operands = dh_state.from(0, hidden_);
    }
    elementwise<T, Element>(cell_).backward(of_block, 0, rows.size() * of_block.hidden);
    if (stage + 1 < between_.count()) return true;
    io_.cut_grad_c(k, of_block.grad_c_prev, rows, blocks_.range(block));
    return !out_of_range;
  }

  PackedB<Element> block_of_weights(const RecurrentGemm& gemm, int64_t block) const {
    const int64_t n = Format::padded_n(blocks_.size(block));
    auto* const data = static_cast<Element*>(packed_weights_.data_ptr()) + gemm.offset;
    return {data + blocks_.begin(block) * gemm.k, gemm.k, n, n};
  }

  // With heads.
  PackedB<Element> gate_of_weights(const RecurrentGemm& gemm, int64_t block, int64_t gate) const {
    const auto all = block_of_weights(gemm, block);
    return {all.data + gate * units_ * all.n, units_, all.n, all.n};
  }

  const Tensor& dz_tensor(size_t chunk) const { return dz_[kDzIsOperand ? chunk % 2 : 0]; }
  // For step k in chunk c, or the first step after the chunk.
  Matrix<Unpacked> dz_of(size_t c, size_t k) const {
    const size_t owner = k < chunks_[c].last ? c : c + 1;
    return write<Unpacked>(dz_tensor(owner)).from(steps_[k].offset - chunks_[owner].begin);
  }

  Matrix<const Element> dz_operand(size_t c, size_t k, SlotRange gates) const {
    if (!kDzIsOperand) return as_const(packed_dz(k).from(0, gates.begin * slot_pitch_));
    return Format::in_place(as_const(dz_of(c, k).from(0, gates.begin * hidden_)));
  }

  Matrix<Element> packed_dz(size_t k) const {
    return packed_dz_.rows.from(static_cast<int64_t>(k % 2) * batch_);
  }

  int64_t carried_into_next(size_t k) const {
    return k + 1 < steps_.size() ? carried_rows(steps_, k + 1) : 0;
  }

  const SequenceBackwardArgs& args_;
  const CellInfo& cell_;
  const int64_t batch_, hidden_;
  // Columns between pre-activations in dz.
  const int64_t slot_pitch_;
  const Grid grid_;
  const int64_t heads_, units_;  // units per head
  const Partition blocks_;
  const std::vector<Step> steps_;
  const Shares shares_;
  const BackwardIO<T> io_;
  const std::vector<Chunk> chunks_;
  const BetweenStages<float> between_;
  const bool exchanges_;  // threads that share rows read each other's dz or means
  const Weights weights_;
  std::vector<RecurrentGemm> gemms_;  // that of h, if any, is the first
  int64_t packed_size_ = 0;
  SequenceGradients gradients_;

  Tensor packed_weights_, parameters_, dh_n_, dc_, dh_;
  Tensor parameter_sums_;  // (workers, P * H)
  // dz of the current and the next chunk, whose first dz a chunk's last step multiplies.
  std::array<Tensor, 2> dz_;
  OperandA<Format> packed_dz_;  // two steps alternate; unused if dz is the operand
  BackwardArgs<T, Element> kernel_args_;
};

}  // namespace

std::optional<Gradients> blocked_backward(
    const SequenceBackwardArgs& args, const BackwardSchedule& schedule) {
  return visit_storage_and_format(
      storage_of(args.input->scalar_type()),
      schedule.format,
      [&]<typename T, typename Format>(T, Format) {
        return BlockedBackward<T, Format>(args, schedule).run();
      });
}

}  // namespace lltm::cpu
