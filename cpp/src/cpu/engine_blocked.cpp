// The engine in its fast form, for float32 and the 16-bit formats.
//
// The weights are packed, once per call or once for all, into blocks of hidden
// units, the three gates of a unit side by side. Then one parallel region runs
// all steps: for each block a thread multiplies with the micro-kernel and does
// the pointwise part at once, while the block is in its cache. The threads form
// a grid: each has some rows of the batch and some blocks. Rows never depend on
// each other, so there is a barrier after each step only where rows share their
// blocks out among several threads.
//
// Forward, per step and block:    z = x W_x^T + h W_h^T, then h', c'
// Backward, per step and block:   dh = dz' W_h (dz' of the step after), then dz
// Backward works through chunks of steps; after each, what does not depend on
// the order of the steps (the gradients of input, weights and bias) is one
// product each over its rows, whose dz is still in the cache.
#include "cpu/blocks.h"
#include "cpu/dispatch.h"
#include "cpu/engine.h"
#include "cpu/memory.h"
#include "cpu/micro_kernel.h"
#include "cpu/operands.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"
#include "cpu/sums.h"
#include "steps.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Rows of a product of input and weights worth a pass over the weights.
constexpr int64_t kProjectionRows = 64;

// ---- operands ---------------------------------------------------------------

// (rows, columns) as an operand of the micro-kernel: dtype G, rows contiguous
// and padded with zeros to the depth it needs. The tensor itself if it will do.
template <typename G>
Tensor operand_rows(const Tensor& tensor) {
  const int64_t columns = tensor.size(1);
  const int64_t depth = padded_depth<G>(columns);
  if (depth != columns) {
    Tensor padded = at::zeros({tensor.size(0), depth}, tensor.options().dtype(kOperandDtype<G>));
    padded.slice(1, 0, columns).copy_(tensor);
    return padded;
  }
  const Tensor rows = tensor.to(kOperandDtype<G>);
  if (rows.stride(1) == 1 && is_operand_stride(rows.stride(0), columns)) return rows;
  // A single row counts as contiguous whatever its stride.
  return rows.contiguous().as_strided(rows.sizes(), {columns, 1});
}

template <typename G>
Tensor empty_rows(int64_t rows, int64_t columns, const Tensor& like) {
  const int64_t depth = padded_depth<G>(columns);
  const auto options = like.options().dtype(kOperandDtype<G>);
  return depth == columns ? at::empty({rows, depth}, options) : at::zeros({rows, depth}, options);
}

// ---- forward ----------------------------------------------------------------

template <typename T, typename G>
ForwardResult forward(const ForwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t input_size = p.input.size(-1);
  const int64_t depth_x = padded_depth<G>(input_size);
  const int64_t depth_h = padded_depth<G>(hidden);
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);

  Grid grid = choose_grid(
      available_threads(),
      batch,
      hidden,
      3 * hidden * (depth_h + depth_x) * static_cast<int64_t>(sizeof(G)),
      batch * 3 * hidden * hidden);
  const PackedWeights<G> weights = is_prepacked(p.weights)
                                       ? PackedWeights<G>(p.weights)
                                       : pack_weights<G>(p.weights, grid.columns);
  const Blocks& blocks = weights.blocks;
  grid.columns = std::min(grid.columns, blocks.count);

  // Arguments in the form that the kernels read.
  const Tensor x_rows = operand_rows<G>(flat_rows(p.input));
  const Tensor h_0_rows = operand_rows<G>(p.h_0);
  const Tensor bias = p.bias.has_value() && p.bias->defined() ? p.bias->to(at::kFloat) : Tensor();
  const auto x = read<G>(x_rows);
  const auto h_0 = read<G>(h_0_rows);

  // Results. The states of all steps are the operands of the steps after them:
  // the output itself where it has the right form.
  const int64_t rows = x_rows.size(0);
  std::vector<int64_t> output_shape = p.input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = empty_large(output_shape, p.input.options());
  const Tensor output_rows = flat_rows(output);
  const Tensor activations = p.save ? empty_large({rows, 4 * hidden}, p.input.options()) : Tensor();
  const Tensor c = at::empty(p.c_0.sizes(), p.input.options()).copy_(p.c_0);
  const bool output_is_operand = std::is_same_v<T, G> && depth_h == hidden;
  const Tensor states = output_is_operand ? output_rows : empty_rows<G>(rows, hidden, p.input);
  const auto h_rows = write<G>(states);

  ForwardArgs<T, G> args;
  args.bias = read_row<float>(bias);
  args.bias_step = hidden;
  args.c = read<T>(c);
  args.c_next = write<T>(c);
  args.h_next = write<T>(output_rows);
  args.h_operand = output_is_operand ? Matrix<G>{} : h_rows;
  args.activations = write<T>(activations);
  args.activations_step = hidden;

  // Few rows a step: the input's part is multiplied for several steps at once.
  const int64_t chunk_steps =
      grid.rows == 1 ? std::max<int64_t>(1, kProjectionRows / std::max<int64_t>(batch, 1)) : 1;
  const int64_t chunk_rows = chunk_steps * batch;
  const int64_t gates_columns =
      chunk_steps > 1 ? 3 * blocks.width * blocks.count : 3 * blocks.width;
  const Tensor gates_buffer =
      at::empty({grid.threads(), chunk_rows * gates_columns}, p.input.options().dtype(at::kFloat));
  const auto& kernels = pointwise<T, G>();

  Failure failure;
