#pragma once

#include "cell/math.h"
#include "cpu/kernel/bf16x3.h"
#include "cpu/kernel/table.h"
#include "cpu/kernel/tile.h"

#include <immintrin.h>

namespace lltm::cpu {
namespace {

LLTM_CELL_INLINE std::uint16_t* words(BFloat16x3* x) {
  return reinterpret_cast<std::uint16_t*>(x);
}
LLTM_CELL_INLINE const std::uint16_t* words(const BFloat16x3* x) {
  return reinterpret_cast<const std::uint16_t*>(x);
}

struct Group {
  __m512 low, high;
};

LLTM_CELL_INLINE __mmask16 lanes(std::int64_t n) {
  return n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

LLTM_CELL_INLINE __m512 load_floats(const float* x, std::int64_t n) {
  return _mm512_maskz_loadu_ps(lanes(n), x);
}

LLTM_CELL_INLINE Group load_group(const float* x, std::int64_t n) {
  return {load_floats(x, n), load_floats(x + 16, n - 16)};
}

LLTM_CELL_INLINE __m512 widen_half(__m256i part) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
}

LLTM_CELL_INLINE __mmask16 too_large(__m512 x) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kBf16x3Limit), _CMP_GE_OQ);
}

LLTM_CELL_INLINE __mmask16 too_large(Group x) {
  return too_large(x.low) | too_large(x.high);
}

// `low` becomes the lower half of each part.
LLTM_CELL_INLINE void decompose(Group x, __m512i (&parts)[3]) {
  for (int part = 0; part < 3; ++part) {
    parts[part] = (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low);
    if (part == 2) break;
    x.low = _mm512_sub_ps(x.low, widen_half(_mm512_castsi512_si256(parts[part])));
    x.high = _mm512_sub_ps(x.high, widen_half(_mm512_extracti64x4_epi64(parts[part], 1)));
  }
}

LLTM_CELL_INLINE void store_group(const Group& x, BFloat16x3* y) {
  __m512i parts[3];
  decompose(x, parts);
  for (int part = 0; part < 3; ++part) {
    _mm512_storeu_si512(words(y) + part * kBf16x3Group, parts[part]);
  }
}

bool pack_a_bf16x3(
    std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y) {
  __mmask16 out_of_range = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; c += kBf16x3Group) {
      const Group group = load_group(x.row(r) + c, columns - c);
      out_of_range |= too_large(group);
      store_group(group, y.row(r) + c);
    }
  }
  return out_of_range == 0;
}

// store_operand (elementwise_kernels.h) must see it.
LLTM_CELL_INLINE bool store_operand(
    const Matrix<BFloat16x3>& matrix,
    std::int64_t row,
    std::int64_t col,
    std::int64_t n,
    const float* values) {
  return pack_a_bf16x3(1, n, {values}, matrix.from(row, col));
}

LLTM_CELL_INLINE void transpose(__m512 (&tile)[16]) {
  Vector rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = (Vector)tile[i];
  transpose_tile(rows);
  for (int i = 0; i < 16; ++i) tile[i] = (__m512)rows[i];
}

bool pack_a_transposed_bf16x3(
    std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y) {
  __mmask16 out_of_range = 0;
  for (std::int64_t c = 0; c < columns; c += 16) {
    const std::int64_t width = at_most(columns - c, 16);
    for (std::int64_t r = 0; r < rows; r += kBf16x3Group) {
      __m512 halves[2][16];
      for (std::int64_t i = 0; i < kBf16x3Group; ++i) {
        const bool there = r + i < rows;
        halves[i / 16][i % 16] = load_floats(there ? x.row(r + i) + c : x.data, there ? width : 0);
        fetch_ahead(x.row(r + i + kBf16x3Group) + c, 16);
      }
      transpose(halves[0]);
      transpose(halves[1]);
      for (std::int64_t j = 0; j < width; ++j) {
        const Group group = {halves[0][j], halves[1][j]};
        out_of_range |= too_large(group);
        store_group(group, y.row(c + j) + r);
      }
    }
  }
  return out_of_range == 0;
}

