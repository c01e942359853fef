// Laying out operands of the micro-kernel as it wants them (micro_kernel.h).
#pragma once

#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <type_traits>

namespace lltm::cpu {

// Thrown where an operand of type BFloat16x3 cannot be laid out, because a number
// in it is too large or infinite. The products are then to be done in float.
struct Unsplittable : std::exception {};

inline void check_split(bool good) {
  if (!good) throw Unsplittable();
}

// ---- left operands ----------------------------------------------------------

// (rows, columns), its rows contiguous and padded with zeros to the depth that
// the micro-kernel needs.
template <typename G>
struct LeftOperand {
  at::Tensor tensor;
  Matrix<G> rows;
};

template <typename G>
LeftOperand<G> empty_rows(int64_t rows, int64_t columns, at::TensorOptions options) {
  if constexpr (std::is_same_v<G, BFloat16x3>) {
    const int64_t stride = split_stride(columns);
    const auto bytes = static_cast<int64_t>(sizeof(G));
    at::Tensor tensor = at::empty({rows, stride * bytes}, options.dtype(at::kByte));
    return {tensor, {static_cast<G*>(tensor.mutable_data_ptr()), stride, 1}};
  } else {
    const int64_t depth = padded_depth<G>(columns);
    options = options.dtype(kOperandDtype<G>);
    at::Tensor tensor =
        depth == columns ? at::empty({rows, depth}, options) : at::zeros({rows, depth}, options);
    return {tensor, write<G>(tensor)};
  }
}

// x (rows, columns), its rows contiguous, as a left operand in rows of `operand`.
inline void copy_rows(
    Matrix<BFloat16x3> operand, Matrix<const float> x, int64_t rows, int64_t columns) {
  check_split(
      kernels().split.rows(rows, columns, x.data, x.row_stride, operand.data, operand.row_stride));
}
template <typename G>
void copy_rows(Matrix<G> operand, Matrix<const G> x, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(x.row(r), columns, operand.row(r));
}

// A tensor as a left operand: itself if it will do, else a copy.
template <typename G>
LeftOperand<const G> left_operand(const at::Tensor& tensor) {
  const int64_t columns = tensor.size(1);
  if constexpr (std::is_same_v<G, BFloat16x3>) {
    const LeftOperand<G> operand = empty_rows<G>(tensor.size(0), columns, tensor.options());
    const at::Tensor floats = tensor.to(at::kFloat).contiguous();
    copy_rows(operand.rows, read<float>(floats), tensor.size(0), columns);
    return {operand.tensor, {operand.rows.data, operand.rows.row_stride, 1}};
  } else {
    at::Tensor rows = tensor.to(kOperandDtype<G>);
    if (padded_depth<G>(columns) != columns) {
      const at::Tensor padded = empty_rows<G>(tensor.size(0), columns, tensor.options()).tensor;
      padded.slice(1, 0, columns).copy_(tensor);
      rows = padded;
    } else if (rows.stride(1) != 1 || !is_operand_stride(rows.stride(0), columns)) {
      // A single row counts as contiguous whatever its stride.
      rows = rows.contiguous().as_strided(rows.sizes(), {columns, 1});
    }
    return {rows, read<G>(rows)};
  }
}

// ---- right operands ---------------------------------------------------------
// Of (depth, columns), in rows `ld` elements apart, where it has rows.

// Elements of weights below which a second thread does not pay.
constexpr int64_t kPackGrain = 16384;

// Element (k, n) is element(k, n). In tiles, so that neither side strides far.
template <typename G, typename Element>
void pack(G* packed, int64_t ld, int64_t depth, int64_t columns, Element element) {
  constexpr int64_t kTile = 16;
  constexpr int64_t kTogether = kRowsTogether<G>;
  for (int64_t k0 = 0; k0 < padded_depth<G>(depth); k0 += kTile) {
    const int64_t k1 = std::min(k0 + kTile, padded_depth<G>(depth));
    for (int64_t n0 = 0; n0 < columns; n0 += kTile) {
      const int64_t n1 = std::min(n0 + kTile, columns);
      for (int64_t n = n0; n < n1; ++n) {
        for (int64_t k = k0; k < k1; ++k) {
          packed[(k / kTogether * ld + n) * kTogether + k % kTogether] =
              k < depth ? element(k, n) : G{};
        }
      }
    }
  }
}

// Zeros in what padding adds to the depth; a last row without a partner has been
// given one.
template <typename G>
void pad_depth(G* packed, int64_t ld, int64_t depth, int64_t columns) {
  constexpr int64_t kTogether = kRowsTogether<G>;
  const int64_t filled = (depth + kTogether - 1) / kTogether * kTogether;
  for (int64_t k = filled; k < padded_depth<G>(depth); k += kTogether) {
    std::fill_n(packed + k * ld, columns * kTogether, G{});
  }
}

// x (depth, columns) as it is.
template <typename G>
void pack_rows(G* packed, int64_t ld, Matrix<const G> x, int64_t depth, int64_t columns) {
  if (x.col_stride != 1) {
    pack(packed, ld, depth, columns, [&](int64_t k, int64_t n) {
      return x.row(k)[n * x.col_stride];
    });
  } else if constexpr (std::is_same_v<G, float>) {
    for (int64_t k = 0; k < depth; ++k) {
      std::memcpy(packed + k * ld, x.row(k), columns * sizeof(float));
    }
  } else {
    for (int64_t k = 0; k < depth; k += 2) {
      kernels().pair_rows_bf16(
          columns, x.row(k), k + 1 < depth ? x.row(k + 1) : nullptr, packed + k * ld);
    }
    pad_depth(packed, ld, depth, columns);
  }
}

// The transpose of x (columns, depth).
template <typename G>
void pack_transposed(G* packed, int64_t ld, Matrix<const G> x, int64_t depth, int64_t columns) {
  constexpr int64_t kTogether = kRowsTogether<G>;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data) % sizeof(float) == 0;
  if (x.col_stride != 1 || x.row_stride % kTogether != 0 || depth % kTogether != 0 || !aligned) {
    pack(packed, ld, depth, columns, [&](int64_t k, int64_t n) {
      return x.row(n)[k * x.col_stride];
    });
    return;
  }
  // Elements that lie together, two of bfloat16, move as one float.
  kernels().transpose_f32(
      columns,
      depth / kTogether,
      reinterpret_cast<const float*>(x.data),
      x.row_stride / kTogether,
      reinterpret_cast<float*>(packed),
      ld);
  pad_depth(packed, ld, depth, columns);
}

