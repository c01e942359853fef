// GEMMs for float32 and bfloat16, included once per instruction set.
//
// A C tile stays in registers for a piece of K, and is then added to C. Pieces are short: their
// part of B stays in the cache for all rows, and rounding errors grow with a sum's length.
#pragma once

#include "common/matrix.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

#if defined(__AVX2__) || defined(__aarch64__)

// A Product has A and B types, the number of interleaved B rows, and how a column vector is
// accumulated: in kParts steps, each with a part of A and B. kByColumns: loop order. With 6 or 12
// sums, the BF16 instruction is twice as fast by columns (Zen 4). AVX2 has too few registers for an
// A column.

template <typename Storage>
struct F32Product {
  using A = float;
  using B = Storage;
  static constexpr int kVnniFactor = 1, kParts = 1;
  static constexpr bool kByColumns = false;

  template <int>
  LLTM_CELL_INLINE static Floats load(const B* b) {
    return load_lanes(b);
  }
  template <int>
  LLTM_CELL_INLINE static Floats load_some(const B* b, std::int64_t n) {
    return load_first(b, n);
  }
  template <int>
  LLTM_CELL_INLINE static Floats broadcast_of(const A* a) {
    return broadcast(*a);
  }
  LLTM_CELL_INLINE static Floats add(Floats sums, Floats a, Floats b) { return sums + a * b; }
};

#if defined(__AVX512F__)
// bfloat16 pairs as a float's bits: one step with AVX512_BF16, otherwise the even and then the odd
// rows, widened.
struct Bf16Product {
  using A = BFloat16;
  using B = BFloat16;
  static constexpr int kVnniFactor = 2;
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;
  static constexpr bool kByColumns = true;
  template <int>
  LLTM_CELL_INLINE static Floats part_of(__m512i pairs) {
    return _mm512_castsi512_ps(pairs);
  }
  LLTM_CELL_INLINE static Floats add(Floats sums, Floats a, Floats b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
  }
#else
  static constexpr int kParts = 2;
  static constexpr bool kByColumns = false;
  template <int kPart>
  LLTM_CELL_INLINE static Floats part_of(__m512i pairs) {
    return _mm512_castsi512_ps(
        kPart == 0 ? _mm512_slli_epi32(pairs, 16)
                   : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  LLTM_CELL_INLINE static Floats add(Floats sums, Floats a, Floats b) { return sums + a * b; }
#endif

  template <int kPart>
  LLTM_CELL_INLINE static Floats load(const B* b) {
    return part_of<kPart>(_mm512_loadu_si512(b));
  }
  template <int kPart>
  LLTM_CELL_INLINE static Floats load_some(const B* b, std::int64_t n) {
    return part_of<kPart>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), b));
  }
  template <int kPart>
  LLTM_CELL_INLINE static Floats broadcast_of(const A* a) {
    int pair;
    __builtin_memcpy(&pair, a, sizeof(pair));
    return part_of<kPart>(_mm512_set1_epi32(pair));
  }
};
#endif

// C (tile rows, n) = A B, or +=, with n columns in kVectors vectors. k and b_stride count
// interleaved rows once.
template <typename Product>
struct GemmTile {
  using A = typename Product::A;
  using B = typename Product::B;
  static constexpr int kVnniFactor = Product::kVnniFactor;

  Matrix<const A> a;
  const B* b;
  std::int64_t b_stride, k, n;
  Matrix<float> c;
  bool accumulate;
  const B* next_b;
  std::int64_t next_rows;
};

LLTM_CELL_INLINE void finish_sums(Floats sums, float* c, std::int64_t n, bool accumulate) {
  if (n == kLanes) {
    store_lanes(accumulate ? load_lanes(c) + sums : sums, c);
  } else {
    store_first(accumulate ? load_first(c, n) + sums : sums, c, n);
  }
}