bool pack_b_bf16x3(
    std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y) {
  alignas(64) static constexpr std::uint16_t kPairs[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kPairs);
  constexpr std::int64_t kAhead = 16;  // in rows
  __mmask16 out_of_range = 0;
  for (std::int64_t r = 0; r < rows; r += 2) {
    const std::int64_t group = r / kBf16x3Group * kBf16x3Group * kBf16x3Panel;
    const std::int64_t line = r % kBf16x3Group / 2 * 32;
    for (std::int64_t c = 0; c < columns; c += kBf16x3Panel) {
      const float* const first = x.row(r) + c;
      fetch_ahead(first + kAhead * x.row_stride, 16);
      fetch_ahead(first + (kAhead + 1) * x.row_stride, 16);
      const bool second = r + 1 < rows;
      const Group pair = {
          load_floats(first, columns - c),
          load_floats(second ? first + x.row_stride : x.data, second ? columns - c : 0)};
      out_of_range |= too_large(pair);
      __m512i parts[3];
      decompose(pair, parts);
      std::uint16_t* const to = words(y.row(c / kBf16x3Panel) + group) + line;
      for (int part = 0; part < 3; ++part) {
        _mm512_storeu_si512(to + part * 512, _mm512_permutexvar_epi16(order, parts[part]));
      }
    }
  }
  const std::int64_t pairs = (rows + 1) / 2 % (kBf16x3Group / 2);
  for (std::int64_t c = 0; pairs > 0 && c < columns; c += kBf16x3Panel) {
    BFloat16x3* const group =
        y.row(c / kBf16x3Panel) + rows / kBf16x3Group * kBf16x3Group * kBf16x3Panel;
    for (int part = 0; part < 3; ++part) {
      for (std::int64_t pair = pairs; pair < kBf16x3Group / 2; ++pair) {
        _mm512_storeu_si512(words(group) + part * 512 + pair * 32, _mm512_setzero_si512());
      }
    }
  }
  return out_of_range == 0;
}

bool pack_b_transposed_bf16x3(
    std::int64_t rows, std::int64_t columns, Matrix<const float> x, Matrix<BFloat16x3> y) {
  __mmask16 out_of_range = 0;
  for (std::int64_t r = 0; r < rows; r += kBf16x3Panel) {
    for (std::int64_t c = 0; c < columns; c += kBf16x3Group) {
      __m512 tiles[3][16];
      for (std::int64_t i = 0; i < kBf16x3Panel; ++i) {
        const bool there = r + i < rows;
        const Group group = load_group(there ? x.row(r + i) + c : x.data, there ? columns - c : 0);
        out_of_range |= too_large(group);
        __m512i parts[3];
        decompose(group, parts);
        for (int part = 0; part < 3; ++part) tiles[part][i] = _mm512_castsi512_ps(parts[part]);
      }
      BFloat16x3* const to = y.row(r / kBf16x3Panel) + c * kBf16x3Panel;
      for (int part = 0; part < 3; ++part) {
        transpose(tiles[part]);
        for (int i = 0; i < 16; ++i) {
          _mm512_storeu_ps(words(to) + part * 512 + i * 32, tiles[part][i]);
        }
      }
    }
  }
  return out_of_range == 0;
}

constexpr std::int64_t kTileRows = 16;

// The intrinsics accept only literal tile numbers.
#define LLTM_FOR_EACH_TILE(apply) \
  apply(0) apply(1) apply(2) apply(3) apply(4) apply(5) apply(6) apply(7)

template <int kTileNumber>
LLTM_CELL_INLINE void load_tile(const void* from, std::int64_t stride) {
#define LLTM_LOAD(n) \
  if constexpr (kTileNumber == n) _tile_loadd(n, from, stride);
  LLTM_FOR_EACH_TILE(LLTM_LOAD)
#undef LLTM_LOAD
}

template <int kTileNumber>
LLTM_CELL_INLINE void load_or_zero_tile(bool load, const void* from, std::int64_t stride) {
  if (load) return load_tile<kTileNumber>(from, stride);
#define LLTM_ZERO(n) \
  if constexpr (kTileNumber == n) _tile_zero(n);
  LLTM_FOR_EACH_TILE(LLTM_ZERO)
#undef LLTM_ZERO
}

template <int kTileNumber>
LLTM_CELL_INLINE void store_tile(void* to, std::int64_t stride) {
#define LLTM_STORE(n) \
  if constexpr (kTileNumber == n) _tile_stored(n, to, stride);
  LLTM_FOR_EACH_TILE(LLTM_STORE)
#undef LLTM_STORE
}

