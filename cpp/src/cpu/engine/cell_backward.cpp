// One step on the CPU, backward, with weights, input and state read as they lie or, in bfloat16,
// packed: block by block by the GEMM kernels, or by ATen's GEMMs.
#include "cell/cell.h"
#include "cpu/engine/cell.h"
#include "cpu/engine/engine.h"
#include "cpu/gemm/gemm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// What is not wanted is undefined; all but d_weights are of the compute dtype, dz (B, G * H) and
// dc (B, H) among them.
struct StepGradients {
  Tensor dz, dc, d_input, d_h, d_weights, d_bias;
};

template <typename T>
using StepBackwardArgs = BackwardArgs<T, compute_t<T>>;

template <typename T>
void backward_by_aten(
    const StepBackwardArgs<T>& step, const CellBackwardArgs& args, const StepGradients& results) {
  parallel_for(args.h.numel(), kElementwiseGrain, [&](int64_t begin, int64_t end) {
    elementwise<T, compute_t<T>>().backward(step, begin, end);
  });
  const Linear linear(args.weights, Tensor());
  if (results.d_input.defined()) linear.input_gradient(results.d_input, results.dz);
  if (results.d_h.defined()) linear.state_gradient(results.d_h, results.dz);
  if (results.d_weights.defined()) {
    weights_gradient(results.d_weights, results.dz, args.h, args.input);
  }
  if (results.d_bias.defined()) results.d_bias.copy_(results.dz.sum(0));
}

// Each block of hidden units: the element-wise part, then its rows of the weight gradient,
// dz^T X, while dz is in the cache. The gradients of input and state need dz of all units, so
// they come after that.
template <typename T, typename Format>
class BlockedStepBackward {
 public:
  BlockedStepBackward(
      const StepBackwardArgs<T>& step,
      const CellBackwardArgs& args,
      const StepGradients& results,
      const CellSchedule& schedule)
      : step_(step),
        results_(results),
        weights_(args.weights),
        batch_(args.h.size(0)),
        hidden_(args.h.size(1)),
        blocks_(hidden_, schedule.block_width),
        threads_(schedule.threads),
        chunks_(batch_, kCellChunkRows),
        dz_(write<float>(results.dz)),
        d_weights_(write<T>(results.d_weights)) {
    if constexpr (std::is_same_v<Operand, float>) {
      dz_operand_.rows = dz_;
    } else {
      dz_operand_ = allocate_a<Format>(batch_, Cell::kGates * hidden_, results.dz.options());
    }
    if (d_weights_.data == nullptr) return;
    sources_[0] = {args.h.contiguous(), 0};
    sources_[1] = {args.input.contiguous(), hidden_};
    for (auto& [tensor, column, parts, memory] : sources_) {
      memory.resize(chunks_.count);
      for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
        const auto rows = read<T>(tensor).from(chunks_.begin(chunk));
        parts.push_back(as_b(rows, chunks_.size(chunk), tensor.size(1), memory[chunk]));
      }
    }
  }

  void run() {
    const Tensor buffers = at::empty({blocks_.count, buffer_size()}, results_.dz.options());
    for_each_block(blocks_, threads_, [&](int64_t block) {
      compute(block, buffers.mutable_data_ptr<float>() + block * buffer_size());
    });
    multiply_by_weights();
  }

 private:
  using Operand = typename Format::Operand;
  using B = typename Format::B;
  // h or the input: X of some columns of the weights, in chunks of rows.
  struct Source {
    Tensor tensor;
    int64_t column = 0;
    std::vector<PackedB<const B>> parts = {};
    std::vector<Tensor> memory = {};
  };

  // x (k, n) as B: as it lies, or packed into `memory`.
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
  // Where a tile of the gradient of the weights is accumulated.
  static Matrix<float> sums_of(Matrix<T> out, Matrix<float> tile) {
    if constexpr (kNarrows) {
      return tile;
    } else {
      return out;
    }
  }

  // In floats: such a tile, and dz^T of a block and of a chunk of rows.
  int64_t tile_size() const { return kNarrows ? blocks_.width * kCellWeightColumns : 0; }
  int64_t chunk_size() const {
    return blocks_.width * Format::padded_k(std::min(batch_, chunks_.width));
  }
  int64_t buffer_size() const { return tile_size() + chunk_size() * chunks_.count; }

  void compute(int64_t block, float* buffer) const {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    StepBackwardArgs<T> part = step_;
    part.hidden = width;
    part.activations = part.activations.from(0, unit);
    part.grad_h = part.grad_h.from(0, unit);
    part.grad_c = part.grad_c.from(0, unit);
    part.grad_gates = part.grad_gates.from(0, unit);
    part.grad_c_prev = part.grad_c_prev.from(0, unit);
    elementwise<T, float>().backward(part, 0, batch_ * width);
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      const int64_t column = gate * hidden_ + unit;
      const auto dz = as_const(dz_.from(0, column));
      if (results_.d_bias.defined()) {
        float* const d_bias = results_.d_bias.mutable_data_ptr<float>() + column;
        kernels().sum_rows_f32(batch_, width, dz, d_bias);
      }
      if constexpr (!std::is_same_v<Operand, float>) {
        const auto rows = dz_operand_.rows.from(0, column);
        for (int64_t r = 0; r < batch_; ++r) narrow(dz.row(r), rows.row(r), width);
      }
      if (d_weights_.data != nullptr) weight_gradient(column, width, buffer);
    }
  }

  // Rows [column, column + width) of the gradient of the weights, dz^T [h, x].
  void weight_gradient(int64_t column, int64_t width, float* tile) const {
    auto* const memory = reinterpret_cast<Operand*>(tile + tile_size());
    const auto dz_transposed = [&](int64_t chunk) {
      const int64_t stride = Format::padded_k(chunks_.size(chunk));
      return Matrix<Operand>{memory + chunk * chunk_size(), stride};
    };
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      const auto dz = as_const(dz_operand_.rows.from(chunks_.begin(chunk), column));
      const auto to = dz_transposed(chunk);
      Format::pack_a_transposed(width, chunks_.size(chunk), to.row_stride, dz, to);
    }
    for (const Source& source : sources_) {
      const int64_t columns = source.tensor.size(1);
      for (int64_t n = 0; n < columns; n += kCellWeightColumns) {
        const int64_t size = std::min(kCellWeightColumns, columns - n);
        const auto out = d_weights_.from(column, source.column + n);
        const Matrix<float> c = sums_of(out, {tile, size});
        for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
          PackedB<const B> x = source.parts[chunk];
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

  // dX = dz W, in tiles of columns of h or of the input.
  void multiply_by_weights() const {
    const int64_t k = Cell::kGates * hidden_;
    const auto w = read<T>(weights_);
    const auto d_h = write<float>(results_.d_h);
    const auto d_input = write<float>(results_.d_input);
    const int64_t begin = d_h.data != nullptr ? 0 : hidden_;
    const int64_t end = d_input.data != nullptr ? weights_.size(1) : hidden_;
    std::vector<Range> tiles;
    for (int64_t n = begin; n < end; n = tiles.back().end) {
      tiles.push_back({n, std::min(n + kCellColumns, n < hidden_ ? hidden_ : end)});
    }
    const auto count = static_cast<int64_t>(tiles.size());
    parallel_for(count, 1, [&](int64_t first, int64_t last) {
      Tensor memory;
      for (int64_t t = first; t < last; ++t) {
        const int64_t n = tiles[t].begin;
        const auto out = n < hidden_ ? d_h.from(0, n) : d_input.from(0, n - hidden_);
        const auto b = as_b(w.from(0, n), k, tiles[t].size(), memory);
        Format::gemm(batch_, as_const(dz_operand_.rows), b, out, /*accumulate=*/false);
      }
    });
  }

  const StepBackwardArgs<T>& step_;
  const StepGradients& results_;
  const Tensor& weights_;
  const int64_t batch_, hidden_;
  const Blocks blocks_;
  const int64_t threads_;
  const Blocks chunks_;  // of rows
  const Matrix<float> dz_;
  const Matrix<T> d_weights_;
  OperandA<Format> dz_operand_;
  Source sources_[2];
};

StepGradients allocate_gradients(const CellBackwardArgs& args, at::ScalarType weights_dtype) {
  const auto options = args.input.options().dtype(compute_dtype(args.input.scalar_type()));
  const auto [want_input, want_h, want_c, want_weights, want_bias] = args.output_mask;
  const auto if_wanted = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? at::empty(sizes, options) : Tensor();
  };
  const int64_t batch = args.h.size(0);
  const int64_t columns = Cell::kGates * args.h.size(1);
  return {
      at::empty({batch, columns}, options),
      at::empty(args.h.sizes(), options),
      if_wanted(want_input, args.input.sizes()),
      if_wanted(want_h, args.h.sizes()),
      want_weights ? at::empty(args.weights.sizes(), options.dtype(weights_dtype)) : Tensor(),
      if_wanted(want_bias, {columns})};
}

}  // namespace

