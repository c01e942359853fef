// A single step, backward: by blocks with the GEMM kernels, otherwise by the per-step engine.
#include "cpu/engine/engine.h"
#include "cpu/engine/one_step.h"
#include "cpu/gemm/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Undefined if not required, except dz (B, (S + P) * H) and dc. d_bias is dz summed over the batch.
// All except the weight gradients have the compute dtype.
struct StepGradients {
  Tensor dz, dc, d_input, d_h;
  WeightGradients weights;
  Tensor d_bias;
};

template <typename T>
using ElementwiseBackward = BackwardArgs<T, compute_t<T>>;

// For each block: the element-wise part, then its rows in the weight gradients, dz^T X, while dz is
// in the cache. Input and state gradients, which need all of dz, are last.
template <typename T, typename Format>
class BlockedStepBackward {
 public:
  BlockedStepBackward(
      const ElementwiseBackward<T>& step,
      const SequenceBackwardArgs& args,
      const StepGradients& results,
      const StepSchedule& schedule)
      : step_(step),
        results_(results),
        cell_(*args.cell),
        weights_(read_weights<T>(args.weight_ih, args.weight_hh, args.h_0->size(1))),
        batch_(args.h_0->size(0)),
        hidden_(args.h_0->size(1)),
        blocks_(schedule.blocks),
        threads_(schedule.threads),
        chunks_(batch_, kStepChunkRows),
        dz_(write<float>(results.dz)) {
    if constexpr (std::is_same_v<Element, float>) {
      dz_operand_.rows = dz_;
    } else {
      // Begins at the first pre-activation that depends on h; K is padded.
      const int64_t before = cell_.h.begin * hidden_;
      const int64_t k = before + Format::padded_k((cell_.grad_columns() - cell_.h.begin) * hidden_);
      dz_operand_ = allocate_a<Format>(batch_, k);
      if (k > cell_.grad_columns() * hidden_) dz_operand_.clear();
    }
    const WeightGradients& weights = results.weights;
    add_weight_gemm(args.h_0, weights.write_hh<T>(), cell_.h, cell_.h_blocks);
    add_weight_gemm(args.input, weights.write_ih<T>(hidden_), cell_.x, cell_.x_blocks);
  }

  void run() {
    const Tensor buffers = at::empty({blocks_.count, buffer_size()}, results_.dz.options());
    for_each_block(blocks_, threads_, [&](int64_t block) {
      compute(block, buffers.mutable_data_ptr<float>() + block * buffer_size());
    });
    multiply_by_weights();
  }

 private:
  using Element = typename Format::Element;
  using B = typename Format::B;
  struct WeightGemm {
    Tensor tensor;
    Matrix<T> out;
    SlotRange slots;
    const int* blocks;
    std::vector<PackedB<const B>> parts = {};
    std::vector<Tensor> memory = {};
  };

