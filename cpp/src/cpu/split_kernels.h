// The kernels of split.h for AMX, included by the file for that instruction set.
#pragma once

#include "cell_math.h"
#include "cpu/split.h"
#include "cpu/tile.h"

#include <immintrin.h>

namespace lltm::cpu {
namespace {

LLTM_CELL_INLINE std::uint16_t* words(BFloat16x3* x) {
  return reinterpret_cast<std::uint16_t*>(x);
}
LLTM_CELL_INLINE const std::uint16_t* words(const BFloat16x3* x) {
  return reinterpret_cast<const std::uint16_t*>(x);
}

// ---- splitting --------------------------------------------------------------

// A group: 32 floats, or one part of 32.
struct Group {
  __m512 low, high;
};

LLTM_CELL_INLINE __mmask16 lanes(std::int64_t n) {
  return n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

// n floats, at most 16, and zeros.
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
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(kSplitLimit), _CMP_GE_OQ);
}

LLTM_CELL_INLINE __mmask16 too_large(Group x) {
  return too_large(x.low) | too_large(x.high);
}

// The elements of `low` become the lower 16 of each part.
LLTM_CELL_INLINE void split(Group x, __m512i (&parts)[3]) {
  for (int part = 0; part < 3; ++part) {
    parts[part] = (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low);
    if (part == 2) break;
    x.low = _mm512_sub_ps(x.low, widen_half(_mm512_castsi512_si256(parts[part])));
    x.high = _mm512_sub_ps(x.high, widen_half(_mm512_extracti64x4_epi64(parts[part], 1)));
  }
}

LLTM_CELL_INLINE void store_group(const Group& x, BFloat16x3* y) {
  __m512i parts[3];
  split(x, parts);
  for (int part = 0; part < 3; ++part) {
    _mm512_storeu_si512(words(y) + part * kSplitGroup, parts[part]);
  }
}

bool split_rows(
    std::int64_t rows,
    std::int64_t columns,
    const float* x,
    std::int64_t x_stride,
    BFloat16x3* y,
    std::int64_t y_stride) {
  __mmask16 bad = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; c += kSplitGroup) {
      const Group group = load_group(x + r * x_stride + c, columns - c);
      bad |= too_large(group);
      store_group(group, y + r * y_stride + c);
    }
  }
  return bad == 0;
}

// 16 rows of 16 elements, transposed.
LLTM_CELL_INLINE void transpose(__m512 (&tile)[16]) {
  Vector rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = (Vector)tile[i];
  transpose_tile(rows);
  for (int i = 0; i < 16; ++i) tile[i] = (__m512)rows[i];
}

bool split_columns(
    std::int64_t rows,
    std::int64_t columns,
    const float* x,
    std::int64_t x_stride,
    BFloat16x3* y,
    std::int64_t y_stride) {
  __mmask16 bad = 0;
  for (std::int64_t c = 0; c < columns; c += 16) {
    const std::int64_t width = at_most(columns - c, 16);
    for (std::int64_t r = 0; r < rows; r += kSplitGroup) {
      __m512 halves[2][16];
      for (std::int64_t i = 0; i < kSplitGroup; ++i) {
        const bool there = r + i < rows;
        halves[i / 16][i % 16] =
            load_floats(there ? x + (r + i) * x_stride + c : x, there ? width : 0);
        fetch_ahead(x + (r + i + kSplitGroup) * x_stride + c, 16);
      }
      transpose(halves[0]);
      transpose(halves[1]);
      for (std::int64_t j = 0; j < width; ++j) {
        const Group group = {halves[0][j], halves[1][j]};
        bad |= too_large(group);
        store_group(group, y + (c + j) * y_stride + r);
      }
    }
  }
  return bad == 0;
}

