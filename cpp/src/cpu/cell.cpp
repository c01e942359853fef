// lltm::cell on the CPU.
#include "check.h"
#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "cpu/linear.h"
#include "cpu/micro_kernel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>

namespace lltm::cpu {
namespace {

using at::Tensor;

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
  const auto options = input.options().dtype(at::kFloat);
  const Tensor bias = bias_or_none.has_value() && bias_or_none->defined()
                          ? bias_or_none->to(at::kFloat).view({1, -1})
                          : Tensor();
  const T* const w = static_cast<const T*>(weights.const_data_ptr());
  const int64_t w_stride = weights.stride(0);

  const int64_t threads = batch * hidden < kGrain ? 1 : at::get_num_threads();
  const Blocks blocks(hidden, threads, 64);
  const int64_t columns = std::min((batch + kColumns - 1) / kColumns * kColumns, kMaxColumns);
  const Tensor x_packed = at::empty({depth * columns}, weights.options());
  T* const xt = static_cast<T*>(x_packed.mutable_data_ptr());
  const Tensor z_buffer = at::empty({blocks.count, 3 * blocks.width * columns}, options);

  for (int64_t first = 0; first < batch; first += columns) {
    const int64_t rows = std::min(columns, batch - first);
    pack_rows(xt, columns, 0, read<T>(h).from(first), rows, hidden);
    pack_rows(xt, columns, hidden, read<T>(input).from(first), rows, depth - hidden);
    at::parallel_for(
        0, blocks.count, (blocks.count + threads - 1) / threads, [&](int64_t begin, int64_t end) {
          for (int64_t block = begin; block < end; ++block) {
            const int64_t unit = blocks.begin(block);
            const int64_t width = blocks.size(block);
            float* const z = z_buffer.mutable_data_ptr<float>() + block * z_buffer.size(1);
            for (int64_t gate = 0; gate < 3; ++gate) {
              multiply(
                  width,
                  columns,
                  depth,
                  w + (gate * hidden + unit) * w_stride,
                  w_stride,
                  xt,
                  columns,
                  z + gate * width * columns,
                  columns,
                  /*accumulate=*/false);
            }
            ForwardArgs<T, float> part = args;
            part.hidden = width;
            part.gates = {z, 1, columns};
            part.gates_step = width;
            part.bias = read<float>(bias).from(0, unit);
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
  const Tensor dh = grad_h.value_or(Tensor());
  const Tensor dc_next =
      grad_c.has_value() && grad_c->defined() ? grad_c->to(options.dtype()) : Tensor();
  Tensor dz = at::empty({batch, 3 * hidden}, options);
  Tensor dc = at::empty({batch, hidden}, options);
  visit_dtype(dtype, [&]<typename T>(T*) {
    BackwardArgs<T, compute_t<T>> args;
    args.hidden = hidden;
    args.activations = read<T>(activations);
    args.activations_step = hidden;
    args.grad_h = read<T>(dh);
    args.grad_c = read<compute_t<T>>(dc_next);
    args.grad_gates = write<compute_t<T>>(dz);
    args.grad_gates_step = hidden;
    args.grad_c_prev = write<compute_t<T>>(dc);
    at::parallel_for(0, batch * hidden, kGrain, [&](int64_t begin, int64_t end) {
      pointwise<T, compute_t<T>>().backward(args, begin, end);
    });
  });

  const Linear linear(weights, std::nullopt);
  const auto [d_input, d_h, d_c, d_weights, d_bias] = output_mask;
  Tensor grad_h_prev;
  if (d_h) {
    grad_h_prev = at::empty({batch, hidden}, options);
    linear.state_gradient(grad_h_prev, dz);
    grad_h_prev = grad_h_prev.to(dtype);
  }
  return {
      d_input ? linear.input_gradient(dz).to(dtype) : Tensor(),
      grad_h_prev,
      d_c ? dc.to(dtype) : Tensor(),
      d_weights ? weights_gradient(dz, h, input).to(dtype) : Tensor(),
      d_bias ? dz.sum(0).to(dtype) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("cell", TORCH_FN(cell));
  m.impl("cell_forward", TORCH_FN(cell_forward));
  m.impl("cell_backward", TORCH_FN(cell_backward));
}

}  // namespace lltm::cpu