  void add_weight_gemm(const Tensor& x, Matrix<T> gradient, SlotRange slots, const int* blocks) {
    if (gradient.data == nullptr) return;
    WeightGemm gemm = {x.contiguous(), gradient, slots, blocks};
    gemm.memory.resize(chunks_.count);
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      const auto rows = read<T>(gemm.tensor).from(chunks_.begin(chunk));
      gemm.parts.push_back(as_b(rows, chunks_.size(chunk), x.size(1), gemm.memory[chunk]));
    }
    weight_gemms_.push_back(std::move(gemm));
  }

  // x (k, n) in place, or packed into `memory`.
  static PackedB<const B> as_b(Matrix<const T> x, int64_t k, int64_t n, Tensor& memory) {
    if constexpr (Format::kBInPlace) {
      return {x.data, k, n, x.row_stride};
    } else {
      const int64_t padded_k = Format::padded_k(k);
      const int64_t size = padded_k * n;
      if (!memory.defined() || memory.numel() < size) memory = at::empty({size}, kDtype<B>);
      const PackedB<B> b = {static_cast<B*>(memory.mutable_data_ptr()), padded_k, n, n};
      Format::pack_b(b, 0, 0, x, k, n);
      return as_const(b);
    }
  }

  static constexpr bool kNarrows = !std::is_same_v<T, float>;
  static Matrix<float> sums_of(Matrix<T> out, Matrix<float> tile) {
    if constexpr (kNarrows) {
      return tile;
    } else {
      return out;
    }
  }

  // In floats: a tile, and dz^T for a block and a row chunk.
  int64_t tile_size() const { return kNarrows ? blocks_.width * kStepWeightColumns : 0; }
  int64_t chunk_size() const {
    return blocks_.width * Format::padded_k(std::min(batch_, chunks_.width));
  }
  int64_t buffer_size() const { return tile_size() + chunk_size() * chunks_.count; }

  void compute(int64_t block, float* buffer) const {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    ElementwiseBackward<T> of_block = step_;
    of_block.hidden = width;
    of_block.saved = of_block.saved.from(0, unit);
    of_block.parameters = of_block.parameters.from(0, unit);
    of_block.grad_h = of_block.grad_h.from(0, unit);
    of_block.grad_c = of_block.grad_c.from(0, unit);
    of_block.dz = of_block.dz.from(0, unit);
    of_block.grad_c_prev = of_block.grad_c_prev.from(0, unit);
    elementwise<T, float>(cell_).backward(of_block, 0, batch_ * width);
    for (int slot = 0; slot < cell_.grad_columns(); ++slot) {
      const int64_t column = slot * hidden_ + unit;
      const auto dz = as_const(dz_.from(0, column));
      if (results_.d_bias.defined()) {
        float* const d_bias = results_.d_bias.mutable_data_ptr<float>() + column;
        kernels().sum_rows_f32(batch_, width, dz, d_bias);
      }
      if constexpr (!std::is_same_v<Element, float>) {
        const auto rows = dz_operand_.rows.from(0, column);
        for (int64_t r = 0; r < batch_; ++r) narrow(dz.row(r), rows.row(r), width);
      }
      if (!weight_gemms_.empty()) weight_gradient(slot, unit, width, buffer);
    }
  }

  void weight_gradient(int slot, int64_t unit, int64_t width, float* tile) const {
    const int64_t column = slot * hidden_ + unit;
    auto* const memory = reinterpret_cast<Element*>(tile + tile_size());
    const auto dz_transposed = [&](int64_t chunk) {
      const int64_t stride = Format::padded_k(chunks_.size(chunk));
      return Matrix<Element>{memory + chunk * chunk_size(), stride};
    };
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      const auto dz = as_const(dz_operand_.rows.from(chunks_.begin(chunk), column));
      const auto to = dz_transposed(chunk);
      Format::pack_a_transposed(width, chunks_.size(chunk), to.row_stride, dz, to);
    }
    for (const WeightGemm& gemm : weight_gemms_) {
      if (!gemm.slots.contains(slot)) continue;
      const int64_t columns = gemm.tensor.size(1);
      for (int64_t n = 0; n < columns; n += kStepWeightColumns) {
        const int64_t size = std::min(kStepWeightColumns, columns - n);
        const auto out = gemm.out.from(gemm.blocks[slot] * hidden_ + unit, n);
        const Matrix<float> c = sums_of(out, {tile, size});
        for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
          PackedB<const B> x = gemm.parts[chunk];
          x.data += n * Format::kVnniFactor;
          x.n = size;
          Format::gemm(width, as_const(dz_transposed(chunk)), x, c, chunk > 0);
        }
        if constexpr (kNarrows) {
          for (int64_t r = 0; r < width; ++r) narrow(c.row(r), out.row(r), size);
        }
      }
    }
  }

  struct Tile {
    Matrix<const T> weights;
    Matrix<float> out;
    SlotRange slots;
    const int* blocks;
    Range columns;
  };

  void multiply_by_weights() const {
    std::vector<Tile> tiles;
    const auto add =
        [&](const Tensor& out, Matrix<const T> weights, SlotRange slots, const int* blocks) {
          if (!out.defined()) return;
          if (slots.count() == 0) out.zero_();
          for (int64_t n = 0; n < out.size(1); n += kStepColumns) {
            const Range columns = {n, std::min(n + kStepColumns, out.size(1))};
            tiles.push_back({weights, write<float>(out), slots, blocks, columns});
          }
        };
    add(results_.d_h, weights_.hh, cell_.h, cell_.h_blocks);
    add(results_.d_input, weights_.ih, cell_.x, cell_.x_blocks);
    parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t first, int64_t last) {
      Tensor memory;
      for (int64_t t = first; t < last; ++t) multiply_tile(tiles[t], memory);
    });
  }

  void multiply_tile(const Tile& tile, Tensor& memory) const {
    const auto [begin, end] = tile.columns;
    for_each_run(tile.slots, tile.blocks, [&, begin = begin, end = end](int slot, int count) {
      const auto rows = tile.weights.from(tile.blocks[slot] * hidden_, begin);
      const auto b = as_b(rows, count * hidden_, end - begin, memory);
      const auto a = as_const(dz_operand_.rows.from(0, slot * hidden_));
      Format::gemm(batch_, a, b, tile.out.from(0, begin), /*accumulate=*/slot > tile.slots.begin);
    });
  }

  const ElementwiseBackward<T>& step_;
  const StepGradients& results_;
  const CellInfo& cell_;
  const WeightMatrices<T> weights_;
  const int64_t batch_, hidden_;
  const Partition blocks_;
  const int64_t threads_;
  const Partition chunks_;
  const Matrix<float> dz_;
  OperandA<Format> dz_operand_;
  std::vector<WeightGemm> weight_gemms_;
};