bool pack_split(
    std::int64_t rows,
    std::int64_t columns,
    const float* x,
    std::int64_t x_stride,
    BFloat16x3* y,
    std::int64_t panel_stride) {
  // Two rows, one after the other, to pairs.
  alignas(64) static constexpr std::uint16_t kPairs[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kPairs);
  constexpr std::int64_t kAhead = 16;  // rows
  __mmask16 bad = 0;
  for (std::int64_t r = 0; r < rows; r += 2) {
    BFloat16x3* const group = y + r / kSplitGroup * kSplitGroup * kSplitPanel;
    std::uint16_t* const line = words(group) + r % kSplitGroup / 2 * 32;
    for (std::int64_t c = 0; c < columns; c += kSplitPanel) {
      const float* const first = x + r * x_stride + c;
      fetch_ahead(first + kAhead * x_stride, 16);
      fetch_ahead(first + (kAhead + 1) * x_stride, 16);
      const bool second = r + 1 < rows;
      const Group pair = {
          load_floats(first, columns - c),
          load_floats(second ? first + x_stride : x, second ? columns - c : 0)};
      bad |= too_large(pair);
      __m512i parts[3];
      split(pair, parts);
      std::uint16_t* const to = line + c / kSplitPanel * panel_stride * 3;
      for (int part = 0; part < 3; ++part) {
        _mm512_storeu_si512(to + part * 512, _mm512_permutexvar_epi16(order, parts[part]));
      }
    }
  }
  // Zeros in the rest of the last group.
  const std::int64_t pairs = (rows + 1) / 2 % (kSplitGroup / 2);
  for (std::int64_t c = 0; pairs > 0 && c < columns; c += kSplitPanel) {
    BFloat16x3* const group =
        y + c / kSplitPanel * panel_stride + rows / kSplitGroup * kSplitGroup * kSplitPanel;
    for (int part = 0; part < 3; ++part) {
      for (std::int64_t pair = pairs; pair < kSplitGroup / 2; ++pair) {
        _mm512_storeu_si512(words(group) + part * 512 + pair * 32, _mm512_setzero_si512());
      }
    }
  }
  return bad == 0;
}

bool pack_split_transposed(
    std::int64_t rows,
    std::int64_t columns,
    const float* x,
    std::int64_t x_stride,
    BFloat16x3* y,
    std::int64_t panel_stride) {
  __mmask16 bad = 0;
  for (std::int64_t r = 0; r < rows; r += kSplitPanel) {
    for (std::int64_t c = 0; c < columns; c += kSplitGroup) {
      __m512 tiles[3][16];
      for (std::int64_t i = 0; i < kSplitPanel; ++i) {
        const bool there = r + i < rows;
        const Group group =
            load_group(there ? x + (r + i) * x_stride + c : x, there ? columns - c : 0);
        bad |= too_large(group);
        __m512i parts[3];
        split(group, parts);
        for (int part = 0; part < 3; ++part) tiles[part][i] = _mm512_castsi512_ps(parts[part]);
      }
      BFloat16x3* const to = y + r / kSplitPanel * panel_stride + c * kSplitPanel;
      for (int part = 0; part < 3; ++part) {
        transpose(tiles[part]);
        for (int i = 0; i < 16; ++i) {
          _mm512_storeu_ps(words(to) + part * 512 + i * 32, tiles[part][i]);
        }
      }
    }
  }
  return bad == 0;
}

// ---- the product ------------------------------------------------------------

// A tile of a left operand is 16 rows by one part of a group; one of a right
// operand, a part of a group of a panel: 1 KiB. Both are given by the address of
// their first part.
constexpr std::int64_t kTilePart = 512;             // from one part to the next, of a right operand
constexpr std::int64_t kTileGroup = 3 * kTilePart;  // from one group to the next
constexpr std::int64_t kRowGroup = 3 * kSplitGroup;  // likewise, of a left operand

// What the tiles are for in multiply_2x2 and multiply_2x1: of C the upper ones 0
// and 1 and the lower ones 2 and 3, of A the upper one 4 and the lower one 5, of
// B 6 and 7. In multiply_1x: of C 0 to 3, of A the parts 4 to 6, of B 7.
//
// Tiles of `upper` and `lower` rows; for multiply_1x lower is 0.
void configure_tiles(std::int64_t upper, std::int64_t lower) {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool of_b = tile == 7 || (tile == 6 && lower > 0);
    const bool below = lower > 0 && (tile == 2 || tile == 3 || tile == 5);
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(of_b ? 16 : below ? lower : upper);
  }
  // The compiler is told of 8 bytes only that the instruction reads.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Where a block of C and its operands lie; strides in bytes.
