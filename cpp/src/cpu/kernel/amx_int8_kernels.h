// The int8 GEMM for AMX, bitwise identical to the other kernels: sums are exact, scaling is the
// same.
#pragma once

#include "cpu/kernel/amx_kernels.h"
#include "cpu/kernel/int8_kernels.h"

namespace lltm::cpu {
namespace {

// A tile's K: 64 bytes from a row in A, or 16 groups from a panel in B.
constexpr std::int64_t kInt8TileDepth = 64;
constexpr std::int64_t kInt8MostPanels = 4;

// With fewer rows, VNNI is as fast and needs no tile setup.
constexpr std::int64_t kInt8FewestTileRows = 4;

// K after full tiles: a zero-padded tile per panel. A's tile reads past K, into the row's scale and
// padding.
struct Int8Rest {
  alignas(64) Int8 tiles[kInt8MostPanels][kInt8TileDepth * kInt8Panel];
};

void copy_rest(const Int8Gemm& p, std::int64_t panels, Int8Rest& rest) {
  constexpr std::int64_t kLine = kInt8Group * kInt8Panel;
  const std::int64_t lines = p.depth % kInt8TileDepth / kInt8Group;
  if (lines == 0) return;
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const Int8* const from = p.panels + (panel + 1) * p.panel_bytes -
                             (kInt8ColumnBytes + lines * kInt8Group) * kInt8Panel;
    for (std::int64_t line = 0; line < kInt8TileDepth / kInt8Group; ++line) {
      const __m512i bytes =
          line < lines ? _mm512_loadu_si512(from + line * kLine) : _mm512_setzero_si512();
      _mm512_store_si512(rest.tiles[panel] + line * kLine, bytes);
    }
  }
}

// `rows` rows, in one or two tiles, by kPanels panels. Tiles: C 0, 1 (upper) and 2, 3 (lower), or 0
// to 3 for one row tile; A 4 (upper), 5 (lower); B 6 and 7 alternate.
template <int kHeight, int kPanels>
void gemm_int8_tiles(const Int8Gemm& p, const Int8Rest& rest, std::int64_t rows) {
  alignas(64) std::int32_t sums[kHeight * kTileRows][kPanels * kInt8Panel];
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    load_or_zero_tile<n>(false, nullptr, 0);
    if constexpr (kHeight > 1) load_or_zero_tile<2 + n>(false, nullptr, 0);
  });
  const auto multiply = [&](std::int64_t k, const Int8* b, std::int64_t panel_bytes)
                            __attribute__((always_inline)) {
                              load_tile<4>(p.a.row(0) + k, p.a.row_stride);
                              if constexpr (kHeight > 1)
                                load_tile<5>(p.a.row(kTileRows) + k, p.a.row_stride);
                              for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
                                load_tile<6 + n % 2>(b + n * panel_bytes, kInt8Group * kInt8Panel);
                                multiply_tiles<n, 4, 6 + n % 2, Int8>();
                                if constexpr (kHeight > 1)
                                  multiply_tiles<2 + n, 5, 6 + n % 2, Int8>();
                              });
                            };
  const std::int64_t whole = p.depth / kInt8TileDepth * kInt8TileDepth;
  for (std::int64_t k = 0; k < whole; k += kInt8TileDepth) {
    multiply(k, p.panels + k * kInt8Panel, p.panel_bytes);
  }
  if (whole < p.depth) multiply(whole, rest.tiles[0], sizeof(rest.tiles[0]));
  for_each_panel<kPanels>([&]<int n>() __attribute__((always_inline)) {
    store_tile<n>(&sums[0][n * kInt8Panel], sizeof(sums[0]));
    if constexpr (kHeight > 1) {
      store_tile<2 + n>(&sums[kTileRows][n * kInt8Panel], sizeof(sums[0]));
    }
  });
  for (int panel = 0; panel < kPanels; ++panel) {
    const Int8ColumnScales columns = column_scales(p, panel, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      store_scaled(
          p, r, panel * kInt8Panel, load_as<Int8Sums>(&sums[r][panel * kInt8Panel]), columns);
    }
  }
}

void gemm_int8_amx(
    std::int64_t m, Matrix<const Int8> a, PackedB<const Int8> b, Matrix<float> c, bool accumulate) {
  static_assert(kInt8Lanes == kInt8Panel);
  if (m < kInt8FewestTileRows) return gemm_int8(m, a, b, c, accumulate);
  const std::int64_t panels = b.n / kInt8Panel;
  Int8Gemm all = {a, b.data, b.k * kInt8Panel, b.k - kInt8ColumnBytes, c, accumulate};
  Int8Rest rest;
  for_each_tile_rows(m, [&](const TileRows& rows) {
    using Multiply = void (*)(const Int8Gemm&, const Int8Rest&, std::int64_t);
    constexpr Multiply kTwo[] = {gemm_int8_tiles<2, 1>, gemm_int8_tiles<2, 2>};
    constexpr Multiply kOne[] = {
        gemm_int8_tiles<1, 1>, gemm_int8_tiles<1, 2>, gemm_int8_tiles<1, 3>, gemm_int8_tiles<1, 4>};
    const bool two = rows.lower > 0;
    const TileShape upper = {rows.upper}, lower = {two ? rows.lower : rows.upper}, whole = {};
    configure_tiles({upper, upper, lower, lower, upper, lower, whole, whole});
    const std::int64_t most = two ? 2 : kInt8MostPanels;
    for (std::int64_t panel = 0; panel < panels; panel += most) {
      const std::int64_t width = at_most(panels - panel, most);
      Int8Gemm part = all;
      part.panels += panel * part.panel_bytes;
      part.c = part.c.from(0, panel * kInt8Panel);
      copy_rest(part, width, rest);
      for (std::int64_t pair = 0; pair < rows.count; ++pair) {
        (two ? kTwo : kOne)[width - 1](part, rest, rows.upper + rows.lower);
        part.a = part.a.from(2 * kTileRows);
        part.c = part.c.from(2 * kTileRows);
      }
    }
    all.a = all.a.from(rows.count * 2 * kTileRows);
    all.c = all.c.from(rows.count * 2 * kTileRows);
  });
  _tile_release();
}

constexpr Int8Kernels kInt8AmxKernels = {gemm_int8_amx, pack_int8};

}  // namespace
}  // namespace lltm::cpu
