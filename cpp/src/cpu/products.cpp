#include "cpu/products.h"

#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <omp.h>

#include <algorithm>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Columns of the result that one call of the micro-kernel computes. The right
// operand is copied into bands of so many columns: read as it lies, its rows
// are far apart, and a stride that is a power of two leaves it only a few
// places in the cache.
constexpr int64_t kColumns = 64;
// Rows summed over between two visits of a part of the result, which is read
// and written each time: 2 kB of a column.
template <typename G>
constexpr int64_t kChunk = 2048 / sizeof(G);
// Tiers of kMaxRows rows of the result that are worked through for all columns
// before the next ones: so many that the copy of a band pays, so few that their
// part of the transpose stays in the second-level cache.
constexpr int64_t kGroupTiers = 8;
// Depths of a last, shorter chunk are multiples of this, so that there are few.
constexpr int64_t kDepths = 32;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

Transpose<float> transpose_of(float) {
  return kernels().transpose_f32;
}
Transpose<BFloat16> transpose_of(BFloat16) {
  return kernels().transpose_bf16;
}

}  // namespace

template <typename G>
bool is_operand(const Tensor& x) {
  return x.scalar_type() == kOperandDtype<G> && x.stride(1) == 1 &&
         is_operand_stride(x.stride(0), x.size(1));
}

template bool is_operand<float>(const Tensor&);

RightOperand::RightOperand(const Tensor& b) : matrix_(b) {
  if (b.numel() == 0 || !is_operand<float>(b) || !has_micro_kernel<float>()) return;
  const int64_t depth = b.size(0);
  const int64_t columns = b.size(1);
  packed_ = at::empty({b.numel()}, b.options());
  const auto matrix = read<float>(b);
  float* const packed = packed_.mutable_data_ptr<float>();
  at::parallel_for(0, (columns + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * kColumns; n < std::min(columns, end * kColumns); n += kColumns) {
      const int64_t width = std::min(kColumns, columns - n);
      pack_rows(packed + n * depth, width, matrix.from(0, n), depth, width);
    }
  });
}

void RightOperand::multiply(Tensor out, const Tensor& a) const {
  if (!packed_.defined() || a.size(0) == 0 || !is_operand<float>(a) || !is_operand<float>(out)) {
    at::mm_out(out, a, matrix_);
    return;
  }
  const int64_t rows = a.size(0);
  const int64_t depth = matrix_.size(0);
  const int64_t columns = matrix_.size(1);
  const auto x = read<float>(a);
  const auto y = write<float>(out);
  const float* const packed = packed_.const_data_ptr<float>();
  const int64_t bands = (columns + kColumns - 1) / kColumns;
  const int64_t tasks = (rows + kMaxRows - 1) / kMaxRows * bands;
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / bands * kMaxRows;
      const int64_t n = task % bands * kColumns;
      const int64_t width = std::min(kColumns, columns - n);
      cpu::multiply(
          std::min(kMaxRows, rows - r),
          width,
          depth,
          x.row(r),
          x.row_stride,
          packed + n * depth,
          width,
          y.row(r) + n,
          y.row_stride,
          /*accumulate=*/false);
    }
    release_micro_kernel();
  });
}