struct ProductBlock {
  const std::uint16_t* a;
  std::int64_t a_stride;
  const std::uint16_t* b;
  std::int64_t panel_stride;  // elements from one panel to the next
  float* c;
  std::int64_t c_stride;
  std::int64_t groups;
  bool accumulate;
  // What the panels after these begin with, and how many lines of each of the two
  // to fetch per group.
  const std::uint16_t* next = nullptr;
  std::int64_t next_lines = 0;

  const std::uint16_t* lower_a() const { return a + 16 * a_stride / 2; }
  float* lower_c() const { return c + 16 * c_stride / 4; }
};

// The intrinsics take the numbers of tiles as literals only.
#define LLTM_BEGIN_TILE(accumulate, tile, address, stride) \
  if (accumulate) {                                        \
    _tile_loadd(tile, address, stride);                    \
  } else {                                                 \
    _tile_zero(tile);                                      \
  }

// 32 rows, two panels. The six products of parts in an order in which each needs
// only one operand that the one before did not have.
void multiply_2x2(const ProductBlock& p) {
  const std::uint16_t* a0 = p.a;
  const std::uint16_t* a1 = p.lower_a();
  const std::uint16_t* b0 = p.b;
  const std::uint16_t* b1 = p.b + p.panel_stride;
  float* const c = p.c;
  float* const d = p.lower_c();
  LLTM_BEGIN_TILE(p.accumulate, 0, c, p.c_stride)
  LLTM_BEGIN_TILE(p.accumulate, 1, c + 16, p.c_stride)
  LLTM_BEGIN_TILE(p.accumulate, 2, d, p.c_stride)
  LLTM_BEGIN_TILE(p.accumulate, 3, d + 16, p.c_stride)
#define LLTM_LOAD_A(part)                                \
  _tile_loadd(4, a0 + (part) * kSplitGroup, p.a_stride); \
  _tile_loadd(5, a1 + (part) * kSplitGroup, p.a_stride);
#define LLTM_LOAD_B(part)                      \
  _tile_loadd(6, b0 + (part) * kTilePart, 64); \
  _tile_loadd(7, b1 + (part) * kTilePart, 64);
#define LLTM_MULTIPLY      \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7);
  const std::uint16_t* next = p.next;
  for (std::int64_t group = 0; group < p.groups; ++group) {
    for (std::int64_t line = 0; line < p.next_lines; ++line) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(next + p.panel_stride), _MM_HINT_T1);
      next += 32;
    }
    LLTM_LOAD_A(0)
    LLTM_LOAD_B(2)
    LLTM_MULTIPLY
    LLTM_LOAD_B(1)
    LLTM_MULTIPLY
    LLTM_LOAD_A(1)
    LLTM_MULTIPLY
    LLTM_LOAD_B(0)
    LLTM_MULTIPLY
    LLTM_LOAD_A(2)
    LLTM_MULTIPLY
    LLTM_LOAD_A(0)
    LLTM_MULTIPLY
    a0 += kRowGroup;
    a1 += kRowGroup;
    b0 += kTileGroup;
    b1 += kTileGroup;
  }
#undef LLTM_MULTIPLY
#undef LLTM_LOAD_B
#undef LLTM_LOAD_A
  _tile_stored(0, c, p.c_stride);
  _tile_stored(1, c + 16, p.c_stride);
  _tile_stored(2, d, p.c_stride);
  _tile_stored(3, d + 16, p.c_stride);
}