// Rows of a right operand of type BFloat16x3 and of `depth` rows from number `first`
// on, a multiple of 32: x (rows, columns), and zeros up to a multiple of 32.
inline void pack_split(
    BFloat16x3* operand,
    int64_t depth,
    int64_t first,
    Matrix<const float> x,
    int64_t rows,
    int64_t columns) {
  check_split(
      kernels().split.pack(
          rows, columns, x.data, x.row_stride, operand + first * kSplitPanel, depth * kSplitPanel));
}

// x (depth, columns) as it is, likewise.
inline void pack_rows(
    BFloat16x3* operand, int64_t, Matrix<const float> x, int64_t depth, int64_t columns) {
  pack_split(operand, padded_depth<BFloat16x3>(depth), 0, x, depth, columns);
}

// Columns of a right operand of type BFloat16x3 from number `first` on, a multiple
// of 16: the transpose of x (columns, depth).
inline void pack_split_transposed(
    BFloat16x3* operand, int64_t first, Matrix<const float> x, int64_t depth, int64_t columns) {
  const int64_t stride = padded_depth<BFloat16x3>(depth) * kSplitPanel;
  check_split(
      kernels().split.pack_transposed(
          columns, depth, x.data, x.row_stride, operand + first / kSplitPanel * stride, stride));
}

}  // namespace lltm::cpu