StepGradients allocate_gradients(const SequenceBackwardArgs& args) {
  const auto options = args.input->options().dtype(compute_dtype(args.input->scalar_type()));
  const auto [want_input, want_h, want_c, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  const auto if_wanted = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? at::empty(sizes, options) : Tensor();
  };
  const int64_t batch = args.h_0->size(0);
  const int64_t hidden = args.h_0->size(1);
  const int64_t columns = args.cell->grad_columns() * hidden;
  return {
      at::empty({batch, columns}, options),
      at::empty({batch, args.cell->state_columns() * hidden}, options),
      if_wanted(want_input, args.input->sizes()),
      if_wanted(want_h, args.h_0->sizes()),
      WeightGradients(args, args.input->options()),
      if_wanted(want_bias_ih || want_bias_hh, {columns})};
}

// `args` are entered, with gradients of h_n and c_n only.
Gradients run_step(const SequenceBackwardArgs& args, const StepSchedule& schedule) {
  const at::ScalarType dtype = args.input->scalar_type();
  const StepGradients results = allocate_gradients(args);
  const Tensor grad_c =
      args.grad_c_n.defined() ? args.grad_c_n->to(compute_dtype(dtype)) : Tensor();
  const Tensor parameters = cell_parameters(*args.cell, args.bias_ih);
  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    ElementwiseBackward<T> step;
    step.cell = &*args.cell;
    step.hidden = step.layer_hidden = args.h_0->size(1);
    step.saved = read<T>(args.saved);
    step.parameters = read_row<C>(parameters);
    step.grad_h = read<T>(args.grad_h_n);
    step.grad_c = read<C>(grad_c);
    step.dz = write<C>(results.dz);
    step.grad_c_prev = write<C>(results.dc);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (schedule.backward_format == GemmFormat::kBf16) {
        return BlockedStepBackward<T, Bf16Format>(step, args, results, schedule).run();
      }
    }
    if constexpr (kHasGemm<T>) {
      BlockedStepBackward<T, F32InPlaceFormat<T>>(step, args, results, schedule).run();
    }
  });
  const auto [bias_ih, bias_hh] =
      bias_gradients(results.d_bias, *args.cell, args.output_mask[5], args.output_mask[6]);
  return {
      results.d_input,
      results.d_h,
      args.output_mask[2] ? results.dc : Tensor(),
      results.weights.weight_ih,
      results.weights.weight_hh,
      bias_ih,
      bias_hh};
}

}  // namespace

Gradients one_step_backward(const SequenceBackwardArgs& args) {
  const StepSchedule schedule = schedule_of(args);
  if (schedule.backward != StepGemm::kBlocked) return per_step_backward(args);
  if (args.is_step() && changes_states(args) == nullptr) return run_step(args, schedule);
  const StepIO io = io_of_only_step(args);
  SequenceBackwardArgs step = {entered(args, io), args.output, args.saved};
  step.grad_h_n = args.grad_h_n;
  step.grad_c_n = args.grad_c_n;
  step.output_mask = args.output_mask;
  if (args.grad_output.defined()) {
    const Tensor of_output = flat_rows(args.grad_output);
    step.grad_h_n = args.grad_h_n.defined() ? at::add(of_output, args.grad_h_n) : of_output;
  }
  if (args.grad_states.defined()) {
    const Tensor grad_c = copy_or_zeros(args.grad_c_n, args.c_0->sizes(), args.c_0->options());
    step.grad_c_n = io.leave_backward(grad_c, flat_rows(args.grad_states));
  }
  Gradients gradients = run_step(step, schedule);
  auto& [d_input, d_h, d_c, d_weight_ih, d_weight_hh, d_bias_ih, d_bias_hh] = gradients;
  if (d_input.defined()) d_input = d_input.view(args.input->sizes());
  if (d_h.defined()) d_h = io.enter_h(d_h);
  if (d_c.defined()) d_c = io.enter_backward_c(d_c);
  return gradients;
}

}  // namespace lltm::cpu