// 32 rows, one panel.
void multiply_2x1(const ProductBlock& p) {
  const std::uint16_t* a0 = p.a;
  const std::uint16_t* a1 = p.lower_a();
  const std::uint16_t* b = p.b;
  float* const c = p.c;
  float* const d = p.lower_c();
  LLTM_BEGIN_TILE(p.accumulate, 0, c, p.c_stride)
  LLTM_BEGIN_TILE(p.accumulate, 2, d, p.c_stride)
#define LLTM_LOAD_A(part)                                \
  _tile_loadd(4, a0 + (part) * kSplitGroup, p.a_stride); \
  _tile_loadd(5, a1 + (part) * kSplitGroup, p.a_stride);
#define LLTM_LOAD_B(part) _tile_loadd(6, b + (part) * kTilePart, 64);
#define LLTM_MULTIPLY      \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(2, 5, 6);
  for (std::int64_t group = 0; group < p.groups; ++group) {
    LLTM_LOAD_A(0)
    LLTM_LOAD_B(2)
    LLTM_MULTIPLY
    LLTM_LOAD_B(1)
    LLTM_MULTIPLY
    LLTM_LOAD_A(1)
    LLTM_MULTIPLY
    LLTM_LOAD_B(0)
    LLTM_MULTIPLY
    LLTM_LOAD_A(2)
    LLTM_MULTIPLY
    LLTM_LOAD_A(0)
    LLTM_MULTIPLY
    a0 += kRowGroup;
    a1 += kRowGroup;
    b += kTileGroup;
  }
#undef LLTM_MULTIPLY
#undef LLTM_LOAD_B
#undef LLTM_LOAD_A
  _tile_stored(0, c, p.c_stride);
  _tile_stored(2, d, p.c_stride);
}

// 16 rows at most, kPanels panels: all parts of the rows at once, and in three
// rounds one part of the panels, so that it is used for all that it is needed for.
template <int kPanels>
void multiply_1x(const ProductBlock& p) {
  const std::uint16_t* a = p.a;
  const std::uint16_t* b = p.b;
  float* const c = p.c;
  LLTM_BEGIN_TILE(p.accumulate, 0, c, p.c_stride)
  if constexpr (kPanels > 1) {
    LLTM_BEGIN_TILE(p.accumulate, 1, c + 16, p.c_stride)
  }
  if constexpr (kPanels > 2) {
    LLTM_BEGIN_TILE(p.accumulate, 2, c + 32, p.c_stride)
  }
  if constexpr (kPanels > 3) {
    LLTM_BEGIN_TILE(p.accumulate, 3, c + 48, p.c_stride)
  }
#define LLTM_THIRD(n)                                           \
  if constexpr (kPanels > n) {                                  \
    _tile_loadd(7, b + n * p.panel_stride + 2 * kTilePart, 64); \
    _tile_dpbf16ps(n, 4, 7);                                    \
  }
#define LLTM_SECOND(n)                                      \
  if constexpr (kPanels > n) {                              \
    _tile_loadd(7, b + n * p.panel_stride + kTilePart, 64); \
    _tile_dpbf16ps(n, 4, 7);                                \
    _tile_dpbf16ps(n, 5, 7);                                \
  }
#define LLTM_FIRST(n)                           \
  if constexpr (kPanels > n) {                  \
    _tile_loadd(7, b + n * p.panel_stride, 64); \
    _tile_dpbf16ps(n, 6, 7);                    \
    _tile_dpbf16ps(n, 5, 7);                    \
    _tile_dpbf16ps(n, 4, 7);                    \
  }
  for (std::int64_t group = 0; group < p.groups; ++group) {
    _tile_loadd(4, a, p.a_stride);
    _tile_loadd(5, a + kSplitGroup, p.a_stride);
    _tile_loadd(6, a + 2 * kSplitGroup, p.a_stride);
    LLTM_THIRD(0)
    LLTM_THIRD(1)
    LLTM_THIRD(2)
    LLTM_THIRD(3)
    LLTM_SECOND(0)
    LLTM_SECOND(1)
    LLTM_SECOND(2)
    LLTM_SECOND(3)
    LLTM_FIRST(0)
    LLTM_FIRST(1)
    LLTM_FIRST(2)
    LLTM_FIRST(3)
    a += kRowGroup;
    b += kTileGroup;
  }
#undef LLTM_FIRST
#undef LLTM_SECOND
#undef LLTM_THIRD
  _tile_stored(0, c, p.c_stride);
  if constexpr (kPanels > 1) _tile_stored(1, c + 16, p.c_stride);
  if constexpr (kPanels > 2) _tile_stored(2, c + 32, p.c_stride);
  if constexpr (kPanels > 3) _tile_stored(3, c + 48, p.c_stride);
}
#undef LLTM_BEGIN_TILE