// C += A B for tiles C 0 to 3, A 4 to 6, B 6 or 7, in bfloat16, or int8 with int32 sums.
template <int kC, int kA, int kB, typename Element = BFloat16>
LLTM_CELL_INLINE void multiply_tiles() {
  constexpr bool kBytes = sizeof(Element) == 1;
#define LLTM_MULTIPLY(c, a, b)                                                     \
  if constexpr (kC == c && kA == a && kB == b && !kBytes) _tile_dpbf16ps(c, a, b); \
  if constexpr (kC == c && kA == a && kB == b && kBytes) _tile_dpbusd(c, a, b);
#define LLTM_MULTIPLY_INTO(c) \
  LLTM_MULTIPLY(c, 4, 6)      \
  LLTM_MULTIPLY(c, 4, 7) LLTM_MULTIPLY(c, 5, 6) LLTM_MULTIPLY(c, 5, 7) LLTM_MULTIPLY(c, 6, 7)
  LLTM_MULTIPLY_INTO(0)
  LLTM_MULTIPLY_INTO(1)
  LLTM_MULTIPLY_INTO(2)
  LLTM_MULTIPLY_INTO(3)
#undef LLTM_MULTIPLY_INTO
#undef LLTM_MULTIPLY
}
#undef LLTM_FOR_EACH_TILE

// At most 16 rows with 64 bytes.
struct TileShape {
  std::int64_t rows = kTileRows, row_bytes = 64;
};

void configure_tiles(const TileShape (&shapes)[8]) {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = static_cast<std::uint16_t>(shapes[tile].row_bytes);
    config.rows[tile] = static_cast<std::uint8_t>(shapes[tile].rows);
  }
  // The intrinsic declares that it reads 8 bytes; the instruction reads 64.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

template <int kPanels, typename Body>
LLTM_CELL_INLINE void for_each_panel(const Body& body) {
  body.template operator()<0>();
  if constexpr (kPanels > 1) body.template operator()<1>();
  if constexpr (kPanels > 2) body.template operator()<2>();
  if constexpr (kPanels > 3) body.template operator()<3>();
}

struct TileRows {
  std::int64_t count, upper, lower;  // lower is 0 for a single tile
};
// Calls body(rows) for full pairs, then for the rest. body advances the pointers.
template <typename Body>
LLTM_CELL_INLINE void for_each_tile_rows(std::int64_t m, const Body& body) {
  const std::int64_t pairs = m / (2 * kTileRows), rest = m % (2 * kTileRows);
  if (pairs > 0) body(TileRows{pairs, kTileRows, kTileRows});
  if (rest > kTileRows) {
    body(TileRows{1, kTileRows, rest - kTileRows});
  } else if (rest > 0) {
    body(TileRows{1, rest, 0});
  }
}

// A and B tiles hold one part of a group, 1 KiB: 16 rows in A, a panel in B. Both are addressed by
// their first part. Distances are in 16-bit words.
constexpr std::int64_t kPartB = 512;                // between parts in B
constexpr std::int64_t kGroupB = 3 * kPartB;        // between groups in B
constexpr std::int64_t kGroupA = 3 * kBf16x3Group;  // between groups in A

// gemm_two_tiles: C 0, 1 (upper), 2, 3 (lower), A 4 (upper), 5 (lower), B 6, 7. gemm_one_tile: C 0
// to 3, A 4 to 6 (the parts), B 7.
void configure_bf16x3(const TileRows& rows) {
  const TileShape upper = {rows.upper}, lower = {rows.lower}, b = {};
  if (rows.lower > 0) {
    configure_tiles({upper, upper, lower, lower, upper, lower, b, b});
  } else {
    configure_tiles({upper, upper, upper, upper, upper, upper, upper, b});
  }
}

// Strides are in bytes.
struct Bf16x3Block {
  const std::uint16_t* a;
  std::int64_t a_stride;
  const std::uint16_t* b;
  std::int64_t panel_stride;  // in words
  float* c;
  std::int64_t c_stride;
  std::int64_t groups;
  bool accumulate;
  // The next two panels, and lines to prefetch per panel and group.
  const std::uint16_t* next = nullptr;
  std::int64_t next_lines = 0;

