// The float32 GEMM, included by the files per instruction set. B is of any storage type, and is
// widened as it is read.
//
// A tile of C stays in vector registers while a piece of K passes. A piece is short, and its
// products are added to C before the next begins: the rounding errors of a sum grow with the
// number of its terms.
#pragma once

#include "common/matrix.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

#if defined(__AVX2__)

// C (rows of a tile, n) = A B, or +=; n is more than kVectors - 1 vectors, and at most
// kVectors.
template <typename B>
struct GemmTile {
  Matrix<const float> a;
  const B* b;
  std::int64_t b_stride, k, n;
  Matrix<float> c;
  bool accumulate;
  // Rows of B that a later tile will read, as wide as this one, to be fetched meanwhile.
  const B* next_b;
  std::int64_t next_rows;
};

// One vector of C.
LLTM_CELL_INLINE void finish_sums(Floats sums, float* c, std::int64_t n, bool accumulate) {
  if (n == kLanes) {
    store_lanes(accumulate ? load_lanes(c) + sums : sums, c);
  } else {
    store_first(accumulate ? load_first(c, n) + sums : sums, c, n);
  }
}

// Not inlined: among other tiles the compiler runs out of registers.
template <int kRows, int kVectors, typename B>
__attribute__((noinline)) void gemm_tile(const GemmTile<B>& p) {
  Floats sums[kRows][kVectors] = {};
  const std::int64_t last = p.n - (kVectors - 1) * kLanes;  // columns of the last vector
  const auto multiply = [&](const auto& load_last) {
    const B* b = p.b;
    const auto add = [&](std::int64_t k) {
      Floats row[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v + 1 < kVectors; ++v) row[v] = load_lanes(b + v * kLanes);
      row[kVectors - 1] = load_last(b + (kVectors - 1) * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Floats x = broadcast(p.a.row(r)[k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] += x * row[v];
      }
      b += p.b_stride;
    };
    std::int64_t k = 0;
    for (const B* next = p.next_b; k < p.next_rows; ++k, next += p.b_stride) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) __builtin_prefetch(next + v * kLanes);
      add(k);
    }
    for (; k < p.k; ++k) add(k);
  };
  if (last == kLanes) {
    multiply([](const B* x) { return load_lanes(x); });
  } else {
    multiply([&](const B* x) { return load_first(x, last); });
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t columns = v + 1 < kVectors ? kLanes : last;
      finish_sums(sums[r][v], p.c.row(r) + v * kLanes, columns, p.accumulate);
    }
  }
}

template <typename B>
struct GemmTiles {
  int rows;  // of the highest
  void (*of[8])(const GemmTile<B>&);
};
template <typename B, int kVectors, int... kRows>
constexpr GemmTiles<B> make_tiles() {
  return {sizeof...(kRows), {gemm_tile<kRows, kVectors, B>...}};
}
// By the number of vectors. The sums of the largest, a row of B and an element of A fill the
// registers.
#if defined(__AVX512F__)
constexpr std::int64_t kTileVectors = 4;
template <typename B>
constexpr GemmTiles<B> kTiles[kTileVectors] = {
    make_tiles<B, 1, 1, 2, 3, 4, 5, 6, 7, 8>(),
    make_tiles<B, 2, 1, 2, 3, 4, 5, 6, 7, 8>(),
    make_tiles<B, 3, 1, 2, 3, 4, 5, 6, 7, 8>(),
    make_tiles<B, 4, 1, 2, 3, 4, 5, 6>()};
#else
constexpr std::int64_t kTileVectors = 2;
template <typename B>
constexpr GemmTiles<B> kTiles[kTileVectors] = {
    make_tiles<B, 1, 1, 2, 3, 4, 5, 6>(), make_tiles<B, 2, 1, 2, 3, 4, 5, 6>()};
#endif

// `total` in nearly equal parts of at most `most`, the longer ones first. Divisions are slow: two
// for all parts.
struct Parts {
  LLTM_CELL_INLINE Parts(std::int64_t total, std::int64_t most)
      : count((total + most - 1) / most),
        shortest(total / count),
        longer(total - shortest * count) {}
  LLTM_CELL_INLINE std::int64_t size(std::int64_t part) const {
    return shortest + (part < longer ? 1 : 0);
  }

  std::int64_t count, shortest, longer;
};

// All rows of a panel of columns.
template <typename B>
LLTM_CELL_INLINE void gemm_panel(const Parts& heights, const GemmTiles<B>& tiles, GemmTile<B> p) {
  // Each tile fetches its share of the next rows of B.
  const std::int64_t share = (p.k + heights.count - 1) / heights.count;
  std::int64_t left = p.k;
  for (std::int64_t tile = 0; tile < heights.count; ++tile) {
    const std::int64_t rows = heights.size(tile);
    p.next_rows = at_most(left, share);
    tiles.of[rows - 1](p);
    left -= p.next_rows;
    p.next_b += p.next_rows * p.b_stride;
    p.a = p.a.from(rows);
    p.c = p.c.from(rows);
  }
}

// The width of panels, in vectors, that makes the fewest tiles of C.
LLTM_CELL_INLINE std::int64_t panel_vectors(std::int64_t m, std::int64_t vectors) {
  std::int64_t best = 0, fewest = 0;
  for (std::int64_t width = at_most(vectors, kTileVectors); width > 0; --width) {
    const auto high = static_cast<std::int64_t>(kTiles<float>[width - 1].rows);
    const std::int64_t tiles = (vectors + width - 1) / width * ((m + high - 1) / high);
    if (best == 0 || tiles < fewest) {
      best = width;
      fewest = tiles;
    }
  }
  return best;
}

template <typename B>
void gemm_f32(
    std::int64_t m,
    Matrix<const float> a,
    PackedB<const B> b,
    Matrix<float> c,
    std::int64_t longest_chain,
    bool accumulate) {
  const Parts pieces(b.k, longest_chain);
  const std::int64_t vectors = (b.n + kLanes - 1) / kLanes;
  const Parts panels(vectors, panel_vectors(m, vectors));
  std::int64_t column = 0;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    const std::int64_t width = panels.size(panel);
    const GemmTiles<B>& tiles = kTiles<B>[width - 1];
    const Parts heights(m, tiles.rows);
    GemmTile<B> p;
    p.n = at_most(b.n - column, width * kLanes);
    p.a = a;
    p.b = b.data + column;
    p.b_stride = b.ld;
    p.c = c.from(0, column);
    p.accumulate = accumulate;
    column += p.n;
    for (std::int64_t piece = 0; piece < pieces.count; ++piece) {
      p.k = pieces.size(piece);
      p.next_b = piece + 1 < pieces.count ? p.b + p.k * b.ld : b.data + column;
      gemm_panel(heights, tiles, p);
      p.a = p.a.from(0, p.k);
      p.b += p.k * b.ld;
      p.accumulate = true;
    }
  }
}

template <typename B>
constexpr GemmF32<B> kGemmF32 = gemm_f32<B>;

#else
template <typename B>
constexpr GemmF32<B> kGemmF32 = nullptr;
#endif

}  // namespace
}  // namespace lltm::cpu
