// One step on the CPU, with the weights read as they lie: by ATen's GEMMs, or block by block by the
// GEMM kernel or, for few rows, by scalar products.
#include "cell.h"
#include "cpu/dispatch.h"
#include "cpu/engine.h"
#include "cpu/gemm.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

template <typename T>
using CellFormat = std::conditional_t<std::is_same_v<T, BFloat16>, Bf16Format, F32Format>;

// Dtypes that the GEMM kernel multiplies without a copy of the weights.
template <typename T>
constexpr bool kIsOperand = std::is_same_v<T, typename CellFormat<T>::Operand>;

// Whether the GEMM kernel reads these weights in place, and input and state in packed form.
template <typename T>
bool can_block(const Tensor& input, const Tensor& h, const Tensor& weights) {
  if constexpr (kIsOperand<T>) {
    using Format = CellFormat<T>;
    constexpr int64_t kVnni = Format::kVnniFactor;
    // Not fits_in_place: K that is not a multiple of a tile costs less than a copy.
    return h.size(1) > 0 && h.size(1) % kVnni == 0 && input.size(1) % kVnni == 0 &&
           weights.stride(1) == 1 && weights.stride(0) == weights.size(1) &&
           weights.stride(0) <= kMaxStride && Format::available();
  } else {
    return false;
  }
}

// ---- forward ----------------------------------------------------------------

template <typename T>
using StepArgs = ForwardArgs<T, compute_t<T>>;

template <typename T>
void step_by_aten(StepArgs<T> step, const CellArgs& args) {
  const Linear linear(args.weights, args.bias);
  const Tensor gates = linear.project_input(args.input);
  linear.add_recurrent(gates, args.h.to(gates.scalar_type()));
  step.hidden = args.h.size(1);
  step.gates = read<compute_t<T>>(gates);
  step.gates_step = step.hidden;
  parallel_for(args.h.numel(), kElementwiseGrain, [&](int64_t begin, int64_t end) {
    elementwise<T, compute_t<T>>().forward(step, begin, end);
  });
}

// z = [h, x] W^T for few rows of float32, where reading the weights is the work.
void step_by_products(
    const StepArgs<float>& step, const CellArgs& args, const CellSchedule& schedule) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const Tensor h = with_contiguous_rows(args.h);
  const Tensor x = with_contiguous_rows(args.input);
  const auto w = read<float>(args.weights);
  const Blocks blocks(hidden, schedule.block_width);
  const int64_t columns = Cell::kGates * blocks.width;
  const int64_t block_size = batch * columns;
  const Workspace<float> z(blocks.count * block_size);
  const int64_t grain = (blocks.count + schedule.threads - 1) / schedule.threads;
  parallel_for(blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t unit = blocks.begin(block);
      const int64_t width = blocks.size(block);
      const Matrix<float> gates = {z.data() + block * block_size, columns};
      for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
        kernels().few_rows.in_place_f32(
            batch,
            {{{read<float>(h), hidden}, {read<float>(x), x.size(1)}},
             width,
             w.from(gate * hidden + unit),
             gates.from(0, gate * width),
             /*accumulate=*/false});
      }
      StepArgs<float> part = step;
      part.hidden = width;
      part.gates = as_const(gates);
      part.gates_step = width;
      part.bias = part.bias.from(0, unit);
      part.c = part.c.from(0, unit);
      part.c_next = part.c_next.from(0, unit);
      part.h_next = part.h_next.from(0, unit);
      part.activations = part.activations.from(0, unit);
      elementwise<float, float>().forward(part, 0, batch * width);
    }
  });
}

// z^T = W X^T: the weights are A in place, and only the small X is packed. Up to kCellRows
// rows of the batch at a time.
template <typename T>
class BlockedStep {
 public:
  BlockedStep(const StepArgs<T>& step, const CellArgs& args, const CellSchedule& schedule)
      : step_(step),
        args_(args),
        hidden_(args.h.size(1)),
        k_(args.weights.size(1)),
        columns_(std::min(round_up(args.h.size(0), kVector), kCellRows)),
        blocks_(hidden_, schedule.block_width),
        grain_((blocks_.count + schedule.threads - 1) / schedule.threads) {
    if (args.bias.defined()) bias_ = args.bias.to(at::kFloat);
    x_size_ = k_ * columns_ * static_cast<int64_t>(sizeof(T)) / 4;
    buffer_ =
        at::empty({x_size_ + 2 * blocks_.count * z_size()}, args.input.options().dtype(at::kFloat));
    floats_ = buffer_.mutable_data_ptr<float>();
  }

