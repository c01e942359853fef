// lltm::cell on the CPU.
#include "check.h"
#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "cpu/linear.h"
#include "cpu/micro_kernel.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "cpu/products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Hidden units that one thread works on at a time, at most.
constexpr int64_t kUnitsAtOnce = 64;

// The results of a step as the kernels write them.
template <typename T>
ForwardArgs<T, compute_t<T>> arguments(
    const Tensor& c, const Tensor& h_next, const Tensor& c_next, const Tensor& activations) {
  ForwardArgs<T, compute_t<T>> args;
  args.c = read<T>(c);
  args.h_next = write<T>(h_next);
  args.c_next = write<T>(c_next);
  args.activations = write<T>(activations);
  args.activations_step = h_next.size(1);
  return args;
}

// By public ATen: the product, then the pointwise part.
template <typename T>
void step_by_product(
    ForwardArgs<T, compute_t<T>> args,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const Linear linear(weights, bias);
  const Tensor gates = linear.project_input(input);
  linear.add_recurrent(gates, h.to(gates.scalar_type()));
  args.hidden = h.size(1);
  args.gates = read<compute_t<T>>(gates);
  args.gates_step = args.hidden;
  at::parallel_for(0, h.numel(), kGrain, [&](int64_t begin, int64_t end) {
    pointwise<T, compute_t<T>>().forward(args, begin, end);
  });
}

// By the micro-kernel, block by block, as z^T = W X^T: the weights are read as
// they lie, and only the small X is laid out anew.
template <typename T>
void step_by_blocks(
    const ForwardArgs<T, float>& args,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const std::optional<Tensor>& bias_or_none) {
  constexpr int64_t kColumns = 16;  // widths of z^T are multiples of a vector
  constexpr int64_t kMaxColumns = 64;
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const int64_t depth = weights.size(1);
  const Tensor bias =
      bias_or_none.has_value() && bias_or_none->defined() ? bias_or_none->to(at::kFloat) : Tensor();
  const T* const w = static_cast<const T*>(weights.const_data_ptr());
  const int64_t w_stride = weights.stride(0);

  const int64_t threads = batch * hidden < kGrain ? 1 : at::get_num_threads();
  const Blocks blocks(hidden, threads, kUnitsAtOnce, kUnits);
  const int64_t columns = std::min((batch + kColumns - 1) / kColumns * kColumns, kMaxColumns);
  // X^T, and for each block z^T and z.
  const int64_t z_size = 3 * blocks.width * columns;
  const int64_t x_size = depth * columns * static_cast<int64_t>(sizeof(T)) / 4;
  const Tensor buffer =
      at::empty({x_size + 2 * blocks.count * z_size}, input.options().dtype(at::kFloat));
  float* const floats = buffer.mutable_data_ptr<float>();
  T* const xt = reinterpret_cast<T*>(floats);

  for (int64_t first = 0; first < batch; first += columns) {
    const int64_t rows = std::min(columns, batch - first);
    if (rows < columns) std::fill_n(floats, x_size, 0.0f);
    pack_transposed(xt, columns, read<T>(h).from(first), hidden, rows);
    pack_transposed(
        xt + hidden * columns, columns, read<T>(input).from(first), depth - hidden, rows);
    at::parallel_for(
        0, blocks.count, (blocks.count + threads - 1) / threads, [&](int64_t begin, int64_t end) {
          for (int64_t block = begin; block < end; ++block) {
            const int64_t unit = blocks.begin(block);
            const int64_t width = blocks.size(block);
            float* const zt = floats + x_size + 2 * block * z_size;
            float* const z = zt + z_size;
            for (int64_t gate = 0; gate < 3; ++gate) {
              multiply(
                  width,
                  columns,
                  depth,
                  w + (gate * hidden + unit) * w_stride,
                  w_stride,
                  xt,
                  columns,
                  zt + gate * width * columns,
                  columns,
                  /*accumulate=*/false);
            }
            kernels().transpose_f32(3 * width, columns, zt, columns, z, 3 * width);
            ForwardArgs<T, float> part = args;
            part.hidden = width;
            part.gates = {z, 3 * width, 1};
            part.gates_step = width;
            part.bias = read_row<float>(bias).from(0, unit);
            part.bias_step = hidden;
            part.c = args.c.from(first, unit);
            part.c_next = args.c_next.from(first, unit);
            part.h_next = args.h_next.from(first, unit);
            part.activations = args.activations.from(first, unit);
            pointwise<T, float>().forward(part, 0, rows * width);
          }
          release_micro_kernel();
        });
  }
}

// Rows from which the blocks win: fewer leave most of a vector unused.
constexpr int64_t kBlockRows = 4;
// Rows up to which they win backward: with more, ATen's products are as good.
// Each number of rows is a depth of its own to the micro-kernel, so it stays
// bounded too.
constexpr int64_t kGradientRows = 32;

// Rows from which the products of bfloat16 gradients are bfloat16's own: for fewer,
// to widen the weights costs less than such a product's set-up.
constexpr int64_t kNarrowRows = 32;