// Groups worked through for all of C before the next ones: those of two panels
// stay in the first-level cache, for the next rows.
constexpr std::int64_t kSliceGroups = 4;

// Calls body(part, first, panels) for the operands' parts of so many groups and
// for `columns` of them in runs of at most `most` panels.
template <typename Body>
LLTM_CELL_INLINE void for_each_panels(
    const ProductBlock& whole, std::int64_t columns, std::int64_t most, Body body) {
  const std::int64_t all = columns / kSplitPanel;
  for (std::int64_t group = 0; group < whole.groups; group += kSliceGroups) {
    for (std::int64_t panel = 0; panel < all; panel += most) {
      ProductBlock part = whole;
      part.a += group * kRowGroup;
      part.b += panel * whole.panel_stride + group * kTileGroup;
      part.c += panel * kSplitPanel;
      part.groups = at_most(whole.groups - group, kSliceGroups);
      part.accumulate = whole.accumulate || group > 0;
      // After all of them the memory goes on with what is mostly read next.
      const bool next_slice = panel + most >= all && group + kSliceGroups < whole.groups;
      part.next = next_slice ? whole.b + (group + kSliceGroups) * kTileGroup
                             : part.b + most * whole.panel_stride;
      body(part, at_most(all - panel, most));
    }
  }
}

// Rows in pairs of tiles, the lower of the last pair perhaps with fewer rows.
void multiply_pairs(const ProductBlock& whole, std::int64_t pairs, std::int64_t columns) {
  for_each_panels(whole, columns, 2, [&](ProductBlock part, std::int64_t panels) {
    part.next_lines = 48 / pairs;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      panels == 2 ? multiply_2x2(part) : multiply_2x1(part);
      part.a += part.a_stride / 2 * 32;
      part.c += part.c_stride / 4 * 32;
      part.next += part.next_lines * part.groups * 32;
    }
  });
}

void multiply_single(const ProductBlock& whole, std::int64_t columns) {
  for_each_panels(whole, columns, 4, [&](const ProductBlock& part, std::int64_t panels) {
    switch (panels) {
      case 1:
        return multiply_1x<1>(part);
      case 2:
        return multiply_1x<2>(part);
      case 3:
        return multiply_1x<3>(part);
      default:
        return multiply_1x<4>(part);
    }
  });
}

void multiply_split(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const BFloat16x3* a,
    std::int64_t lda,
    const BFloat16x3* b,
    float* c,
    std::int64_t ldc,
    bool accumulate) {
  ProductBlock block = {
      words(a),
      lda * static_cast<std::int64_t>(sizeof(BFloat16x3)),
      words(b),
      3 * depth * kSplitPanel,
      c,
      ldc * static_cast<std::int64_t>(sizeof(float)),
      depth / kSplitGroup,
      accumulate};
  const std::int64_t full_pairs = rows / 32;
  const std::int64_t rest = rows % 32;
  if (full_pairs > 0) {
    configure_tiles(16, 16);
    multiply_pairs(block, full_pairs, columns);
    block.a += full_pairs * 32 * block.a_stride / 2;
    block.c += full_pairs * 32 * block.c_stride / 4;
  }
  if (rest > 16) {
    configure_tiles(16, rest - 16);
    multiply_pairs(block, 1, columns);
  } else if (rest > 0) {
    configure_tiles(rest, 0);
    multiply_single(block, columns);
  }
  _tile_release();
}

constexpr SplitKernels kSplitKernels = {
    multiply_split, split_rows, split_columns, pack_split, pack_split_transposed};

}  // namespace
}  // namespace lltm::cpu