  void run() {
    const int64_t batch = args_.h.size(0);
    for (int64_t first = 0; first < batch; first += columns_) {
      const int64_t rows = std::min(columns_, batch - first);
      pack(first, rows);
      parallel_for(blocks_.count, grain_, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) compute(block, first, rows);
        release_micro_kernel();
      });
    }
  }

 private:
  using Format = CellFormat<T>;
  static constexpr int64_t kVector = 16;  // widths of z^T are multiples of it

  int64_t z_size() const { return Cell::kGates * blocks_.width * columns_; }
  PackedB<T> x_transposed() const {
    return {reinterpret_cast<T*>(floats_), k_, columns_, columns_};
  }

  // X^T of some rows of the batch.
  void pack(int64_t first, int64_t rows) {
    if (rows < columns_) std::fill_n(floats_, x_size_, 0.0f);
    const auto b = x_transposed();
    Format::pack_b_transposed(b, 0, 0, read<T>(args_.h).from(first), hidden_, rows);
    Format::pack_b_transposed(b, hidden_, 0, read<T>(args_.input).from(first), k_ - hidden_, rows);
  }

  void compute(int64_t block, int64_t first, int64_t rows) {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    float* const z_transposed = floats_ + x_size_ + 2 * block * z_size();
    float* const z = z_transposed + z_size();
    const auto w = read<T>(args_.weights);
    const auto b = as_const(x_transposed());
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      const Matrix<float> out = {z_transposed + gate * width * columns_, columns_};
      Format::gemm(width, w.from(gate * hidden_ + unit), b, out, /*accumulate=*/false);
    }
    const int64_t z_columns = Cell::kGates * width;
    kernels().transpose_f32(z_columns, columns_, {z_transposed, columns_}, {z, z_columns});
    ForwardArgs<T, float> part = step_;
    part.hidden = width;
    part.gates = {z, z_columns, 1};
    part.gates_step = width;
    part.bias = read_row<float>(bias_).from(0, unit);
    part.bias_step = hidden_;
    part.c = part.c.from(first, unit);
    part.c_next = part.c_next.from(first, unit);
    part.h_next = part.h_next.from(first, unit);
    part.activations = part.activations.from(first, unit);
    elementwise<T, float>().forward(part, 0, rows * width);
  }

  const StepArgs<T>& step_;
  const CellArgs& args_;
  const int64_t hidden_, k_, columns_;
  const Blocks blocks_;
  const int64_t grain_;
  Tensor bias_, buffer_;
  int64_t x_size_;
  float* floats_;  // X^T, and for each block z^T and z
};

// What a step computes, in memory; `activations` may be undefined.
struct StepResults {
  Tensor h_next, c_next, activations;
};

template <typename T>
void run_step(const CellArgs& args, const StepResults& results) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  StepArgs<T> step;
  step.bias_step = hidden;
  step.c = read<T>(args.c);
  step.h_next = write<T>(results.h_next);
  step.c_next = write<T>(results.c_next);
  step.activations = write<T>(results.activations);
  step.activations_step = hidden;
  CellSchedule schedule = schedule_cell(available_threads(), batch, hidden);
  const bool in_place = args.weights.stride(1) == 1 && args.h.numel() > 0;
  schedule.products &= std::is_same_v<T, float> && in_place;
  schedule.blocked_forward &= can_block<T>(args.input, args.h, args.weights);
  schedule.blocked_backward &=
      std::is_same_v<T, float> && can_block<T>(args.input, args.h, args.weights);
  if (logs_schedules()) {
    log_schedule({batch, args.input.size(1), hidden, batch}, to_string(schedule));
  }
  if constexpr (std::is_same_v<T, float>) {
    if (schedule.products) {
      step.bias = read_row<float>(args.bias);
      step_by_products(step, args, schedule);
      return;
    }
  }
  if constexpr (kIsOperand<T>) {
    if (schedule.blocked_forward) {
      BlockedStep<T>(step, args, schedule).run();
      return;
    }
  }
  step_by_aten<T>(step, args);
}

}  // namespace