namespace {

// By the micro-kernel; `a` and `b` are operands of it.
template <typename G>
void add_blocks(const Tensor& out, const std::vector<Pieces>& a, const Tensor& b) {
  const int64_t rows = b.size(0);
  const int64_t height = out.size(0);
  const int64_t columns = out.size(1);
  const auto w = read<G>(b);
  const auto y = write<float>(out);
  const auto transpose = transpose_of(G{});
  const int64_t bands = (columns + kColumns - 1) / kColumns;
  const int64_t tiers = (height + kMaxRows - 1) / kMaxRows;
  const int64_t parts = std::min(available_threads(), bands * tiers);
  const int64_t chunk_rows = std::min(round_up(rows, kDepths), kChunk<G>);
  // Two, so that a thread that is done with one chunk can begin the next.
  const Tensor transposes = at::empty({2, height * chunk_rows}, b.options());
  const Tensor copies = at::empty({parts, kColumns * chunk_rows}, b.options());

  // Rows [first, first + size) of the columns [m0, m1) of a, transposed to xt,
  // whose rows have length `depth` and end in zeros.
  const auto transpose_chunk = [&](G* xt, int64_t first, int64_t size, int64_t depth, Range own) {
    int64_t left = 0;
    for (const Pieces& part : a) {
      const int64_t width = part.empty() ? 0 : part.front().size(1);
      const Range columns_here = intersect(own, {left, left + width});
      int64_t top = 0;
      for (const Tensor& piece : part) {
        const Range here = intersect({first, first + size}, {top, top + piece.size(0)});
        if (here.size() > 0 && columns_here.size() > 0) {
          transpose(
              here.size(),
              columns_here.size(),
              read<G>(piece).row(here.begin - top) + columns_here.begin - left,
              piece.stride(0),
              xt + columns_here.begin * depth + here.begin - first,
              depth);
        }
        top += piece.size(0);
      }
      left += width;
    }
    for (int64_t m = own.begin; m < own.end && size < depth; ++m) {
      std::fill(xt + m * depth + size, xt + (m + 1) * depth, G{});
    }
  };

  Failure failure;
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int64_t thread = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();
    const Range tiles = share((height + 15) / 16, threads, thread);
    const Range own_height = {std::min(tiles.begin * 16, height), std::min(tiles.end * 16, height)};
    const Range tasks = share(bands * tiers, threads, thread);
    G* const band = static_cast<G*>(copies.mutable_data_ptr()) + thread * copies.size(1);
    for (int64_t first = 0; first < rows; first += chunk_rows) {
      const int64_t size = std::min(chunk_rows, rows - first);
      const int64_t depth = round_up(size, kDepths);
      G* const xt = static_cast<G*>(transposes.mutable_data_ptr()) +
                    (first / chunk_rows) % 2 * transposes.size(1);
      failure.guard([&] { transpose_chunk(xt, first, size, depth, own_height); });
#pragma omp barrier
      failure.guard([&] {
        for (int64_t task = tasks.begin; task < tasks.end; ++task) {
          const int64_t group = task / (bands * kGroupTiers) * kGroupTiers;
          const int64_t in_group = std::min(kGroupTiers, tiers - group);
          const int64_t place = task - group * bands;
          const int64_t n = place / in_group * kColumns;
          const int64_t m = (group + place % in_group) * kMaxRows;
          const int64_t width = std::min(kColumns, columns - n);
          if (task == tasks.begin || place % in_group == 0) {
            pack_rows(band, width, w.from(first, n), size, width);
            std::fill(band + padded_depth<G>(size) * width, band + depth * width, G{});
          }
          multiply(
              std::min(kMaxRows, height - m),
              width,
              depth,
              xt + m * depth,
              depth,
              band,
              width,
              y.row(m) + n,
              y.row_stride,
              /*accumulate=*/true);
        }
      });
    }
    release_micro_kernel();
  }
  failure.rethrow();
}

template <typename G>
bool are_operands(const Tensor& out, const std::vector<Pieces>& a, const Tensor& b) {
  bool result = is_operand<G>(b) && is_operand<float>(out) && has_micro_kernel<G>();
  for (const Pieces& part : a) {
    for (const Tensor& piece : part) result = result && is_operand<G>(piece);
  }
  return result;
}

}  // namespace

void add_transposed_product(Tensor out, const std::vector<Pieces>& a, const Tensor& b) {
  if (b.size(0) == 0 || out.numel() == 0) return;
  if (are_operands<float>(out, a, b)) return add_blocks<float>(out, a, b);
  if (are_operands<BFloat16>(out, a, b)) return add_blocks<BFloat16>(out, a, b);
  int64_t top = 0;
  for (const Pieces& part : a) {
    const Tensor x = part.size() == 1 ? part.front() : at::cat(part);
    out.narrow(0, top, x.size(1)).add_(at::mm(x.t(), b));
    top += x.size(1);
  }
}

Tensor transposed(const Tensor& x) {
  if (x.scalar_type() != at::kFloat || x.stride(1) != 1) return x.t().contiguous();
  const Tensor y = at::empty({x.size(1), x.size(0)}, x.options());
  const auto from = read<float>(x);
  const auto to = write<float>(y);
  constexpr int64_t kGrainElements = 1 << 14;
  const int64_t grain = kGrainElements / std::max<int64_t>(1, x.size(0)) / 16 * 16 + 16;
  at::parallel_for(0, x.size(1), grain, [&](int64_t begin, int64_t end) {
    kernels().transpose_f32(
        x.size(0), end - begin, from.data + begin, from.row_stride, to.row(begin), to.row_stride);
  });
  return y;
}

}  // namespace lltm::cpu