// Dtypes that the micro-kernel multiplies without a copy of the weights.
template <typename T>
constexpr bool kIsOperand = std::is_same_v<T, float> || std::is_same_v<T, BFloat16>;

template <typename T>
bool takes_blocks(const Tensor& input, const Tensor& h, const Tensor& weights) {
  constexpr int64_t kTogether = kRowsTogether<T>;
  return h.size(0) >= kBlockRows && h.size(1) > 0 && h.size(1) % kTogether == 0 &&
         input.size(1) % kTogether == 0 && weights.stride(1) == 1 &&
         is_operand_stride(weights.stride(0), weights.size(1)) && has_micro_kernel<T>();
}

std::tuple<Tensor, Tensor, Tensor> step(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    bool save) {
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  Tensor h_next = at::empty({batch, hidden}, input.options());
  Tensor c_next = at::empty({batch, hidden}, input.options());
  Tensor activations = save ? at::empty({batch, 4 * hidden}, input.options()) : Tensor();
  visit_dtype(input.scalar_type(), [&]<typename T>(T*) {
    const auto args = arguments<T>(c, h_next, c_next, activations);
    if constexpr (kIsOperand<T>) {
      if (takes_blocks<T>(input, h, weights)) {
        step_by_blocks<T>(args, input, h, weights, bias);
        return;
      }
    }
    step_by_product<T>(args, input, h, weights, bias);
  });
  return {h_next, c_next, activations};
}

std::tuple<Tensor, Tensor> cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  auto [h_next, c_next, activations] = step(input, h, c, weights, bias, /*save=*/false);
  return {h_next, c_next};
}

std::tuple<Tensor, Tensor, Tensor> cell_forward(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  check_cell(input, h, c, weights, bias);
  return step(input, h, c, weights, bias, /*save=*/true);
}

// ---- backward ---------------------------------------------------------------

// What a backward kernel gets and gives. Results that are not wanted are
// undefined; dz (B, 3H) and dc (B, H) are of the compute dtype, the others of the
// dtype of the products.
struct StepGradients {
  Tensor dz, d_input, d_h, dc, d_weights, d_bias;
};

template <typename T>
BackwardArgs<T, compute_t<T>> backward_arguments(
    const Tensor& grad_h,
    const Tensor& grad_c,
    const Tensor& activations,
    const StepGradients& gradients) {
  BackwardArgs<T, compute_t<T>> args;
  args.hidden = gradients.dc.size(1);
  args.activations = read<T>(activations);
  args.activations_step = args.hidden;
  args.grad_h = read<T>(grad_h);
  args.grad_c = read<compute_t<T>>(grad_c);
  args.grad_gates = write<compute_t<T>>(gradients.dz);
  args.grad_gates_step = args.hidden;
  args.grad_c_prev = write<compute_t<T>>(gradients.dc);
  return args;
}

// By public ATen: the pointwise part, then the products.
template <typename T>
void backward_by_product(
    const BackwardArgs<T, compute_t<T>>& args,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    at::ScalarType product_dtype,
    const StepGradients& results) {
  at::parallel_for(0, h.numel(), kGrain, [&](int64_t begin, int64_t end) {
    pointwise<T, compute_t<T>>().backward(args, begin, end);
  });
  const Tensor dz = results.dz.to(product_dtype);
  const Linear linear(weights, std::nullopt, product_dtype);
  if (results.d_input.defined()) linear.input_gradient(results.d_input, dz);
  if (results.d_h.defined()) linear.state_gradient(results.d_h, dz);
  if (results.d_weights.defined()) weights_gradient(results.d_weights, dz, h, input);
  if (results.d_bias.defined()) results.d_bias.copy_(results.dz.sum(0));
}

