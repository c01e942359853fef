#include "cpu/products.h"

#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
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

Transpose<float> transpose_of(float) {
  return kernels().transpose_f32;
}
Transpose<BFloat16> transpose_of(BFloat16) {
  return kernels().transpose_bf16;
}

// A block of a result: itself where the micro-kernel may write it, else a copy
// that is moved there.
template <typename G>
class ResultBlock {
 public:
  // With room for so many rows and columns.
  ResultBlock(int64_t rows, int64_t columns) : room_(rows * padded_columns<G>(columns)) {}

  void multiply(
      Matrix<float> out,
      int64_t rows,
      int64_t columns,
      int64_t depth,
      Matrix<const G> a,
      const G* b) {
    const int64_t padded = padded_columns<G>(columns);
    const bool direct = padded == columns;
    if (!direct) copy_.resize(room_);
    cpu::multiply(
        rows,
        padded,
        depth,
        a.data,
        a.row_stride,
        b,
        padded,
        direct ? out.data : copy_.data(),
        direct ? out.row_stride : padded,
        /*accumulate=*/false);
    for (int64_t r = 0; !direct && r < rows; ++r) {
      std::copy_n(copy_.data() + r * padded, columns, out.row(r));
    }
  }

 private:
  size_t room_;
  std::vector<float> copy_;
};

// Whether the micro-kernel for G reads the rows of this 2-d tensor in place.
template <typename G>
bool is_operand(const Tensor& x) {
  return x.scalar_type() == kOperandDtype<G> && x.stride(1) == 1 &&
         is_operand_stride(x.stride(0), x.size(1));
}

// Whether the rows of this 2-d tensor can be laid out by vector code, or are
// those of a buffer of ours.
template <typename G>
bool has_rows(const Tensor& x) {
  return x.scalar_type() == kOperandDtype<G> && x.stride(1) == 1 && x.stride(0) >= x.size(1);
}

}  // namespace

RightOperand::RightOperand(const Tensor& b, bool split) : matrix_(b), split_(split) {
  if (b.numel() == 0 || !has_rows<float>(b) || !has_micro_kernel<float>()) return;
  split ? pack<BFloat16x3>() : pack<float>();
}

// In bands of kColumns columns.
template <typename G>
void RightOperand::pack() {
  const int64_t rows = matrix_.size(0);
  const int64_t columns = matrix_.size(1);
  const int64_t depth = padded_depth<G>(rows);
  packed_ = at::empty(
      {depth * padded_columns<G>(columns) * static_cast<int64_t>(sizeof(G))},
      matrix_.options().dtype(at::kByte));
  const auto matrix = read<float>(matrix_);
  G* const packed = static_cast<G*>(packed_.mutable_data_ptr());
  at::parallel_for(0, (columns + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * kColumns; n < std::min(columns, end * kColumns); n += kColumns) {
      const int64_t width = std::min(kColumns, columns - n);
      pack_rows(packed + n * depth, width, matrix.from(0, n), rows, width);
    }
  });
}

void RightOperand::multiply(Tensor out, const Tensor& a) const {
  if (!packed_.defined() || a.size(0) == 0 || !has_rows<float>(a) || !is_operand<float>(out)) {
    at::mm_out(out, a, matrix_);
  } else {
    split_ ? multiply_blocks<BFloat16x3>(out, a) : multiply_blocks<float>(out, a);
  }
}

template <typename G>
void RightOperand::multiply_blocks(const Tensor& out, const Tensor& a) const {
  const int64_t rows = a.size(0);
  const int64_t columns = matrix_.size(1);
  const int64_t depth = padded_depth<G>(matrix_.size(0));
  const auto x = read<float>(a);
  const auto y = write<float>(out);
  const G* const packed = static_cast<const G*>(packed_.const_data_ptr());
  const int64_t bands = (columns + kColumns - 1) / kColumns;
  const int64_t tasks = (rows + kMaxRows - 1) / kMaxRows * bands;
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    ResultBlock<G> block(kMaxRows, kColumns);
    LeftOperand<G> split_rows;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / bands * kMaxRows;
      const int64_t n = task % bands * kColumns;
      const int64_t height = std::min(kMaxRows, rows - r);
      Matrix<const G> left;
      if constexpr (std::is_same_v<G, BFloat16x3>) {
        if (task == begin) split_rows = empty_rows<G>(kMaxRows, depth, a.options());
        if (task == begin || n == 0) copy_rows(split_rows.rows, x.from(r), height, a.size(1));
        left = {split_rows.rows.data, split_rows.rows.row_stride};
      } else {
        left = x.from(r);
      }
      block.multiply(
          y.from(r, n), height, std::min(kColumns, columns - n), depth, left, packed + n * depth);
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
bool have_rows(const Tensor& out, const std::vector<Pieces>& a, const Tensor& b) {
  bool result = has_rows<G>(b) && is_operand<float>(out) && has_micro_kernel<G>();
  for (const Pieces& part : a) {
    for (const Tensor& piece : part) result = result && has_rows<G>(piece);
  }
  return result;
}

}  // namespace