#pragma omp parallel num_threads(grid.threads()) if (grid.threads() > 1)
  {
    // OpenMP may give fewer threads than were asked for: the members of the
    // grid are shared out among those that are there.
    const int64_t thread = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();

    for (size_t first = 0; first < steps.size(); first += chunk_steps) {
      const size_t last = std::min(steps.size(), first + chunk_steps) - 1;
      const int64_t chunk_begin = std::min(steps[first].offset, steps[last].offset);
      for (size_t k = first; k <= last; ++k) {
        for (int64_t member = thread; member < grid.threads(); member += threads) {
          const Range own_rows = share(batch, grid.rows, member / grid.columns);
          const Range own_blocks = share(blocks.count, grid.columns, member % grid.columns);
          float* const buffer =
              gates_buffer.mutable_data_ptr<float>() + member * gates_buffer.size(1);
          failure.guard([&] {
            // z of one block: (rows of the chunk, 3 width).
            const auto gates = [&](int64_t block) {
              return buffer + (chunk_steps > 1 ? 3 * blocks.begin(block) * chunk_rows : 0);
            };
            const auto project = [&](int64_t block, int64_t from, int64_t to) {
              if (from >= to) return;
              const int64_t columns = 3 * blocks.size(block);
              multiply(
                  to - from,
                  columns,
                  depth_x,
                  x.row(from),
                  x.row_stride,
                  weights.x(block),
                  columns,
                  gates(block) + (from - chunk_begin) * columns,
                  columns,
                  /*accumulate=*/false);
            };
            const Step step = steps[k];
            if (chunk_steps > 1 && k == first) {
              const Step& top = steps[steps[first].offset > steps[last].offset ? first : last];
              for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
                project(block, chunk_begin, top.offset + top.rows);
              }
            }
            const Range step_rows = intersect(own_rows, {0, step.rows});
            if (step_rows.size() == 0) return;
            const int64_t carried = carried_rows(steps, k);
            const Range old_rows = intersect(step_rows, {0, carried});
            const Range new_rows = intersect(step_rows, {carried, step.rows});
            for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
              const int64_t unit = blocks.begin(block);
              const int64_t columns = 3 * blocks.size(block);
              if (chunk_steps == 1) {
                project(block, step.offset + step_rows.begin, step.offset + step_rows.end);
              }
              float* const z = gates(block) + (step.offset - chunk_begin) * columns;
              const auto recur = [&](Range range, const G* h, int64_t ldh) {
                if (range.size() == 0) return;
                multiply(
                    range.size(),
                    columns,
                    depth_h,
                    h,
                    ldh,
                    weights.h(block),
                    columns,
                    z + range.begin * columns,
                    columns,
                    /*accumulate=*/true);
              };
              if (k > 0)
                recur(
                    old_rows, h_rows.row(steps[k - 1].offset + old_rows.begin), h_rows.row_stride);
              recur(new_rows, h_0.row(new_rows.begin), h_0.row_stride);

              ForwardArgs<T, G> part = args;
              part.hidden = blocks.size(block);
              part.gates = {z + step_rows.begin * columns, columns, 1};
              part.gates_step = blocks.size(block);
              part.bias = args.bias.from(0, unit);
              part.c = args.c.from(step_rows.begin, unit);
              part.c_next = args.c_next.from(step_rows.begin, unit);
              const int64_t at = step.offset + step_rows.begin;
              part.h_next = args.h_next.from(at, unit);
              part.h_operand = args.h_operand.from(at, unit);
              part.activations = args.activations.from(at, unit);
              kernels.forward(part, 0, step_rows.size() * part.hidden);
            }
          });
        }
        if (grid.columns > 1) {
#pragma omp barrier
        }
      }
    }
    release_micro_kernel();
  }
  failure.rethrow();
  return {output, final_states(steps, p.h_0, output_rows), c, activations};
}

