#include "cpu/products.h"

#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"
#include "cpu/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <omp.h>

#include <algorithm>

namespace lltm::cpu {
namespace {

using at::Tensor;

// Columns of the result that one call of the micro-kernel computes.
constexpr int64_t kColumns = 64;
// Rows summed over between two visits of a part of the result: so many that
// reading and writing the result does not count, so few that their transpose
// stays in the cache.
constexpr int64_t kChunk = 256;

bool takes_blocks(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.numel() > 0 &&
         b.numel() > 0 && a.stride(1) == 1 && b.stride(1) == 1 &&
         is_operand_stride(a.stride(0), a.size(1)) && is_operand_stride(b.stride(0), b.size(1)) &&
         has_micro_kernel<float>();
}

}  // namespace

void product(Tensor out, const Tensor& a, const Tensor& b) {
  if (!takes_blocks(a, b) || out.stride(1) != 1) {
    at::mm_out(out, a, b);
    return;
  }
  const int64_t rows = a.size(0);
  const int64_t depth = a.size(1);
  const int64_t columns = b.size(1);
  const auto x = read<float>(a);
  const auto w = read<float>(b);
  const auto y = write<float>(out);
  at::parallel_for(0, (rows + kMaxRows - 1) / kMaxRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * kMaxRows; r < std::min(rows, end * kMaxRows); r += kMaxRows) {
      for (int64_t n = 0; n < columns; n += kColumns) {
        multiply(
            std::min(kMaxRows, rows - r),
            std::min(kColumns, columns - n),
            depth,
            x.row(r),
            x.row_stride,
            w.data + n,
            w.row_stride,
            y.row(r) + n,
            y.row_stride,
            /*accumulate=*/false);
      }
    }
    release_micro_kernel();
  });
}

void transposed_product(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (!takes_blocks(a, b) || out.stride(1) != 1) {
    if (out.scalar_type() != a.scalar_type()) {
      const Tensor sum = at::mm(a.t(), b);
      accumulate ? out.add_(sum) : out.copy_(sum);
    } else if (accumulate) {
      out.addmm_(a.t(), b);
    } else {
      at::mm_out(out, a.t(), b);
    }
    return;
  }
  const int64_t rows = a.size(0);
  const int64_t height = a.size(1);
  const int64_t columns = b.size(1);
  const auto x = read<float>(a);
  const auto w = read<float>(b);
  const auto y = write<float>(out);
  const auto transpose = kernels().transpose_f32;
  const int64_t parts = available_threads();
  const int64_t chunk_rows = std::min(rows, kChunk);
  // Two, so that a thread that is done with one chunk can begin the next.
  const Tensor buffers = at::empty({2, height * chunk_rows}, a.options());
  const int64_t bands = (columns + kColumns - 1) / kColumns;

  Failure failure;
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int64_t thread = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();
    const Range own_height = share((height + 15) / 16, threads, thread);
    const Range own_bands = share(bands, threads, thread);
    for (int64_t first = 0; first < rows; first += chunk_rows) {
      const int64_t size = std::min(chunk_rows, rows - first);
      float* const xt =
          buffers.mutable_data_ptr<float>() + (first / chunk_rows) % 2 * buffers.size(1);
      const int64_t m0 = own_height.begin * 16;
      const int64_t m1 = std::min(own_height.end * 16, height);
      if (m0 < m1) {
        transpose(size, m1 - m0, x.row(first) + m0, x.row_stride, xt + m0 * size, size);
      }
#pragma omp barrier
      failure.guard([&] {
        for (int64_t band = own_bands.begin; band < own_bands.end; ++band) {
          const int64_t n = band * kColumns;
          multiply(
              height,
              std::min(kColumns, columns - n),
              size,
              xt,
              size,
              w.row(first) + n,
              w.row_stride,
              y.data + n,
              y.row_stride,
              accumulate || first > 0);
        }
      });
    }
    release_micro_kernel();
  }
  failure.rethrow();
}

Tensor transposed(const Tensor& x) {
  if (x.scalar_type() != at::kFloat || x.stride(1) != 1) return x.t().contiguous();
  const Tensor y = at::empty({x.size(1), x.size(0)}, x.options());
  kernels().transpose_f32(
      x.size(0),
      x.size(1),
      x.const_data_ptr<float>(),
      x.stride(0),
      y.mutable_data_ptr<float>(),
      y.stride(0));
  return y;
}

}  // namespace lltm::cpu