void add_transposed_product(Tensor out, const std::vector<Pieces>& a, const Tensor& b) {
  if (b.size(0) == 0 || out.numel() == 0) return;
  if (have_rows<float>(out, a, b)) return add_blocks<float>(out, a, b);
  if (have_rows<BFloat16>(out, a, b)) return add_blocks<BFloat16>(out, a, b);
  int64_t top = 0;
  for (const Pieces& part : a) {
    const Tensor x = part.size() == 1 ? part.front() : at::cat(part);
    out.narrow(0, top, x.size(1)).add_(at::mm(x.t(), b));
    top += x.size(1);
  }
}

TransposedSum::TransposedSum(int64_t height, int64_t columns, const at::TensorOptions& options)
    : columns_(columns) {
  constexpr int64_t kMostBytes = 1 << 25;
  const int64_t bands = (columns + kColumns - 1) / kColumns;
  const int64_t bytes = bands * height * kColumns * static_cast<int64_t>(sizeof(float));
  const int64_t sums = std::clamp<int64_t>(kMostBytes / bytes, 1, available_threads());
  sums_ = at::zeros({sums, bands, height, kColumns}, options);
}

// Each thread lays out what it multiplies: to share it would save less than it
// costs to fetch what another thread has just written.
void TransposedSum::add(const std::vector<Tensor>& a, const Tensor& b) {
  using G = BFloat16x3;
  constexpr int64_t kSlice = 128;  // rows summed over at a time
  const int64_t sums = sums_.size(0);
  const int64_t bands = sums_.size(1);
  const int64_t height = sums_.size(2);
  const int64_t groups = (b.size(0) + kSplitGroup - 1) / kSplitGroup;
  const int64_t per_sum = std::clamp<int64_t>(available_threads() / sums, 1, bands);
  const auto w = read<float>(b);
  std::vector<Tensor> parts;
  for (const Tensor& part : a) parts.push_back(part.contiguous());

  at::parallel_for(0, sums * per_sum, 1, [&](int64_t begin, int64_t end) {
    const LeftOperand<G> xt = empty_rows<G>(height, kSlice, b.options());
    const LeftOperand<G> band_operand = empty_rows<G>(kSlice, kColumns, b.options());
    G* const packed = band_operand.rows.data;
    for (int64_t member = begin; member < end; ++member) {
      const int64_t sum = member % sums;
      const Range own_groups = share(groups, sums, sum);
      const Range own_bands = share(bands, per_sum, member / sums);
      const int64_t last = std::min(own_groups.end * kSplitGroup, b.size(0));
      for (int64_t first = own_groups.begin * kSplitGroup; first < last; first += kSlice) {
        const int64_t rows = std::min(kSlice, last - first);
        int64_t top = 0;
        for (const Tensor& part : parts) {
          const auto x = read<float>(part).from(first);
          const auto to = xt.rows.from(top);
          check_split(
              kernels().split.columns(
                  rows, part.size(1), x.data, x.row_stride, to.data, to.row_stride));
          top += part.size(1);
        }
        for (int64_t band = own_bands.begin; band < own_bands.end; ++band) {
          const int64_t n = band * kColumns;
          const int64_t width = std::min(kColumns, columns_ - n);
          pack_rows(packed, width, w.from(first, n), rows, width);
          multiply(
              height,
              padded_columns<G>(width),
              padded_depth<G>(rows),
              static_cast<const G*>(xt.rows.data),
              xt.rows.row_stride,
              packed,
              width,
              sums_.mutable_data_ptr<float>() + (sum * bands + band) * height * kColumns,
              kColumns,
              /*accumulate=*/true);
        }
      }
    }
  });
}

Tensor TransposedSum::result() const {
  const Tensor sum = sums_.size(0) == 1 ? sums_[0] : sums_.sum(0);
  return sum.permute({1, 0, 2}).flatten(1).slice(1, 0, columns_);
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
