// A single step, forward, without packing weights: by a GEMM kernel or, for few rows, dot products;
// otherwise by the per-step engine.
#include "common/schedule_log.h"
#include "common/tensor_views.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/one_step.h"
#include "cpu/gemm/gemm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <type_traits>

namespace lltm::cpu {
namespace {

using at::Tensor;

template <typename T>
using ElementwiseForward = ForwardArgs<T, compute_t<T>>;

// `width` units from `unit` on and `rows` rows from `first` on.
template <typename T>
void finish_block(
    const CellInfo& cell,
    ForwardArgs<T, float> of_block,
    const Tensor& bias,
    Matrix<const float> z,
    int64_t first,
    int64_t rows,
    int64_t unit,
    int64_t width) {
  of_block.hidden = width;
  of_block.z = z;
  of_block.z_stride = width;
  of_block.bias = read_row<float>(bias).from(0, unit);
  of_block.parameters = of_block.parameters.from(0, unit);
  of_block.c = of_block.c.from(first, unit);
  of_block.c_next = of_block.c_next.from(first, unit);
  of_block.h_next = of_block.h_next.from(first, unit);
  of_block.saved = of_block.saved.from(first, unit);
  elementwise<T, float>(cell).forward(of_block, 0, rows * width);
}

// Used for few rows: reading the weights dominates.
template <typename T>
void step_by_products(
    const ElementwiseForward<T>& step, const SequenceArgs& args, const StepSchedule& schedule) {
  const int64_t batch = args.h_0->size(0);
  const int64_t hidden = args.h_0->size(1);
  const auto as_floats = [](const Tensor& rows) {
    return with_contiguous_rows(converted(rows, at::kFloat));
  };
  const Tensor h = as_floats(args.h_0), x = as_floats(args.input);
  const Tensor bias = slot_bias(args, hidden);
  const Partition& blocks = schedule.blocks;
  const int64_t columns = args.cell->slots * blocks.width;
  const Workspace<float> z(blocks.count * batch * columns);
  const WeightsInPlace<T> weights = {
      *args.cell,
      read_weights<T>(args.weight_ih, args.weight_hh, hidden),
      hidden,
      args.input->size(1)};
  for_each_block(blocks, schedule.threads, [&](int64_t block) {
    const int64_t unit = blocks.begin(block);
    const int64_t width = blocks.size(block);
    const Matrix<float> gates = {z.data() + block * batch * columns, columns};
    weights.multiply(batch, read<float>(x), read<float>(h), unit, width, gates);
    finish_block<T>(*args.cell, step, bias, as_const(gates), 0, batch, unit, width);
  });
}

// z^T = W X^T: the weights are A, in place or widened in the cache. Only the small X is packed, for
// up to kStepRows batch rows per pass.
template <typename T, typename Format>
class BlockedStep {
  using Element = typename Format::Element;

 public:
  BlockedStep(
      const ElementwiseForward<T>& step, const SequenceArgs& args, const StepSchedule& schedule)
      : step_(step),
        args_(args),
        cell_(*args.cell),
        hidden_(args.h_0->size(1)),
        k_(hidden_ + args.input->size(1)),
        weights_(read_weights<T>(args.weight_ih, args.weight_hh, hidden_)),
        columns_(std::min(round_up(args.h_0->size(0), kVector), kStepRows)),
        blocks_(schedule.blocks),
        threads_(schedule.threads),
        bias_(slot_bias(args, hidden_)),
        h_0_(converted(args.h_0, kDtype<Element>)),
        input_(converted(args.input, kDtype<Element>)),
        x_size_(k_ * columns_ * static_cast<int64_t>(sizeof(Element)) / 4) {
    buffer_ = at::empty(
        {x_size_ + 2 * blocks_.count * z_size()}, args.input->options().dtype(at::kFloat));
    floats_ = buffer_.mutable_data_ptr<float>();
  }

  void run() {
    const int64_t batch = args_.h_0->size(0);
    for (int64_t first = 0; first < batch; first += columns_) {
      const int64_t rows = std::min(columns_, batch - first);
      pack(first, rows);
      for_each_block(blocks_, threads_, [&](int64_t block) { compute(block, first, rows); });
    }
  }

 private:
  static constexpr int64_t kVector = 16;  // alignment of z^T rows

  int64_t z_size() const { return cell_.slots * blocks_.width * columns_; }
  PackedB<Element> x_transposed() const { return rows_of_x(0, k_); }
  PackedB<Element> rows_of_x(int64_t k, int64_t count) const {
    return {reinterpret_cast<Element*>(floats_) + k * columns_, count, columns_, columns_};
  }

  void pack(int64_t first, int64_t rows) {
    if (rows < columns_) std::fill_n(floats_, x_size_, 0.0f);
    const auto b = x_transposed();
    Format::pack_b_transposed(b, 0, 0, read<Element>(h_0_).from(first), hidden_, rows);
    Format::pack_b_transposed(b, hidden_, 0, read<Element>(input_).from(first), k_ - hidden_, rows);
  }