CellResult cell_forward(const CellArgs& args) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const auto options = args.input.options();
  const StepResults results = {
      new_tensor({batch, hidden}, options),
      new_tensor({batch, hidden}, options),
      args.save ? new_tensor({batch, Cell::kSaved * hidden}, options) : Tensor()};
  visit_dtype(args.input.scalar_type(), [&]<typename T>(T*) { run_step<T>(args, results); });
  return {results.h_next, results.c_next, results.activations};
}

// ---- backward ---------------------------------------------------------------

namespace {

// What is not wanted is undefined; dz (B, G * H) and dc (B, H) are of the compute dtype, the
// others of the dtype of the GEMMs.
struct StepGradients {
  Tensor dz, dc, d_input, d_h, d_weights, d_bias;
};

template <typename T>
using StepBackwardArgs = BackwardArgs<T, compute_t<T>>;

template <typename T>
void backward_by_aten(
    const StepBackwardArgs<T>& step,
    const CellBackwardArgs& args,
    const StepGradients& results,
    at::ScalarType gemm_dtype) {
  parallel_for(args.h.numel(), kElementwiseGrain, [&](int64_t begin, int64_t end) {
    elementwise<T, compute_t<T>>().backward(step, begin, end);
  });
  const Tensor dz = results.dz.to(gemm_dtype);
  const Linear linear(args.weights, Tensor(), gemm_dtype);
  if (results.d_input.defined()) linear.input_gradient(results.d_input, dz);
  if (results.d_h.defined()) linear.state_gradient(results.d_h, dz);
  if (results.d_weights.defined()) weights_gradient(results.d_weights, dz, args.h, args.input);
  if (results.d_bias.defined()) results.d_bias.copy_(results.dz.sum(0));
}

// Each block of hidden units: the element-wise part, then its rows of the weight gradient,
// dz^T X, while dz is in the cache. The gradients of input and state need dz of all units, so
// they come after that. float32.
class BlockedStepBackward {
 public:
  BlockedStepBackward(
      const BackwardArgs<float, float>& step,
      const CellBackwardArgs& args,
      const StepGradients& results,
      const CellSchedule& schedule)
      : step_(step),
        results_(results),
        weights_(args.weights),
        input_(args.input.contiguous()),
        h_(args.h.contiguous()),
        batch_(h_.size(0)),
        hidden_(h_.size(1)),
        dz_(write<float>(results.dz)),
        blocks_(hidden_, schedule.block_width),
        grain_((blocks_.count + schedule.threads - 1) / schedule.threads),
        in_place_(schedule.multiply_in_place) {}

