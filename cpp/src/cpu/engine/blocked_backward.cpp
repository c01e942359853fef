// The blocked engine, backward.
//
// Step by step and block by block:
//     dh = dz' W_h        GEMM, with dz' from the next step
//     dz, dc from dh      element-wise, while dh is in the cache
// Gradients for input, weights and biases are one GEMM each per chunk, while dz is in the cache.
// The grid is as in blocked_forward.cpp.
#include "common/steps.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/plan.h"
#include "cpu/engine/resets.h"
#include "cpu/engine/sequence_gradients.h"
#include "cpu/gemm/gemm.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

template <typename T, typename Format>
class BlockedBackward {
 public:
  using Operand = typename Format::Operand;
  using Source = typename Format::Source;

  BlockedBackward(const SequenceBackwardArgs& args, const BackwardSchedule& schedule)
      : args_(args),
        cell_(*args.cell),
        batch_(args.h_0->size(0)),
        hidden_(args.h_0->size(1)),
        slot_pitch_(Format::slot_pitch(hidden_)),
        k_(Format::padded_k(cell_.h.count() * slot_pitch_)),
        grid_(schedule.grid),
        blocks_(schedule.blocks),
        steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        plan_(steps_, batch_, grid_, blocks_.count),
        resets_(args.reset, steps_),
        chunks_(plan_chunks(steps_, schedule.chunk_rows)),
        weights_(slot_weights(args)),
        gradients_(args, steps_, resets_, weights_, schedule),
        grad_output_(args.grad_output) {
    allocate();
  }

  std::optional<Gradients> run() {
    if (!pack_weights()) return {};
    for (size_t c = chunks_.size(); c-- > 0;) {
      if (!run_chunk(c)) return {};
      const Chunk& chunk = chunks_[c];
      const Tensor dz =
          dz_tensor(c).slice(0, 0, chunk.rows).slice(1, 0, cell_.grad_columns() * hidden_);
      if (!gradients_.add(chunk.first, chunk.last, dz)) return {};
    }
    return gradients_.finish(dc_);
  }

 private:
  // Otherwise a packed copy of dz is the next GEMM's operand.
  static constexpr bool kDzIsOperand = Format::kInPlace;

  struct Slot : Part {
    float* dh;  // for one block
  };

  static Weights slot_weights(const SequenceBackwardArgs& args) {
    const auto [ih, hh] = weights_of(args, kDtype<Source>);
    return {x_slots(ih, *args.cell), with_contiguous_rows(h_slots(hh, *args.cell))};
  }

  void allocate() {
    const auto options = args_.input->options().dtype(at::kFloat);
    const int64_t chunk_rows = most_rows(chunks_);
    const int64_t columns = cell_.grad_columns() * hidden_;
    // Begins at the first pre-activation that depends on h; K is padded.
    const int64_t before = cell_.h.begin * hidden_;
    const int64_t stride =
        kDzIsOperand ? round_up(before + Format::a_stride(columns - before), Format::kVnniFactor)
                     : columns;
    const auto dz_options = options.dtype(kDtype<Source>);
    for (size_t k = 0; k < dz_.size(); ++k) {
      const bool used = k == 0 || (kDzIsOperand && chunks_.size() > 1);
      const int64_t rows = used ? chunk_rows : 0;
      dz_[k] = empty_large({rows, stride}, dz_options);
      if (stride != columns) dz_[k].zero_();
    }
    if (!kDzIsOperand) {
      packed_dz_ = allocate_a<Format>(2 * batch_, cell_.grad_columns() * slot_pitch_, options);
    }
    if (args_.grad_h_n.defined()) dh_n_ = args_.grad_h_n->to(at::kFloat);
    if (args_.recurrent_mask.defined()) {
      recurrent_mask_ = args_.recurrent_mask->to(at::kFloat).contiguous();
    }
    dc_ = copy_or_zeros(args_.grad_c_n, {batch_, cell_.state_columns() * hidden_}, options);
    parameters_ = cell_parameters(cell_, args_.bias_ih);
    dh_ = at::empty({grid_.slots(), batch_ * blocks_.width}, options);

    kernel_args_.cell = &cell_;
    kernel_args_.layer_hidden = hidden_;
    kernel_args_.activations = read<T>(args_.saved);
    kernel_args_.parameters = read_row<float>(parameters_);
    kernel_args_.grad_c = read<float>(dc_);
    kernel_args_.grad_c_prev = write<float>(dc_);
    kernel_args_.operand_step = slot_pitch_;
  }