Gradients cell_backward(const CellBackwardArgs& args) {
  const at::ScalarType dtype = args.input.scalar_type();
  const CellSchedule schedule = schedule_of(args.input, args.h, args.weights);
  const bool blocked = schedule.backward == CellGemm::kBlocked;
  const StepGradients results = allocate_gradients(args, blocked ? dtype : compute_dtype(dtype));
  const Tensor grad_c = args.grad_c.defined() ? args.grad_c->to(compute_dtype(dtype)) : Tensor();
  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    StepBackwardArgs<T> step;
    step.hidden = args.h.size(1);
    step.activations = read<T>(args.activations);
    step.activations_step = step.hidden;
    step.grad_h = read<T>(args.grad_h);
    step.grad_c = read<C>(grad_c);
    step.grad_gates = write<C>(results.dz);
    step.grad_gates_step = step.hidden;
    step.grad_c_prev = write<C>(results.dc);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (blocked && schedule.backward_format == GemmFormat::kBf16) {
        return BlockedStepBackward<T, Bf16Format>(step, args, results, schedule).run();
      }
    }
    if constexpr (kHasGemm<T>) {
      if (blocked) {
        return BlockedStepBackward<T, F32InPlaceFormat<T>>(step, args, results, schedule).run();
      }
    }
    backward_by_aten<T>(step, args, results);
  });
  const auto result = [&](const Tensor& tensor) {
    return tensor.defined() ? tensor.to(dtype) : Tensor();
  };
  return {
      result(results.d_input),
      result(results.d_h),
      args.output_mask[2] ? results.dc.to(dtype) : Tensor(),
      result(results.d_weights),
      result(results.d_bias)};
}

}  // namespace lltm::cpu