  void run() {
    const Tensor buffer = at::empty({blocks_.count, blocks_.width * batch_}, results_.dz.options());
    parallel_for(blocks_.count, grain_, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        compute(block, buffer.mutable_data_ptr<float>() + block * buffer.size(1));
      }
      release_micro_kernel();
    });
    if (in_place_) return multiply_in_place();
    const Linear linear(weights_, Tensor());
    if (results_.d_input.defined()) linear.input_gradient(results_.d_input, results_.dz);
    if (results_.d_h.defined()) linear.state_gradient(results_.d_h, results_.dz);
  }

 private:
  void compute(int64_t block, float* dz_transposed) const {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    BackwardArgs<float, float> part = step_;
    part.hidden = width;
    part.activations = part.activations.from(0, unit);
    part.grad_h = part.grad_h.from(0, unit);
    part.grad_c = part.grad_c.from(0, unit);
    part.grad_gates = part.grad_gates.from(0, unit);
    part.grad_c_prev = part.grad_c_prev.from(0, unit);
    elementwise<float, float>().backward(part, 0, batch_ * width);
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      const int64_t row = gate * hidden_ + unit;
      const auto dz = as_const(dz_.from(0, row));
      if (results_.d_bias.defined()) {
        float* const d_bias = results_.d_bias.mutable_data_ptr<float>() + row;
        kernels().sum_rows_f32(batch_, width, dz, d_bias);
      }
      if (!results_.d_weights.defined()) continue;
      kernels().transpose_f32(batch_, width, dz, {dz_transposed, batch_});
      const auto d_weights = write<float>(results_.d_weights).from(row);
      multiply(width, dz_transposed, h_, d_weights);
      multiply(width, dz_transposed, input_, d_weights.from(0, hidden_));
    }
  }

  // out (width, columns of x) = dz^T x.
  void multiply(
      int64_t width, const float* dz_transposed, const Tensor& x, Matrix<float> out) const {
    const float* const data = x.const_data_ptr<float>();
    for (int64_t n = 0; n < x.size(1); n += kCellWeightColumns) {
      const int64_t columns = std::min(kCellWeightColumns, x.size(1) - n);
      const PackedB<const float> b = {data + n, batch_, columns, x.stride(0)};
      F32Format::gemm(width, {dz_transposed, batch_}, b, out.from(0, n), /*accumulate=*/false);
    }
  }

  // dX = dz W, in tiles of columns of h or of the input.
  void multiply_in_place() const {
    const auto w = read<float>(weights_);
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
      for (int64_t t = first; t < last; ++t) {
        const int64_t n = tiles[t].begin;
        const auto out = n < hidden_ ? d_h.from(0, n) : d_input.from(0, n - hidden_);
        const PackedB<const float> b = {
            w.data + n, Cell::kGates * hidden_, tiles[t].size(), w.row_stride};
        F32Format::gemm(batch_, as_const(dz_), b, out, /*accumulate=*/false);
      }
      release_micro_kernel();
    });
  }

  const BackwardArgs<float, float>& step_;
  const StepGradients& results_;
  const Tensor& weights_;
  const Tensor input_, h_;
  const int64_t batch_, hidden_;
  const Matrix<float> dz_;
  const Blocks blocks_;
  const int64_t grain_;
  const bool in_place_;
};

StepGradients allocate_gradients(const CellBackwardArgs& args, at::ScalarType gemm_dtype) {
  const auto options = args.input.options();
  const auto compute_options = options.dtype(compute_dtype(args.input.scalar_type()));
  const auto [want_input, want_h, want_c, want_weights, want_bias] = args.output_mask;
  const auto if_wanted = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? at::empty(sizes, options.dtype(gemm_dtype)) : Tensor();
  };
  const int64_t batch = args.h.size(0);
  const int64_t columns = Cell::kGates * args.h.size(1);
  return {
      at::empty({batch, columns}, compute_options),
      at::empty(args.h.sizes(), compute_options),
      if_wanted(want_input, args.input.sizes()),
      if_wanted(want_h, args.h.sizes()),
      if_wanted(want_weights, args.weights.sizes()),
      if_wanted(want_bias, {columns})};
}

}  // namespace

Gradients cell_backward(const CellBackwardArgs& args) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const at::ScalarType dtype = args.input.scalar_type();
  const CellSchedule schedule = schedule_cell(available_threads(), batch, hidden);
  // Rounding the operands is what plain bfloat16 does too.
  const bool bf16 = dtype == at::kBFloat16 && schedule.bf16_backward && Bf16Format::available();
  const at::ScalarType gemm_dtype = bf16 ? dtype : compute_dtype(dtype);
  const StepGradients results = allocate_gradients(args, gemm_dtype);
  const Tensor grad_c = args.grad_c.defined() ? args.grad_c.to(compute_dtype(dtype)) : args.grad_c;
  visit_dtype(dtype, [&]<typename T>(T*) {
    using C = compute_t<T>;
    StepBackwardArgs<T> step;
    step.hidden = hidden;
    step.activations = read<T>(args.activations);
    step.activations_step = hidden;
    step.grad_h = read<T>(args.grad_h);
    step.grad_c = read<C>(grad_c);
    step.grad_gates = write<C>(results.dz);
    step.grad_gates_step = hidden;
    step.grad_c_prev = write<C>(results.dc);
    if constexpr (std::is_same_v<T, float>) {
      if (schedule.blocked_backward && can_block<float>(args.input, args.h, args.weights)) {
        BlockedStepBackward(step, args, results, schedule).run();
        return;
      }
    }
    backward_by_aten<T>(step, args, results, gemm_dtype);
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