// ---- backward ---------------------------------------------------------------

// Rows of a chunk: enough for the products over its rows to be efficient, few
// enough for its dz to stay in the cache. Of bfloat16, whose products take less
// time than the calls around them, more.
template <typename G>
constexpr int64_t kChunkRows = std::is_same_v<G, float> ? 512 : 4096;

template <typename T, typename G>
Gradients backward(const BackwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t depth = padded_depth<G>(3 * hidden);
  const auto options = p.input.options().dtype(at::kFloat);
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);

  const Grid grid = choose_grid(
      available_threads(),
      batch,
      hidden,
      hidden * depth * static_cast<int64_t>(sizeof(G)),
      batch * 3 * hidden * hidden);
  const Blocks blocks(
      hidden,
      grid.columns,
      block_units(kBackwardUnits<G>, depth * static_cast<int64_t>(sizeof(G)), 2 * kUnits));

  const Tensor weights = p.weights.to(kOperandDtype<G>).contiguous();
  const auto w = read<G>(weights);
  const Tensor grad_rows = p.grad_output.defined() ? flat_rows(p.grad_output) : Tensor();
  const Tensor grad_h_n = p.grad_h_n.defined() ? p.grad_h_n.to(at::kFloat) : Tensor();
  const auto dh_n = read<float>(grad_h_n);
  const Tensor dc = at::zeros({batch, hidden}, options);
  if (p.grad_c_n.defined()) dc.copy_(p.grad_c_n);
  // dz of the chunk at work and of the one before, whose last step is needed.
  const std::vector<Chunk> chunks = plan_chunks(steps, kChunkRows<G>);
  int64_t chunk_rows = 0;
  for (const Chunk& chunk : chunks) chunk_rows = std::max(chunk_rows, chunk.rows);
  const std::array<Tensor, 2> dz_buffers = {
      empty_rows<G>(chunk_rows, 3 * hidden, p.input),
      empty_rows<G>(chunks.size() > 1 ? chunk_rows : 0, 3 * hidden, p.input)};
  GradientSums sums(p, steps, weights);

  BackwardArgs<T, G> args;
  args.activations = read<T>(p.activations);
  args.activations_step = hidden;
  args.grad_h = read<T>(grad_rows);
  args.grad_c = read<float>(dc);
  args.grad_gates_step = hidden;
  args.grad_c_prev = write<float>(dc);

  const Tensor packed_buffer = at::empty({hidden * depth}, weights.options());
  G* const packed = static_cast<G*>(packed_buffer.mutable_data_ptr());
  const Tensor dh_buffer = at::empty({grid.threads(), batch * blocks.width}, options);
  const auto& kernels = pointwise<T, G>();

  const int64_t grain = std::max<int64_t>(1, kPackGrain / (depth * blocks.width));
  at::parallel_for(0, blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t unit = blocks.begin(block);
      pack_rows(
          packed + unit * depth,
          blocks.size(block),
          w.from(0, unit),
          3 * hidden,
          blocks.size(block));
    }
  });

  for (size_t c = chunks.size(); c-- > 0;) {
    const Chunk& chunk = chunks[c];
    // dz of step k of this chunk, or of the step after the chunk.
    const auto dz_of = [&](size_t k) {
      const size_t owner = k < chunk.last ? c : c + 1;
      return write<G>(dz_buffers[owner % 2]).from(steps[k].offset - chunks[owner].begin);
    };
    Failure failure;
#pragma omp parallel num_threads(grid.threads()) if (grid.threads() > 1)
    {
      const int64_t thread = omp_get_thread_num();
      const int64_t threads = omp_get_num_threads();
      for (size_t k = chunk.last; k-- > chunk.first;) {
        for (int64_t member = thread; member < grid.threads(); member += threads) {
          const Range own_rows = share(batch, grid.rows, member / grid.columns);
          const Range own_blocks = share(blocks.count, grid.columns, member % grid.columns);
          float* const dh = dh_buffer.mutable_data_ptr<float>() + member * dh_buffer.size(1);
          failure.guard([&] {
            const Step step = steps[k];
            const Range step_rows = intersect(own_rows, {0, step.rows});
            if (step_rows.size() == 0) return;
            // Rows that went on into the next step, and rows that ended here.
            const int64_t kept = k + 1 < steps.size() ? carried_rows(steps, k + 1) : 0;
            const Range going_on = intersect(step_rows, {0, kept});
            const Range ended = intersect(step_rows, {kept, step.rows});
            const auto dz = dz_of(k);
            for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
              const int64_t unit = blocks.begin(block);
              const int64_t width = blocks.size(block);
              const auto finish = [&](Range range, Matrix<const float> grad_h_state) {
                if (range.size() == 0) return;
                BackwardArgs<T, G> part = args;
                part.hidden = width;
                const int64_t at = step.offset + range.begin;
                part.activations = args.activations.from(at, unit);
                part.grad_h = args.grad_h.from(at, unit);
                part.grad_h_state = grad_h_state;
                part.grad_c = args.grad_c.from(range.begin, unit);
                part.grad_c_prev = args.grad_c_prev.from(range.begin, unit);
                part.grad_gates = dz.from(range.begin, unit);
                kernels.backward(part, 0, range.size() * width);
              };
              if (going_on.size() > 0) {
                const auto dz_next = dz_of(k + 1);
                multiply<G>(
                    going_on.size(),
                    width,
                    depth,
                    dz_next.row(going_on.begin),
                    dz_next.row_stride,
                    packed + unit * depth,
                    width,
                    dh,
                    width,
                    /*accumulate=*/false);
              }
              finish(going_on, {dh, width, 1});
              finish(ended, dh_n.from(ended.begin, unit));
            }
          });
        }
        if (grid.columns > 1) {
#pragma omp barrier
        }
      }
      release_micro_kernel();
    }
    failure.rethrow();
    sums.add(
        chunk.first, chunk.last, dz_buffers[c % 2].slice(0, 0, chunk.rows).slice(1, 0, 3 * hidden));
  }
  return sums.finish(dc);
}

}  // namespace

ForwardResult blocked_forward(const ForwardProblem& problem) {
  const bool narrow = is_prepacked(problem.weights) ? has_narrow_blocks(problem.weights)
                                                    : has_micro_kernel<BFloat16>();
  switch (problem.input.scalar_type()) {
    case at::kHalf:
      return forward<Half, float>(problem);
    case at::kBFloat16:
      return narrow ? forward<BFloat16, BFloat16>(problem) : forward<BFloat16, float>(problem);
    default:
      return forward<float, float>(problem);
  }
}

Gradients blocked_backward(const BackwardProblem& problem) {
  switch (problem.input.scalar_type()) {
    case at::kHalf:
      return backward<Half, float>(problem);
    case at::kBFloat16:
      return has_micro_kernel<BFloat16>() ? backward<BFloat16, BFloat16>(problem)
                                          : backward<BFloat16, float>(problem);
    default:
      return backward<float, float>(problem);
  }
}

}  // namespace lltm::cpu
