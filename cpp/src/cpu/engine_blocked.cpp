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
// Rows of the input that are laid out together, where they can't be multiplied in
// place.
constexpr int64_t kInputChunkRows = 256;

template <typename T>
Matrix<const T> as_const(Matrix<T> matrix) {
  return {matrix.data, matrix.row_stride, matrix.col_stride};
}

// Fetches rows of an operand that other threads have just written into the
// second-level cache, to be there when the product comes to them.
template <typename G>
void prefetch(Matrix<const G> operand, Range rows, int64_t depth) {
  constexpr int64_t kLine = 64;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const auto* const row = reinterpret_cast<const char*>(operand.row(r));
    for (int64_t byte = 0; byte < depth * static_cast<int64_t>(sizeof(G)); byte += kLine) {
      __builtin_prefetch(row + byte, /*write=*/0, /*locality=*/2);
    }
  }
}

// ---- forward ----------------------------------------------------------------

template <typename G>
Grid forward_grid(const ForwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t depth = padded_depth<G>(p.input.size(-1)) + padded_depth<G>(hidden);
  return choose_grid<G>(
      available_threads(),
      batch,
      hidden,
      3 * hidden * depth * static_cast<int64_t>(sizeof(G)),
      batch * 3 * hidden * hidden);
}

template <typename T, typename G>
ForwardResult forward(const ForwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t input_size = p.input.size(-1);
  const int64_t depth_x = padded_depth<G>(input_size);
  const int64_t depth_h = padded_depth<G>(hidden);
  constexpr bool kSplit = std::is_same_v<G, BFloat16x3>;
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);

  Grid grid = forward_grid<G>(p);
  const PackedWeights<G> weights = is_prepacked(p.weights)
                                       ? read_packed<G>(p.weights)
                                       : pack_weights<G>(p.weights, grid.columns);
  const Blocks& blocks = weights.blocks;
  grid.columns = std::min(grid.columns, blocks.count);

  // The input as the micro-kernel reads it: in place, or laid out for the steps of
  // a chunk at a time.
  using X = stored_t<G>;
  Tensor input = p.input.to(kOperandDtype<X>);
  if (input.stride(-1) != 1) input = input.contiguous();
  const bool in_place = !kSplit && depth_x == input_size && input.is_contiguous() &&
                        is_operand_stride(input_size, input_size);
  const StepRows<X> input_rows(input);

  // Few rows a step: the input's part is multiplied for several steps at once.
  const bool ahead = grid.rows == 1 && 2 * batch <= kProjectionRows;
  const int64_t chunk_rows_wanted = ahead ? kProjectionRows : in_place ? 1 : kInputChunkRows;
  const int64_t chunk_steps = std::max<int64_t>(1, chunk_rows_wanted / batch);
  const int64_t chunk_rows = chunk_steps * batch;

  const LeftOperand<G> x_chunk =
      in_place ? LeftOperand<G>{} : empty_rows<G>(chunk_rows, input_size, p.input.options());
  const LeftOperand<const G> h_0 = left_operand<G>(p.h_0);
  const Tensor bias = p.bias.has_value() && p.bias->defined() ? p.bias->to(at::kFloat) : Tensor();

  // Results. The states are the operands of the steps after them: the output
  // itself where it has the right form, else two steps' in turn.
  const int64_t rows = flat_size(p.input);
  std::vector<int64_t> output_shape = p.input.sizes().vec();
  output_shape.back() = hidden;
  const Tensor output = empty_large(output_shape, p.input.options());
  const Tensor output_rows = flat_rows(output);
  const Tensor activations = p.save ? empty_large({rows, 4 * hidden}, p.input.options()) : Tensor();
  const Tensor c = at::empty(p.c_0.sizes(), p.input.options()).copy_(p.c_0);
  const bool output_is_operand = std::is_same_v<T, G> && depth_h == hidden;
  const LeftOperand<G> states = output_is_operand
                                    ? LeftOperand<G>{output_rows, write<G>(output_rows)}
                                    : empty_rows<G>(2 * batch, hidden, p.input.options());
  const auto states_of = [&](size_t k) {
    return states.rows.from(output_is_operand ? steps[k].offset : k % 2 * batch);
  };

  ForwardArgs<T, G> args;
  args.bias = read_row<float>(bias);
  args.bias_step = hidden;
  args.c = read<T>(c);
  args.c_next = write<T>(c);
  args.h_next = write<T>(output_rows);
  args.activations = write<T>(activations);
  args.activations_step = hidden;

  const int64_t gates_columns = 3 * weights.blocks.width * (ahead ? blocks.count : 1);
  const Tensor gates_buffer = at::empty(
      {grid.threads(), (ahead ? chunk_rows : batch) * gates_columns},
      p.input.options().dtype(at::kFloat));
  const auto& pointwise_part = pointwise<T, G>();

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
      // The input of step k. Laid out, each row of the batch has a place of its own
      // in the chunk, so that threads with other rows can be in another chunk; where
      // the chunk is multiplied at once they are together, and rows lie without gaps.
      const auto x_place = [&](size_t k) {
        const auto step = static_cast<int64_t>(k - first);
        return x_chunk.rows.from(ahead ? steps[k].offset - chunk_begin : step * batch);
      };
      const auto x_of = [&](size_t k) -> Matrix<const G> {
        if (!in_place) return as_const(x_place(k));
        if constexpr (kSplit)
          return {};
        else
          return {input_rows.of(0).row(0) + steps[k].offset * input_size, input_size, 1};
      };
      if (!in_place) {
        for (int64_t member = thread; member < grid.threads(); member += threads) {
          failure.guard([&] {
            for (size_t k = first; k <= last; ++k) {
              const Range own =
                  intersect(share(batch, grid.rows, member / grid.columns), {0, steps[k].rows});
              const Range part = share(own.size(), grid.columns, member % grid.columns);
              const int64_t row = own.begin + part.begin;
              copy_rows(
                  x_place(k).from(row),
                  input_rows.of(steps[k].offset).from(row),
                  part.size(),
                  input_size);
            }
          });
        }
        if (grid.columns > 1) {
#pragma omp barrier
        }
      }
      for (size_t k = first; k <= last; ++k) {
        for (int64_t member = thread; member < grid.threads(); member += threads) {
          const Range own_rows = share(batch, grid.rows, member / grid.columns);
          const Range own_blocks = share(blocks.count, grid.columns, member % grid.columns);
          float* const buffer =
              gates_buffer.mutable_data_ptr<float>() + member * gates_buffer.size(1);
          failure.guard([&] {
            // z of one block: (rows of the chunk, 3 width).
            const auto gates = [&](int64_t block) {
              return buffer + (ahead ? 3 * blocks.begin(block) * chunk_rows : 0);
            };
            // z = x W_x^T for so many rows of z and x.
            const auto project = [&](int64_t block, float* z, Matrix<const G> x, int64_t rows) {
              const int64_t columns = weights.columns(block);
              multiply(
                  rows,
                  columns,
                  depth_x,
                  x.data,
                  x.row_stride,
                  weights.x(block),
                  columns,
                  z,
                  columns,
                  /*accumulate=*/false);
            };
            const Step step = steps[k];
            if (ahead && k == first) {
              const bool backwards = steps[first].offset > steps[last].offset;
              const Step& top = steps[backwards ? first : last];
              const int64_t chunk_end = top.offset + top.rows;
              for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
                if (chunk_end == chunk_begin) break;
                project(
                    block, gates(block), x_of(backwards ? last : first), chunk_end - chunk_begin);
              }
            }
            const Range step_rows = intersect(own_rows, {0, step.rows});
            if (step_rows.size() == 0) return;
            const int64_t carried = carried_rows(steps, k);
            const Range old_rows = intersect(step_rows, {0, carried});
            const Range new_rows = intersect(step_rows, {carried, step.rows});
            const auto before = k > 0 ? as_const(states_of(k - 1)) : Matrix<const G>{};
            if (grid.columns > 1) prefetch(before, old_rows, depth_h);
            for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
              const int64_t unit = blocks.begin(block);
              const int64_t columns = weights.columns(block);
              float* const z = gates(block) + (ahead ? step.offset - chunk_begin : 0) * columns;
              if (!ahead) {
                project(
                    block,
                    z + step_rows.begin * columns,
                    x_of(k).from(step_rows.begin),
                    step_rows.size());
              }
              const auto recur = [&](Range range, Matrix<const G> h) {
                if (range.size() == 0) return;
                multiply(
                    range.size(),
                    columns,
                    depth_h,
                    h.row(range.begin),
                    h.row_stride,
                    weights.h(block),
                    columns,
                    z + range.begin * columns,
                    columns,
                    /*accumulate=*/true);
              };
              recur(old_rows, before);
              recur(new_rows, h_0.rows);

              ForwardArgs<T, G> part = args;
              part.hidden = blocks.size(block);
              part.gates = {z + step_rows.begin * columns, columns, 1};
              part.gates_step = weights.gate_columns(block);
              part.bias = args.bias.from(0, unit);
              part.c = args.c.from(step_rows.begin, unit);
              part.c_next = args.c_next.from(step_rows.begin, unit);
              const int64_t at = step.offset + step_rows.begin;
              part.h_next = args.h_next.from(at, unit);
              if (!output_is_operand) {
                part.h_operand = states_of(k).from(step_rows.begin, unit);
              }
              part.activations = args.activations.from(at, unit);
              pointwise_part.forward(part, 0, step_rows.size() * part.hidden);
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
constexpr int64_t kChunkRows = std::is_same_v<G, BFloat16> ? 4096 : 512;

// The depth of the product with the recurrent weights. BFloat16x3's gates are
// padded each.
template <typename G>
int64_t gate_depth(int64_t hidden) {
  return std::is_same_v<G, BFloat16x3> ? padded_depth<G>(hidden) : hidden;
}

template <typename G>
Grid backward_grid(const BackwardProblem& p) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  const int64_t depth = padded_depth<G>(3 * gate_depth<G>(hidden));
  return choose_grid<G>(
      available_threads(),
      batch,
      hidden,
      hidden * depth * static_cast<int64_t>(sizeof(G)),
      batch * 3 * hidden * hidden);
}

template <typename T, typename G>
Gradients backward(const BackwardProblem& p, bool split_sums = false) {
  const int64_t batch = p.h_0.size(0);
  const int64_t hidden = p.h_0.size(1);
  constexpr bool kSplit = std::is_same_v<G, BFloat16x3>;
  const int64_t operand_step = gate_depth<G>(hidden);
  const int64_t depth = padded_depth<G>(3 * operand_step);
  using S = stored_t<G>;
  const auto options = p.input.options().dtype(at::kFloat);
  const std::vector<Step> steps = plan_steps(p.input, p.batch_sizes, p.reverse);

  const Grid grid = backward_grid<G>(p);
  const Blocks blocks(
      hidden,
      grid.columns,
      block_units<G>(kBackwardUnits<G>, depth * static_cast<int64_t>(sizeof(G)), 2 * kUnits),
      kBlockUnits<G>);

  const Tensor weights = p.weights.to(kOperandDtype<S>).contiguous();
  const auto w = read<S>(weights);
  const StepRows<T> grad_rows(p.grad_output);
  const Tensor grad_h_n = p.grad_h_n.defined() ? p.grad_h_n.to(at::kFloat) : Tensor();
  const auto dh_n = read<float>(grad_h_n);
  const Tensor dc = at::zeros({batch, hidden}, options);
  if (p.grad_c_n.defined()) dc.copy_(p.grad_c_n);
  // dz of the chunk at work; and of the one before, whose last step is needed,
  // where it is the operand too.
  const std::vector<Chunk> chunks = plan_chunks(steps, kChunkRows<G>);
  int64_t chunk_rows = 0;
  for (const Chunk& chunk : chunks) chunk_rows = std::max(chunk_rows, chunk.rows);
  const std::array<LeftOperand<S>, 2> dz_buffers = {
      empty_rows<S>(chunk_rows, 3 * hidden, options),
      empty_rows<S>(chunks.size() > 1 && !kSplit ? chunk_rows : 0, 3 * hidden, options)};
  const auto buffer_of = [&](size_t chunk) -> const LeftOperand<S>& {
    return dz_buffers[kSplit ? 0 : chunk % 2];
  };
  // Split, of two steps in turn.
  const LeftOperand<G> dz_split =
      kSplit ? empty_rows<G>(2 * batch, depth, options) : LeftOperand<G>{};
  GradientSums sums(p, steps, weights, split_sums);

  BackwardArgs<T, G> args;
  args.activations = read<T>(p.activations);
  args.activations_step = hidden;
  args.grad_c = read<float>(dc);
  args.grad_gates_step = hidden;
  args.grad_c_prev = write<float>(dc);
  args.operand_step = operand_step;

  const Tensor packed_buffer = at::empty(
      {padded_columns<G>(hidden) * depth * static_cast<int64_t>(sizeof(G))},
      options.dtype(at::kByte));
  G* const packed = static_cast<G*>(packed_buffer.mutable_data_ptr());
  const Tensor dh_buffer = at::empty({grid.threads(), batch * blocks.width}, options);
  const auto& pointwise_part = pointwise<T, G>();

  const int64_t grain = std::max<int64_t>(1, kPackGrain / (depth * blocks.width));
  at::parallel_for(0, blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t unit = blocks.begin(block);
      const int64_t width = blocks.size(block);
      G* const to = packed + unit * depth;
      if constexpr (kSplit) {
        for (int64_t gate = 0; gate < 3; ++gate) {
          pack_split(to, depth, gate * operand_step, w.from(gate * hidden, unit), hidden, width);
        }
      } else {
        pack_rows(to, width, w.from(0, unit), 3 * hidden, width);
      }
    }
  });

  for (size_t c = chunks.size(); c-- > 0;) {
    const Chunk& chunk = chunks[c];
    // dz of step k of this chunk, or of the step after the chunk.
    const auto dz_of = [&](size_t k) {
      const size_t owner = k < chunk.last ? c : c + 1;
      return buffer_of(owner).rows.from(steps[k].offset - chunks[owner].begin);
    };
    // The same as an operand.
    const auto dz_operand = [&](size_t k) {
      if constexpr (kSplit) {
        return dz_split.rows.from(k % 2 * batch);
      } else {
        return dz_of(k);
      }
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
            const auto dz_next = kept > 0 ? as_const(dz_operand(k + 1)) : Matrix<const G>{};
            if (grid.columns > 1) prefetch(dz_next, going_on, depth);
            for (int64_t block = own_blocks.begin; block < own_blocks.end; ++block) {
              const int64_t unit = blocks.begin(block);
              const int64_t width = blocks.size(block);
              const int64_t columns = padded_columns<G>(width);
              const auto finish = [&](Range range, Matrix<const float> grad_h_state) {
                if (range.size() == 0) return;
                BackwardArgs<T, G> part = args;
                part.hidden = width;
                const int64_t at = step.offset + range.begin;
                part.activations = args.activations.from(at, unit);
                part.grad_h = grad_rows.of(step.offset).from(range.begin, unit);
                part.grad_h_state = grad_h_state;
                part.grad_c = args.grad_c.from(range.begin, unit);
                part.grad_c_prev = args.grad_c_prev.from(range.begin, unit);
                part.grad_gates = dz.from(range.begin, unit);
                bool unsplittable = false;
                if constexpr (kSplit) {
                  part.operand = dz_operand(k).from(range.begin, unit);
                  part.unsplittable = &unsplittable;
                }
                pointwise_part.backward(part, 0, range.size() * width);
                check_split(!unsplittable);
              };
              if (going_on.size() > 0) {
                multiply<G>(
                    going_on.size(),
                    columns,
                    depth,
                    dz_next.row(going_on.begin),
                    dz_next.row_stride,
                    packed + unit * depth,
                    columns,
                    dh,
                    columns,
                    /*accumulate=*/false);
              }
              finish(going_on, {dh, columns, 1});
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
        chunk.first,
        chunk.last,
        buffer_of(c).tensor.slice(0, 0, chunk.rows).slice(1, 0, 3 * hidden));
  }
  return sums.finish(dc);
}

// Rows in all from which it pays to split what the sums over them are made of.
constexpr int64_t kSplitSumRows = 1024;

template <typename T>
ForwardResult forward_in_float(const ForwardProblem& p) {
  const bool packed = !is_prepacked(p.weights) || has_split_blocks(p.weights);
  if (packed && has_micro_kernel<BFloat16x3>() &&
      pays_to_split(forward_grid<BFloat16x3>(p), p.h_0.size(0))) {
    try {
      return forward<T, BFloat16x3>(p);
    } catch (const Unsplittable&) {
      // As below.
    }
  }
  return forward<T, float>(p);
}

template <typename T>
Gradients backward_in_float(const BackwardProblem& p) {
  if (has_micro_kernel<BFloat16x3>()) {
    try {
      if (pays_to_split(backward_grid<BFloat16x3>(p), p.h_0.size(0))) {
        return backward<T, BFloat16x3>(p, /*split_sums=*/true);
      }
      return backward<T, float>(p, p.activations.size(0) >= kSplitSumRows);
    } catch (const Unsplittable&) {
      // As below.
    }
  }
  return backward<T, float>(p, /*split_sums=*/false);
}

}  // namespace

ForwardResult blocked_forward(const ForwardProblem& problem) {
  const bool narrow = is_prepacked(problem.weights) ? has_narrow_blocks(problem.weights)
                                                    : has_micro_kernel<BFloat16>();
  switch (problem.input.scalar_type()) {
    case at::kHalf:
      return forward_in_float<Half>(problem);
    case at::kBFloat16:
      return narrow ? forward<BFloat16, BFloat16>(problem) : forward<BFloat16, float>(problem);
    default:
      return forward_in_float<float>(problem);
  }
}

Gradients blocked_backward(const BackwardProblem& problem) {
  switch (problem.input.scalar_type()) {
    case at::kHalf:
      return backward_in_float<Half>(problem);
    case at::kBFloat16:
      return has_micro_kernel<BFloat16>() ? backward<BFloat16, BFloat16>(problem)
                                          : backward<BFloat16, float>(problem);
    default:
      return backward_in_float<float>(problem);
  }
}

}  // namespace lltm::cpu