template <int kParts, typename Body>
LLTM_CELL_INLINE void for_each_part(const Body& body) {
  body.template operator()<0>();
  if constexpr (kParts > 1) body.template operator()<1>();
}

// Not inlined: several inlined tiles would need too many registers.
template <int kRows, int kVectors, typename Product>
__attribute__((noinline)) void gemm_tile(const GemmTile<Product>& p) {
  using B = typename Product::B;
  constexpr std::int64_t kVnniFactor = Product::kVnniFactor;
  constexpr std::int64_t kVector = kLanes * kVnniFactor;  // B elements
  Floats sums[kRows][kVectors] = {};
  const std::int64_t last = p.n - (kVectors - 1) * kLanes;  // columns in the last vector
  const auto multiply = [&]<bool kWhole>() __attribute__((always_inline)) {
    const B* b = p.b;
    const auto add_part = [&]<int kPart>(std::int64_t k) __attribute__((always_inline)) {
      const auto load = [&](int v) __attribute__((always_inline)) {
        const B* const from = b + v * kVector;
        return kWhole || v + 1 < kVectors ? Product::template load<kPart>(from)
                                          : Product::template load_some<kPart>(from, last);
      };
      const auto broadcast = [&](int r) __attribute__((always_inline)) {
        return Product::template broadcast_of<kPart>(p.a.row(r) + k * kVnniFactor);
      };
      if constexpr (Product::kByColumns) {
        Floats x[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) x[r] = broadcast(r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Floats row = load(v);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r][v] = Product::add(sums[r][v], x[r], row);
        }
      } else {
        Floats row[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) row[v] = load(v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Floats x = broadcast(r);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[r][v] = Product::add(sums[r][v], x, row[v]);
        }
      }
    };
    const auto add = [&](std::int64_t k) __attribute__((always_inline)) {
      for_each_part<Product::kParts>([&]<int kPart>() __attribute__((always_inline)) {
        add_part.template operator()<kPart>(k);
      });
      b += p.b_stride;
    };
    std::int64_t k = 0;
    for (const B* next = p.next_b; k < p.next_rows; ++k, next += p.b_stride) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v += kVectorsOfLine) __builtin_prefetch(next + v * kVector);
      add(k);
    }