  const std::uint16_t* lower_a() const { return a + kTileRows * a_stride / 2; }
  float* lower_c() const { return c + kTileRows * c_stride / 4; }
};

LLTM_CELL_INLINE void prefetch_panels(const Bf16x3Block& block, const std::uint16_t*& next) {
  for (std::int64_t line = 0; line < block.next_lines; ++line) {
    _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(next + block.panel_stride), _MM_HINT_T1);
    next += 32;
  }
}

// In this order, each of the six partial products loads only one operand.
template <int kPanels>
void gemm_two_tiles(const Bf16x3Block& p) {
  const std::uint16_t* a = p.a;
  const std::uint16_t* lower_a = p.lower_a();
  const std::uint16_t* b = p.b;
  const std::uint16_t* next = p.next;
  const auto load_a = [&](std::int64_t part) __attribute__((always_inline)) {
    load_tile<4>(a + part * kBf16x3Group, p.a_stride);
    load_tile<5>(lower_a + part * kBf16x3Group, p.a_stride);
  };
  const auto load_b = [&](std::int64_t part) __attribute__((always_inline)) {
    load_tile<6>(b + part * kPartB, 64);
    if constexpr (kPanels > 1) load_tile<7>(b + p.panel_stride + part * kPartB, 64);
  };
  const auto multiply = []() __attribute__((always_inline)) {
    multiply_tiles<0, 4, 6>();
    if constexpr (kPanels > 1) multiply_tiles<1, 4, 7>();
    multiply_tiles<2, 5, 6>();
    if constexpr (kPanels > 1) multiply_tiles<3, 5, 7>();
  };
  load_or_zero_tile<0>(p.accumulate, p.c, p.c_stride);
  load_or_zero_tile<2>(p.accumulate, p.lower_c(), p.c_stride);
  if constexpr (kPanels > 1) {
    load_or_zero_tile<1>(p.accumulate, p.c + kTileRows, p.c_stride);
    load_or_zero_tile<3>(p.accumulate, p.lower_c() + kTileRows, p.c_stride);
  }
  for (std::int64_t group = 0; group < p.groups; ++group) {
    if constexpr (kPanels > 1) prefetch_panels(p, next);
    load_a(0);
    load_b(2);
    multiply();
    load_b(1);
    multiply();
    load_a(1);
    multiply();
    load_b(0);
    multiply();
    load_a(2);
    multiply();
    load_a(0);
    multiply();
    a += kGroupA;
    lower_a += kGroupA;
    b += kGroupB;
  }
  store_tile<0>(p.c, p.c_stride);
  store_tile<2>(p.lower_c(), p.c_stride);
  if constexpr (kPanels > 1) {
    store_tile<1>(p.c + kTileRows, p.c_stride);
    store_tile<3>(p.lower_c() + kTileRows, p.c_stride);
  }
}

// The A parts stay loaded; each B part is loaded once.
template <int kPanels>
void gemm_one_tile(const Bf16x3Block& p) {
  const std::uint16_t* a = p.a;
  const std::uint16_t* b = p.b;
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    load_or_zero_tile<n>(p.accumulate, p.c + n * kTileRows, p.c_stride);
  });
  for (std::int64_t group = 0; group < p.groups; ++group) {
    load_tile<4>(a, p.a_stride);
    load_tile<5>(a + kBf16x3Group, p.a_stride);
    load_tile<6>(a + 2 * kBf16x3Group, p.a_stride);
    for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
      load_tile<7>(b + n * p.panel_stride + 2 * kPartB, 64);
      multiply_tiles<n, 4, 7>();
    });
    for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
      load_tile<7>(b + n * p.panel_stride + kPartB, 64);
      multiply_tiles<n, 4, 7>();
      multiply_tiles<n, 5, 7>();
    });
    for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
      load_tile<7>(b + n * p.panel_stride, 64);
      multiply_tiles<n, 6, 7>();
      multiply_tiles<n, 5, 7>();
      multiply_tiles<n, 4, 7>();
    });
    a += kGroupA;
    b += kGroupB;
  }
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    store_tile<n>(p.c + n * kTileRows, p.c_stride);
  });
}