  bool pack_weights() {
    const int64_t bytes = Format::padded_n(hidden_) * k_ * static_cast<int64_t>(sizeof(Operand));
    packed_weights_ = empty_large({bytes}, args_.input->options().dtype(at::kByte));
    const auto w = read<Source>(weights_.hh);
    const int64_t all = weights_.hh.size(0);
    // One call if the pre-activations are also adjacent in the operand.
    const int64_t rows = slot_pitch_ == hidden_ ? all : hidden_;
    return parallel_tasks(
        blocks_.count, hidden_ * k_, kPackGrain, [&](int64_t block, int64_t part, int64_t parts) {
          const Range own = Blocks(rows, kPackedRows, parts).range(part);
          bool in_range = true;
          for (int64_t row = 0; row < all && own.size() > 0; row += rows) {
            const auto x = w.from(row + own.begin, blocks_.begin(block));
            const int64_t k0 = row / hidden_ * slot_pitch_ + own.begin;
            const auto to = block_of_weights(block);
            in_range &= Format::pack_b(to, k0, 0, x, own.size(), blocks_.size(block));
          }
          return in_range;
        });
  }

  bool run_chunk(size_t c) {
    const auto run_thread = [&](Team& team) {
      for (size_t k = chunks_[c].last; k-- > chunks_[c].first;) {
        team.for_each_slot([&](int64_t index) { return step(c, k, slot_of(index)); });
        team.barrier();
      }
    };
    return parallel_region(grid_.slots(), run_thread, grid_.columns);
  }

  Slot slot_of(int64_t index) const {
    return {plan_.part_of(index), dh_.mutable_data_ptr<float>() + index * dh_.size(1)};
  }

  bool step(size_t c, size_t k, const Slot& slot) const {
    const Range rows = plan_.rows_of_step(k, slot.group);
    if (rows.size() == 0) return true;
    const Range continued = intersect(rows, {0, carried_into_next(k)});
    if (grid_.needs_barrier() && continued.size() > 0) {
      prefetch_rows(dz_operand(c, k + 1), continued, k_);
    }
    bool in_range = true;
    for (int64_t block = slot.blocks.begin; block < slot.blocks.end; ++block) {
      in_range &= step_block(c, k, slot, block);
    }
    return in_range;
  }

  bool step_block(size_t c, size_t k, const Slot& slot, int64_t block) const {
    const Range rows = plan_.rows_of_step(k, slot.group);
    const int64_t carried = carried_into_next(k);
    const Range continued = intersect(rows, {0, carried});
    const Range ended = intersect(rows, {carried, steps_[k].rows});
    const auto w = as_const(block_of_weights(block));
    bool in_range = true;
    if (continued.size() > 0) {
      const auto dz_next = dz_operand(c, k + 1).from(continued.begin);
      if (cell_.h.count() > 0) {
        Format::gemm(continued.size(), dz_next, w, {slot.dh, w.n}, /*accumulate=*/false);
      } else {
        std::fill_n(slot.dh, continued.size() * w.n, 0.0f);
      }
      const Matrix<float> dh = {slot.dh, w.n};
      const auto factor = read<float>(recurrent_mask_);
      multiply(dh, factor.from(continued.begin, blocks_.begin(block)), continued.size(), block);
      fill_rows(resets_.of(k + 1, continued), dh.from(-continued.begin), w.n, 0);
      in_range &= finish_rows(c, k, continued, block, as_const(dh));
    }
    if (ended.size() > 0) {
      const auto dh_n = read<float>(dh_n_).from(ended.begin, blocks_.begin(block));
      in_range &= finish_rows(c, k, ended, block, dh_n);
    }
    return in_range;
  }

