// The forward engine for float32 sequences of few rows or few hidden units.
//
// Such a sequence follows few trajectories for many steps, and each step carries
// the rounding errors of those before it on, in the worst case amplified. With so
// few elements nothing averages them out: with sums and states in float32, the result
// differs from PyTorch's by as much as chance makes of it. So here sums, the
// pointwise part and the state are float64, and what is stored is the nearest
// float32. The weights stay float32. Where they are so large that reading them is
// most of the work, the products' left operand is float32 too, and a few products
// at a time are added up in it, for what is left of the time.
//
// Blocks of hidden units are shared out among the threads, as in
// engine_blocked.cpp, with a barrier after each step.
#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "cpu/engine.h"
#include "cpu/memory.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"
#include "cpu/sums.h"
#include "steps.h"

#include <ATen/ops/empty.h>
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Rows of the input that are multiplied together.
constexpr int64_t kInputRows = 64;
// Bytes of weights from which the left operand is float32.
constexpr size_t kLargeWeights = 1 << 19;

MultiplyFewRows<double> multiply_of(double) {
  return kernels().few_rows.multiply_f64;
}
MultiplyFewRows<float> multiply_of(float) {
  return kernels().few_rows.multiply_f32;
}

// A: of the products' left operand.
template <typename A>
ForwardResult forward(const ForwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t input_size = p.input.size(-1);
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);

  const int64_t most_threads =
      choose_grid<float>(
          available_threads(), batch, hidden, p.weights.nbytes(), batch * 3 * hidden * hidden)
          .threads();
  const PackedWeights<float> weights = is_prepacked(p.weights)
                                           ? read_packed<float>(p.weights)
                                           : pack_weights<float>(p.weights, most_threads);
  const Blocks& blocks = weights.blocks;
  const int64_t members = std::min(most_threads, blocks.count);

  const StepRows<float> input(p.input);
  const Tensor bias = p.bias.has_value() && p.bias->defined() ? p.bias->contiguous() : Tensor();
  constexpr bool kFloat = std::is_same_v<A, float>;
  const at::ScalarType a_dtype = kFloat ? at::kFloat : at::kDouble;
  const Tensor h_0 = p.h_0.to(a_dtype).contiguous();
  const Tensor c = p.c_0.to(at::kDouble).contiguous();  // renewed by each step

  const int64_t rows = flat_size(p.input);
  std::vector<int64_t> output_shape = p.input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = empty_large(output_shape, p.input.options());
  const Tensor output_rows = flat_rows(output);
  const Tensor activations = p.save ? empty_large({rows, 4 * hidden}, p.input.options()) : Tensor();

  // Of as many steps as have kInputRows rows: the input, and the pre-activations of
  // each block, one after the other. Of two steps in turn, where the output is not
  // the operand: the state.
  const size_t chunk_steps = std::max<int64_t>(1, kInputRows / batch);
  const int64_t chunk_rows = static_cast<int64_t>(chunk_steps) * batch;
  const auto wide = p.input.options().dtype(at::kDouble);
  const Tensor x_buffer = at::empty({chunk_rows, input_size}, wide.dtype(a_dtype));
  const Tensor z_buffer = at::empty({chunk_rows * 3 * hidden}, wide);
  const Tensor h_buffer = at::empty({2, batch, hidden}, wide);
  const auto x = write<A>(x_buffer);
  double* const z_all = z_buffer.mutable_data_ptr<double>();
  const auto c_rows = write<double>(c);
  const auto h_next = write<float>(output_rows);
  const auto saved = write<float>(activations);
  // The state after step k, in float64; and as the next product reads it.
  const auto state = [data = h_buffer.mutable_data_ptr<double>(), batch, hidden](size_t k) {
    return Matrix<double>{data + static_cast<int64_t>(k % 2) * batch * hidden, hidden, 1};
  };
  const auto h_of = [&](size_t k) -> const A* {
    if constexpr (kFloat) {
      return h_next.row(steps[k].offset);
    } else {
      return state(k).data;
    }
  };
  const auto multiply = multiply_of(A{});

  Failure failure;
#pragma omp parallel num_threads(members) if (members > 1)
  {
    const int64_t thread = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();
    const Range own = share(blocks.count, threads, thread);
    for (size_t first = 0; first < steps.size(); first += chunk_steps) {
      const size_t last = std::min(steps.size(), first + chunk_steps);
      const int64_t begin = std::min(steps[first].offset, steps[last - 1].offset);
      int64_t size = 0;
      for (size_t k = first; k < last; ++k) size += steps[k].rows;
      // z of a block: (rows of the chunk, 3 width).
      const auto z_of = [&](int64_t block) { return z_all + 3 * blocks.begin(block) * chunk_rows; };
      failure.guard([&] {
        for (size_t k = first; k < last; ++k) {
          const Range columns = share(input_size, threads, thread);
          for (int64_t r = 0; r < steps[k].rows; ++r) {
            const auto from = input.of(steps[k].offset).from(r, columns.begin);
            A* const to = x.row(steps[k].offset - begin + r) + columns.begin;
            for (int64_t j = 0; j < columns.size(); ++j) to[j] = from.data[j * from.col_stride];
          }
        }
      });
#pragma omp barrier
      failure.guard([&] {
        for (int64_t block = own.begin; block < own.end; ++block) {
          multiply(
              size,
              weights.columns(block),
              input_size,
              x.data,
              input_size,
              weights.x(block),
              z_of(block),
              /*accumulate=*/false);
        }
      });
      for (size_t k = first; k < last; ++k) {
        failure.guard([&] {
          const auto [offset, step_rows] = steps[k];
          const int64_t carried = carried_rows(steps, k);
          for (int64_t block = own.begin; block < own.end; ++block) {
            const int64_t unit = blocks.begin(block);
            const int64_t columns = weights.columns(block);
            double* const z = z_of(block) + (offset - begin) * columns;
            const auto recur = [&](int64_t from, int64_t to, const A* h) {
              multiply(
                  to - from,
                  columns,
                  hidden,
                  h + from * hidden,
                  hidden,
                  weights.h(block),
                  z + from * columns,
                  /*accumulate=*/true);
            };
            if (carried > 0) recur(0, carried, h_of(k - 1));
            recur(carried, step_rows, h_0.const_data_ptr<A>());
            FewRowsArgs args;
            args.hidden = blocks.size(block);
            args.gates = {z, columns, 1};
            args.gates_step = args.hidden;
            args.bias = bias.defined() ? bias.const_data_ptr<float>() + unit : nullptr;
            args.bias_step = hidden;
            args.c = c_rows.from(0, unit);
            args.h = kFloat ? Matrix<double>{} : state(k).from(0, unit);
            args.h_next = h_next.from(offset, unit);
            args.activations = saved.from(offset, unit);
            args.activations_step = hidden;
            kernels().few_rows.forward(args, step_rows);
          }
        });
        if (threads > 1) {
#pragma omp barrier
        }
      }
    }
  }
  failure.rethrow();
  return {output, final_states(steps, p.h_0, output_rows), c.to(at::kFloat), activations};
}

}  // namespace

ForwardResult few_rows_forward(const ForwardProblem& p) {
  return p.weights.nbytes() < kLargeWeights ? forward<double>(p) : forward<float>(p);
}

}  // namespace lltm::cpu