// K groups per slice. All of C uses a slice before the next: the groups in two panels stay in L1
// for the next rows.
constexpr std::int64_t kSliceGroups = 4;

template <typename Body>
LLTM_CELL_INLINE void for_each_block_of_panels(
    const Bf16x3Block& whole, std::int64_t n, std::int64_t most, Body body) {
  const std::int64_t all = n / kBf16x3Panel;
  for (std::int64_t group = 0; group < whole.groups; group += kSliceGroups) {
    for (std::int64_t panel = 0; panel < all; panel += most) {
      Bf16x3Block block = whole;
      block.a += group * kGroupA;
      block.b += panel * whole.panel_stride + group * kGroupB;
      block.c += panel * kBf16x3Panel;
      block.groups = at_most(whole.groups - group, kSliceGroups);
      block.accumulate = whole.accumulate || group > 0;
      // The next slice follows the last panel. After the last slice, prefetching continues past it.
      const bool next_slice = panel + most >= all && group + kSliceGroups < whole.groups;
      block.next = next_slice ? whole.b + (group + kSliceGroups) * kGroupB
                              : block.b + most * whole.panel_stride;
      body(block, at_most(all - panel, most));
    }
  }
}

// The last pair's lower tile may be shorter.
void gemm_pairs(const Bf16x3Block& whole, std::int64_t pairs, std::int64_t n) {
  for_each_block_of_panels(whole, n, 2, [&](Bf16x3Block block, std::int64_t panels) {
    block.next_lines = 48 / pairs;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      panels == 2 ? gemm_two_tiles<2>(block) : gemm_two_tiles<1>(block);
      block.a += block.a_stride / 2 * 2 * kTileRows;
      block.c += block.c_stride / 4 * 2 * kTileRows;
      block.next += block.next_lines * block.groups * 32;
    }
  });
}

void gemm_single(const Bf16x3Block& whole, std::int64_t n) {
  for_each_block_of_panels(whole, n, 4, [&](const Bf16x3Block& block, std::int64_t panels) {
    switch (panels) {
      case 1:
        return gemm_one_tile<1>(block);
      case 2:
        return gemm_one_tile<2>(block);
      case 3:
        return gemm_one_tile<3>(block);
      default:
        return gemm_one_tile<4>(block);
    }
  });
}

void gemm_bf16x3(
    std::int64_t m,
    Matrix<const BFloat16x3> a,
    PackedB<const BFloat16x3> b,
    Matrix<float> c,
    bool accumulate) {
  Bf16x3Block block = {
      words(a.data),
      a.row_stride * static_cast<std::int64_t>(sizeof(BFloat16x3)),
      words(b.data),
      3 * b.k * kBf16x3Panel,
      c.data,
      c.row_stride * static_cast<std::int64_t>(sizeof(float)),
      b.k / kBf16x3Group,
      accumulate};
  for_each_tile_rows(m, [&](const TileRows& rows) {
    configure_bf16x3(rows);
    rows.lower > 0 ? gemm_pairs(block, rows.count, b.n) : gemm_single(block, b.n);
    block.a += rows.count * 2 * kTileRows * block.a_stride / 2;
    block.c += rows.count * 2 * kTileRows * block.c_stride / 4;
  });
  _tile_release();
}

constexpr Bf16x3Kernels kBf16x3Kernels = {
    gemm_bf16x3, pack_a_bf16x3, pack_a_transposed_bf16x3, pack_b_bf16x3, pack_b_transposed_bf16x3};

// Groups have a tile's depth; strides are in bytes.
struct Bf16Block {
  const BFloat16* a;
  std::int64_t a_stride;
  const BFloat16* b;
  std::int64_t b_stride;  // between row pairs
  float* c;
  std::int64_t c_stride;
  std::int64_t groups;
  bool accumulate;
};
constexpr std::int64_t kTileDepth = 32, kTileColumns = 16;