  void multiply(Matrix<float> dh, Matrix<const float> factor, int64_t rows, int64_t block) const {
    if (factor.data == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < blocks_.size(block); ++j) dh.row(r)[j] *= factor.row(r)[j];
    }
  }

  bool finish_rows(
      size_t c, size_t k, Range rows, int64_t block, Matrix<const float> dh_state) const {
    const int64_t unit = blocks_.begin(block);
    BackwardArgs<T, Operand> part = kernel_args_;
    part.hidden = blocks_.size(block);
    part.activations = part.activations.from(steps_[k].offset + rows.begin, unit);
    part.parameters = part.parameters.from(0, unit);
    part.grad_h = grad_output_.of(steps_[k].offset).from(rows.begin, unit);
    part.grad_h_state = dh_state;
    part.grad_c = part.grad_c.from(rows.begin, unit);
    part.grad_c_prev = part.grad_c_prev.from(rows.begin, unit);
    part.grad_gates = dz_of(c, k).from(rows.begin, unit);
    bool out_of_range = false;
    if (!kDzIsOperand) {
      part.operand = packed_dz(k).from(rows.begin, unit);
      part.out_of_range = &out_of_range;
    }
    elementwise<T, Operand>(cell_).backward(part, 0, rows.size() * part.hidden);
    clear_grad_c(
        cell_, resets_.of(k, rows), kernel_args_.grad_c_prev, hidden_, blocks_.range(block));
    return !out_of_range;
  }

  PackedB<typename Format::Operand> block_of_weights(int64_t block) const {
    const int64_t n = Format::padded_n(blocks_.size(block));
    auto* const data = static_cast<Operand*>(packed_weights_.data_ptr());
    return {data + blocks_.begin(block) * k_, k_, n, n};
  }

  const Tensor& dz_tensor(size_t chunk) const { return dz_[kDzIsOperand ? chunk % 2 : 0]; }
  // For step k in chunk c, or the first step after the chunk.
  Matrix<Source> dz_of(size_t c, size_t k) const {
    const size_t owner = k < chunks_[c].last ? c : c + 1;
    return write<Source>(dz_tensor(owner)).from(steps_[k].offset - chunks_[owner].begin);
  }

  Matrix<const Operand> dz_operand(size_t c, size_t k) const {
    if (!kDzIsOperand) return as_const(packed_dz(k).from(0, cell_.h.begin * slot_pitch_));
    return Format::in_place(as_const(dz_of(c, k).from(0, cell_.h.begin * hidden_)));
  }

  Matrix<Operand> packed_dz(size_t k) const {
    return packed_dz_.rows.from(static_cast<int64_t>(k % 2) * batch_);
  }

  int64_t carried_into_next(size_t k) const {
    return k + 1 < steps_.size() ? carried_rows(steps_, k + 1) : 0;
  }

  const SequenceBackwardArgs& args_;
  const CellInfo& cell_;
  const int64_t batch_, hidden_;
  // Columns between pre-activations in dz, and the recurrent GEMM's K.
  const int64_t slot_pitch_, k_;
  const Grid grid_;
  const Blocks blocks_;
  const std::vector<Step> steps_;
  const Plan plan_;
  const Resets resets_;
  const std::vector<Chunk> chunks_;
  const Weights weights_;
  SequenceGradients gradients_;

  Tensor packed_weights_, parameters_, dh_n_, dc_, dh_, recurrent_mask_;
  // dz of the current and the next chunk, whose first dz a chunk's last step multiplies.
  std::array<Tensor, 2> dz_;
  OperandA<Format> packed_dz_;  // two steps alternate; unused if dz is the operand
  StepRows<T> grad_output_;
  BackwardArgs<T, Operand> kernel_args_;
};

}  // namespace

std::optional<Gradients> blocked_backward(
    const SequenceBackwardArgs& args, const BackwardSchedule& schedule) {
  return visit_dtype_and_format(
      args.input->scalar_type(), schedule.format, [&]<typename T, typename Format>(T, Format) {
        return BlockedBackward<T, Format>(args, schedule).run();
      });
}

}  // namespace lltm::cpu
