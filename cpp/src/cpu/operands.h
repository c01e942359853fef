// Laying out right operands (depth, columns) of the micro-kernel: as it wants
// them, in rows `ld` elements apart (micro_kernel.h, kRowsTogether).
#pragma once

#include "cpu/dispatch.h"
#include "cpu/micro_kernel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lltm::cpu {

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

}  // namespace lltm::cpu