// Two row tiles by up to two column panels, or one by up to four. Tiles: C as for bf16x3, A 4
// (upper) and 5 (lower), B 6 and 7 alternate.
template <int kHeight, int kPanels>
void gemm_bf16_tiles(const Bf16Block& p) {
  const std::int64_t below_a = kTileRows * p.a_stride / 2, below_c = kTileRows * p.c_stride / 4;
  const BFloat16* a = p.a;
  const BFloat16* b = p.b;
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    float* const c = p.c + n * kTileColumns;
    load_or_zero_tile<n>(p.accumulate, c, p.c_stride);
    if constexpr (kHeight > 1) load_or_zero_tile<2 + n>(p.accumulate, c + below_c, p.c_stride);
  });
  for (std::int64_t group = 0; group < p.groups; ++group) {
    load_tile<4>(a, p.a_stride);
    if constexpr (kHeight > 1) load_tile<5>(a + below_a, p.a_stride);
    for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
      load_tile<6 + n % 2>(b + n * 2 * kTileColumns, p.b_stride);
      multiply_tiles<n, 4, 6 + n % 2>();
      if constexpr (kHeight > 1) multiply_tiles<2 + n, 5, 6 + n % 2>();
    });
    a += kTileDepth;
    b += kTileDepth / 2 * p.b_stride / 2;
  }
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    float* const c = p.c + n * kTileColumns;
    store_tile<n>(c, p.c_stride);
    if constexpr (kHeight > 1) store_tile<2 + n>(c + below_c, p.c_stride);
  });
}

void gemm_bf16_panels(
    std::int64_t m, Bf16Block block, std::int64_t panels, const TileShape& b, std::int64_t depth) {
  for_each_tile_rows(m, [&](const TileRows& rows) {
    const bool two = rows.lower > 0;
    const TileShape upper = {rows.upper, b.row_bytes}, upper_a = {rows.upper, 2 * depth};
    const TileShape lower = {two ? rows.lower : rows.upper, b.row_bytes};
    const TileShape lower_a = {lower.rows, 2 * depth};
    configure_tiles({upper, upper, lower, lower, upper_a, lower_a, b, b});
    constexpr void (*kTwo[])(const Bf16Block&) = {gemm_bf16_tiles<2, 1>, gemm_bf16_tiles<2, 2>};
    constexpr void (*kOne[])(const Bf16Block&) = {
        gemm_bf16_tiles<1, 1>, gemm_bf16_tiles<1, 2>, gemm_bf16_tiles<1, 3>, gemm_bf16_tiles<1, 4>};
    const std::int64_t most = two ? 2 : 4;
    for (std::int64_t panel = 0; panel < panels; panel += most) {
      const std::int64_t width = at_most(panels - panel, most);
      Bf16Block part = block;
      part.b += panel * 2 * kTileColumns;
      part.c += panel * kTileColumns;
      for (std::int64_t pair = 0; pair < rows.count; ++pair) {
        (two ? kTwo : kOne)[width - 1](part);
        part.a += 2 * kTileRows * part.a_stride / 2;
        part.c += 2 * kTileRows * part.c_stride / 4;
      }
    }
    block.a += rows.count * 2 * kTileRows * block.a_stride / 2;
    block.c += rows.count * 2 * kTileRows * block.c_stride / 4;
  });
}

void gemm_bf16_amx(
    std::int64_t m,
    Matrix<const BFloat16> a,
    PackedB<const BFloat16> b,
    Matrix<float> c,
    bool accumulate) {
  Bf16Block block = {
      a.data,
      a.row_stride * 2,
      b.data,
      b.ld * 4,
      c.data,
      c.row_stride * 4,
      b.k / kTileDepth,
      accumulate};
  // Full tiles along K and N, then the remainders.
  const auto multiply = [&](std::int64_t depth) {
    const std::int64_t panels = b.n / kTileColumns, rest = b.n % kTileColumns;
    if (panels > 0) gemm_bf16_panels(m, block, panels, {depth / 2, 64}, depth);
    if (rest == 0) return;
    Bf16Block last = block;
    last.b += panels * 2 * kTileColumns;
    last.c += panels * kTileColumns;
    gemm_bf16_panels(m, last, 1, {depth / 2, 4 * rest}, depth);
  };
  if (block.groups > 0) {
    multiply(kTileDepth);
    block.a += block.groups * kTileDepth;
    block.b += block.groups * kTileDepth / 2 * block.b_stride / 2;
    block.groups = 0;
    block.accumulate = true;
  }
  if (const std::int64_t depth = b.k % kTileDepth; depth > 0) {
    block.groups = 1;
    multiply(depth);
  }
  _tile_release();
}

}  // namespace
}  // namespace lltm::cpu