  void compute(int64_t block, int64_t first, int64_t rows) {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    float* const z_transposed = floats_ + x_size_ + 2 * block * z_size();
    float* const z = z_transposed + z_size();
    for (int slot = 0; slot < cell_.slots; ++slot) {
      multiply(slot, unit, width, {z_transposed + slot * width * columns_, columns_});
    }
    const int64_t z_columns = cell_.slots * width;
    kernels().transpose_f32(z_columns, columns_, {z_transposed, columns_}, {z, z_columns});
    finish_block<T>(cell_, step_, bias_, {z, z_columns}, first, rows, unit, width);
  }

  void multiply(int slot, int64_t unit, int64_t width, Matrix<float> out) const {
    const bool x = cell_.x.contains(slot), h = cell_.h.contains(slot);
    const auto rows = [&](Matrix<const T> w, const int* blocks) {
      return w.from(blocks[slot] * hidden_ + unit);
    };
    if (x && h && !args_.weight_hh.defined()) {  // concatenated weight matrix
      const auto w = rows(weights_.hh, cell_.h_blocks);
      multiply(width, w, k_, x_transposed(), out, /*accumulate=*/false);
      return;
    }
    if (x) {
      const auto b = rows_of_x(hidden_, k_ - hidden_);
      const auto w = rows(weights_.ih, cell_.x_blocks);
      multiply(width, w, k_ - hidden_, b, out, /*accumulate=*/false);
    }
    if (h) {
      const auto w = rows(weights_.hh, cell_.h_blocks);
      multiply(width, w, hidden_, rows_of_x(0, hidden_), out, /*accumulate=*/x);
    }
  }

  static void multiply(
      int64_t width,
      Matrix<const T> w,
      int64_t k,
      PackedB<Element> b,
      Matrix<float> out,
      bool accumulate) {
    pack_widened<Element>(w, width, k, [&](const auto& a, int64_t first, int64_t count) {
      Format::gemm(count, a, as_const(b), out.from(first), accumulate);
      return true;
    });
  }

  const ElementwiseForward<T>& step_;
  const SequenceArgs& args_;
  const CellInfo& cell_;
  const int64_t hidden_, k_;
  const WeightMatrices<T> weights_;
  const int64_t columns_;
  const Partition blocks_;
  const int64_t threads_;
  const Tensor bias_, h_0_, input_;
  const int64_t x_size_;
  Tensor buffer_;
  float* floats_;  // X^T, then z^T and z for each block
};

// `args` are entered.
template <typename T>
void run_step(
    const SequenceArgs& args, const SequenceResult& result, const StepSchedule& schedule) {
  const auto& [output, h_next, c_next, activations] = result;
  const Tensor parameters = cell_parameters(*args.cell, args.bias_ih);
  ElementwiseForward<T> step;
  step.cell = &*args.cell;
  step.layer_hidden = args.h_0->size(1);
  step.parameters = read_row<compute_t<T>>(parameters);
  step.c = read<T>(args.c_0);
  step.h_next = write<T>(h_next);
  step.c_next = write<T>(c_next);
  step.saved = write<T>(activations);
  if constexpr (kHasGemm<T>) {
    if (schedule.forward == StepGemm::kProducts) return step_by_products(step, args, schedule);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (schedule.forward_format == GemmFormat::kBf16) {
        return BlockedStep<T, Bf16Format>(step, args, schedule).run();
      }
    }
    return BlockedStep<T, F32Format>(step, args, schedule).run();
  }
  TORCH_INTERNAL_ASSERT(false, "no kernel for a step's schedule");
}

}  // namespace

SequenceResult one_step_forward(const SequenceArgs& args) {
  const StepSchedule schedule = schedule_of(args);
  if (logs_schedules()) log_schedule(args, to_string(schedule));
  if (schedule.forward == StepGemm::kAten) return per_step_forward(args);
  const CellInfo& cell = *args.cell;
  const bool step = args.is_step();
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const auto options = args.input->options();
  const auto rows = [&](int64_t blocks) { return new_tensor({batch, blocks * hidden}, options); };
  SequenceResult result = {
      Tensor(),
      rows(1),
      rows(cell.state_columns()),
      args.saves_activations() ? rows(cell.saved) : Tensor()};
  visit_dtype(args.input->scalar_type(), [&]<typename T>(T*) {
    if (step && changes_states(args) == nullptr) return run_step<T>(args, result, schedule);
    run_step<T>({entered(args, io_of_only_step(args))}, result, schedule);
  });
  if (!step) {
    const auto& [none, h_next, c_next, saved] = result;
    const Tensor rows_of_output = StepIO(cell).leave(h_next, c_next);
    std::get<0>(result) = (rows_of_output.is_same(h_next) ? h_next.clone() : rows_of_output)
                              .view(output_sizes(args.input, cell.output_columns() * hidden));
  }
  if (args.saves_checkpoints()) {  // only the initial c
    std::get<3>(result) = args.c_0->clone(at::MemoryFormat::Contiguous).unsqueeze(0);
  }
  return result;
}

}  // namespace lltm::cpu