#pragma GCC unroll 4
    for (; k < p.k; ++k) add(k);
  };
  if (last == kLanes) {
    multiply.template operator()<true>();
  } else {
    multiply.template operator()<false>();
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

template <typename Product>
struct GemmTiles {
  int rows;  // rows in the highest tile
  void (*of[8])(const GemmTile<Product>&);
};
template <typename Product, int kVectors, int... kRows>
constexpr GemmTiles<Product> make_tiles() {
  return {sizeof...(kRows), {gemm_tile<kRows, kVectors, Product>...}};
}
// By vector count. In the largest, the sums, with a B row and an A element or a B vector and an A
// column, fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::int64_t kTileVectors = 4;
template <typename Product>
constexpr GemmTiles<Product> kTiles[kTileVectors] = {
    make_tiles<Product, 1, 1, 2, 3, 4, 5, 6, 7, 8>(),
    make_tiles<Product, 2, 1, 2, 3, 4, 5, 6, 7, 8>(),
    Product::kByColumns ? make_tiles<Product, 3, 1, 2, 3, 4, 5, 6, 7>()
                        : make_tiles<Product, 3, 1, 2, 3, 4, 5, 6, 7, 8>(),
    make_tiles<Product, 4, 1, 2, 3, 4, 5, 6>()};
#else
constexpr std::int64_t kTileVectors = 2;
template <typename Product>
constexpr GemmTiles<Product> kTiles[kTileVectors] = {
    make_tiles<Product, 1, 1, 2, 3, 4, 5, 6>(), make_tiles<Product, 2, 1, 2, 3, 4, 5, 6>()};
#endif

// Nearly equal parts, longer first, with only two (slow) divisions.
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

template <typename Product>
LLTM_CELL_INLINE void gemm_panel(
    const Parts& heights, const GemmTiles<Product>& tiles, GemmTile<Product> p) {
  // Tiles prefetch shares of the next B rows, except a bfloat16 panel's only tile, whose loop has
  // no spare time.
  const bool fetch = heights.count > 1 || Product::kVnniFactor == 1;
  const std::int64_t share = (p.k + heights.count - 1) / heights.count;
  std::int64_t left = fetch ? p.k : 0;
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

// In vectors, with the fewest tiles.
template <typename Product>
LLTM_CELL_INLINE std::int64_t panel_vectors(std::int64_t m, std::int64_t vectors) {
  std::int64_t best = 0, fewest = 0;
  for (std::int64_t width = at_most(vectors, kTileVectors); width > 0; --width) {
    const auto high = static_cast<std::int64_t>(kTiles<Product>[width - 1].rows);
    const std::int64_t tiles = (vectors + width - 1) / width * ((m + high - 1) / high);
    if (best == 0 || tiles < fewest) {
      best = width;
      fewest = tiles;
    }
  }
  return best;
}

template <typename Product>
LLTM_CELL_INLINE void gemm_rows(
    std::int64_t m,
    Matrix<const typename Product::A> a,
    PackedB<const typename Product::B> b,
    Matrix<float> c,
    std::int64_t longest,
    bool accumulate) {
  constexpr std::int64_t kVnniFactor = Product::kVnniFactor;
  const std::int64_t stride = b.ld * kVnniFactor;
  const Parts pieces(b.k / kVnniFactor, longest);
  const std::int64_t vectors = (b.n + kLanes - 1) / kLanes;
  const Parts panels(vectors, panel_vectors<Product>(m, vectors));
  std::int64_t column = 0;
  for (std::int64_t panel = 0; panel < panels.count; ++panel) {
    const std::int64_t width = panels.size(panel);
    const GemmTiles<Product>& tiles = kTiles<Product>[width - 1];
    const Parts heights(m, tiles.rows);
    GemmTile<Product> p;
    p.n = at_most(b.n - column, width * kLanes);
    p.a = a;
    p.b = b.data + column * kVnniFactor;
    p.b_stride = stride;
    p.c = c.from(0, column);
    p.accumulate = accumulate;
    column += p.n;
    for (std::int64_t piece = 0; piece < pieces.count; ++piece) {
      p.k = pieces.size(piece);
      p.next_b = piece + 1 < pieces.count ? p.b + p.k * stride : b.data + column * kVnniFactor;
      gemm_panel(heights, tiles, p);
      p.a = p.a.from(0, p.k * kVnniFactor);
      p.b += p.k * stride;
      p.accumulate = true;
    }
  }
}

template <typename B>
void gemm_f32(
    std::int64_t m,
    Matrix<const float> a,
    PackedB<const B> b,
    Matrix<float> c,
    std::int64_t longest_chain,
    bool accumulate) {
  gemm_rows<F32Product<B>>(m, a, b, c, longest_chain, accumulate);
}

template <typename B>
constexpr GemmF32<B> kGemmF32 = gemm_f32<B>;

#else
template <typename B>
constexpr GemmF32<B> kGemmF32 = nullptr;
#endif

#if defined(__AVX512F__)
void gemm_bf16_rows(
    std::int64_t m,
    Matrix<const BFloat16> a,
    PackedB<const BFloat16> b,
    Matrix<float> c,
    bool accumulate) {
  // A panel with so many row pairs stays in L2. bfloat16 rounding far exceeds such a chain's error.
  constexpr std::int64_t kLongest = 256;
  gemm_rows<Bf16Product>(m, a, b, c, kLongest, accumulate);
}

constexpr GemmBf16 kGemmBf16 = gemm_bf16_rows;
#else
constexpr GemmBf16 kGemmBf16 = nullptr;
#endif

}  // namespace
}  // namespace lltm::cpu