// By the micro-kernel. Each block of hidden units: the pointwise part, then its
// rows of the weight gradient, dz^T X, while dz is in the cache. The gradients
// of input and state need dz of all units, so they come after that.
void backward_by_blocks(
    const BackwardArgs<float, float>& args,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const StepGradients& results) {
  constexpr int64_t kColumns = 256;  // of the weight gradient at once
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const int64_t input_size = input.size(1);
  const int64_t threads = batch * hidden < kGrain ? 1 : at::get_num_threads();
  const Blocks blocks(hidden, threads, kUnitsAtOnce, kUnits);
  const auto dz = write<float>(results.dz);
  const auto d_weights = write<float>(results.d_weights);
  const auto d_bias = write_row<float>(results.d_bias);
  const Tensor buffer = at::empty({blocks.count, blocks.width * batch}, results.dz.options());

  at::parallel_for(
      0, blocks.count, (blocks.count + threads - 1) / threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          const int64_t unit = blocks.begin(block);
          const int64_t width = blocks.size(block);
          float* const dzt = buffer.mutable_data_ptr<float>() + block * buffer.size(1);
          BackwardArgs<float, float> part = args;
          part.hidden = width;
          part.activations = args.activations.from(0, unit);
          part.grad_h = args.grad_h.from(0, unit);
          part.grad_c = args.grad_c.from(0, unit);
          part.grad_gates = args.grad_gates.from(0, unit);
          part.grad_c_prev = args.grad_c_prev.from(0, unit);
          pointwise<float, float>().backward(part, 0, batch * width);
          for (int64_t gate = 0; gate < 3; ++gate) {
            const int64_t row = gate * hidden + unit;
            const auto dz_gate = dz.from(0, row);
            if (d_bias.data != nullptr) {
              kernels().sum_rows_f32(
                  batch, width, dz_gate.data, dz_gate.row_stride, d_bias.data + row);
            }
            if (d_weights.data == nullptr) continue;
            kernels().transpose_f32(batch, width, dz_gate.data, dz_gate.row_stride, dzt, batch);
            int64_t left = 0;
            for (const Tensor& part_of_x : {h, input}) {
              const auto x = read<float>(part_of_x);
              for (int64_t n = 0; n < part_of_x.size(1); n += kColumns) {
                multiply(
                    width,
                    std::min(kColumns, part_of_x.size(1) - n),
                    batch,
                    dzt,
                    batch,
                    x.data + n,
                    x.row_stride,
                    d_weights.row(row) + left + n,
                    d_weights.row_stride,
                    /*accumulate=*/false);
              }
              left += part_of_x.size(1);
            }
          }
        }
        release_micro_kernel();
      });

  // dX = dz W. For few rows the weights are read as they lie; for more, a
  // product that lays them out first is faster.
  constexpr int64_t kRowsInPlace = 16;
  constexpr int64_t kTileColumns = 64;
  if (batch > kRowsInPlace) {
    const Linear linear(weights, std::nullopt);
    if (results.d_input.defined()) linear.input_gradient(results.d_input, results.dz);
    if (results.d_h.defined()) linear.state_gradient(results.d_h, results.dz);
    return;
  }
  const auto w = read<float>(weights);
  const auto d_h = write<float>(results.d_h);
  const auto d_input = write<float>(results.d_input);
  const int64_t from = d_h.data != nullptr ? 0 : hidden;
  const int64_t to = d_input.data != nullptr ? hidden + input_size : hidden;
  std::vector<Range> tiles;
  for (int64_t n = from; n < to; n = tiles.back().end) {
    tiles.push_back({n, std::min(n + kTileColumns, n < hidden ? hidden : to)});
  }
  at::parallel_for(0, tiles.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto [n, n_end] = tiles[t];
      const auto out = n < hidden ? d_h.from(0, n) : d_input.from(0, n - hidden);
      multiply(
          batch,
          n_end - n,
          3 * hidden,
          dz.data,
          dz.row_stride,
          w.data + n,
          w.row_stride,
          out.data,
          out.row_stride,
          /*accumulate=*/false);
    }
    release_micro_kernel();
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> cell_backward(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations,
    std::array<bool, 5> output_mask) {
  check_cell_backward(grad_h, grad_c, input, h, weights, activations);
  const int64_t batch = h.size(0);
  const int64_t hidden = h.size(1);
  const at::ScalarType dtype = input.scalar_type();
  const auto options = input.options().dtype(compute_dtype(dtype));
  // Rounding what they multiply is what plain bfloat16 does too.
  const bool narrow =
      dtype == at::kBFloat16 && batch >= kNarrowRows && has_micro_kernel<BFloat16>();
  const at::ScalarType product_dtype = narrow ? dtype : compute_dtype(dtype);
  const auto [d_input, d_h, d_c, d_weights, d_bias] = output_mask;
  const auto wanted = [&](bool want, at::IntArrayRef sizes) {
    return want ? at::empty(sizes, options.dtype(product_dtype)) : Tensor();
  };
  const StepGradients results = {
      at::empty({batch, 3 * hidden}, options),
      wanted(d_input, input.sizes()),
      wanted(d_h, h.sizes()),
      at::empty({batch, hidden}, options),
      wanted(d_weights, weights.sizes()),
      wanted(d_bias, {3 * hidden})};
  const Tensor dh = grad_h.value_or(Tensor());
  const Tensor dc_next =
      grad_c.has_value() && grad_c->defined() ? grad_c->to(options.dtype()) : Tensor();
  visit_dtype(dtype, [&]<typename T>(T*) {
    const auto args = backward_arguments<T>(dh, dc_next, activations, results);
    if constexpr (std::is_same_v<T, float>) {
      if (batch <= kGradientRows && takes_blocks<float>(input, h, weights)) {
        backward_by_blocks(args, input.contiguous(), h.contiguous(), weights, results);
        return;
      }
    }
    backward_by_product<T>(args, input, h, weights, product_dtype, results);
  });
  const auto result = [&](const Tensor& tensor) {
    return tensor.defined() ? tensor.to(dtype) : Tensor();
  };
  return {
      result(results.d_input),
      result(results.d_h),
      d_c ? results.dc.to(dtype) : Tensor(),
      result(results.d_weights),
      result(results.d_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("cell", TORCH_FN(cell));
  m.impl("cell_forward", TORCH_FN(cell_forward));
  m.impl("cell_backward", TORCH_FN(cell_backward));
}

}  // namespace lltm::cpu
