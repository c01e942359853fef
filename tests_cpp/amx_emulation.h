// Emulates AMX and AVX512-BF16 instructions with AVX-512: amx_kernels.h and amx_int8_kernels.h run
// without AMX, and sanitizers see their memory accesses. isa/amx.cpp is compiled again with this
// file (-include), without AMX flags. Results are bitwise identical (test_bf16x3.cpp). Source:
// Intel Software Developer's Manual, TDPBF16PS, TDPBUSD and VCVTNE2PS2BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define kernels_amx kernels_emulated_amx
#define __AMX_BF16__ 1

namespace lltm_test::emulated {
namespace {

// 16 rows of 64 bytes, of which the configuration selects a part.
struct Tile {
  alignas(64) std::uint8_t bytes[16][64];
  int rows, row_bytes;
};
thread_local Tile tiles[8];

class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9FC0); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

inline void load_config(const void* config) {
  std::uint8_t bytes[64];
  std::memcpy(bytes, config, sizeof(bytes));
  for (int t = 0; t < 8; ++t) {
    std::uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, sizeof(row_bytes));
    tiles[t] = {};
    tiles[t].rows = bytes[48 + t];
    tiles[t].row_bytes = row_bytes;
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = {};
}

inline void zero(int t) {
  std::memset(tiles[t].bytes, 0, sizeof(tiles[t].bytes));
}

// Rows have their real type, so that sanitizers check bounds.
inline void load(int t, const void* from, std::int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles[t].rows; ++r) {
    std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, tiles[t].row_bytes);
  }
}

inline void store(int t, void* to, std::int64_t stride) {
  for (int r = 0; r < tiles[t].rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], tiles[t].row_bytes);
  }
}

// c += a b, with bfloat16 pairs by row (a) and column (b). Not inline: denormals must be flushed
// during the arithmetic.
[[gnu::noinline]] void multiply_tiles(Tile& c, const Tile& a, const Tile& b) {
  for (int m = 0; m < c.rows; ++m) {
    __m512 even = _mm512_setzero_ps();
    __m512 odd = _mm512_setzero_ps();
    for (int k = 0; k < a.row_bytes / 4; ++k) {
      std::uint32_t pair;
      std::memcpy(&pair, a.bytes[m] + 4 * k, sizeof(pair));
      const __m512 a_even = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair << 16)));
      const __m512 a_odd =
          _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair & 0xFFFF0000)));
      const __m512i row = _mm512_load_si512(b.bytes[k]);
      const __m512 b_even = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
      const __m512 b_odd = _mm512_castsi512_ps(
          _mm512_and_si512(row, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
      even = _mm512_fmadd_ps(a_even, b_even, even);
      odd = _mm512_fmadd_ps(a_odd, b_odd, odd);
    }
    const __m512 before = _mm512_load_ps(c.bytes[m]);
    _mm512_store_ps(c.bytes[m], _mm512_add_ps(before, _mm512_add_ps(even, odd)));
  }
}

inline void multiply(int c, int a, int b) {
  const FlushDenormals flushed;
  multiply_tiles(tiles[c], tiles[a], tiles[b]);
}

// c += a b, with four unsigned bytes by row (a) and signed bytes by column (b).
inline void multiply_bytes(int c, int a, int b) {
  for (int m = 0; m < tiles[c].rows; ++m) {
    std::int32_t sums[16];
    std::memcpy(sums, tiles[c].bytes[m], sizeof(sums));
    for (int k = 0; k < tiles[a].row_bytes; ++k) {
      const std::int32_t left = tiles[a].bytes[m][k];
      for (int n = 0; n < 16; ++n) {
        sums[n] += left * static_cast<std::int8_t>(tiles[b].bytes[k / 4][4 * n + k % 4]);
      }
    }
    std::memcpy(tiles[c].bytes[m], sums, sizeof(sums));
  }
}

// To nearest, ties to even. NaNs become quiet, denormals zero.
inline __m512i round_to_bfloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i truncated = _mm512_srli_epi32(bits, 16);
  const __m512i quiet = _mm512_or_si512(truncated, _mm512_set1_epi32(0x40));
  const __m512i sign = _mm512_and_si512(truncated, _mm512_set1_epi32(0x8000));
  constexpr int kQuietNan = 0x01, kSignallingNan = 0x80, kDenormal = 0x20;
  const __mmask16 nan = _mm512_fpclass_ps_mask(x, kQuietNan | kSignallingNan);
  const __mmask16 denormal = _mm512_fpclass_ps_mask(x, kDenormal);
  return _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), denormal, sign);
}

inline __m512i convert_two(__m512 high, __m512 low) {
  const __m256i low_half = _mm512_cvtepi32_epi16(round_to_bfloat16(low));
  const __m256i high_half = _mm512_cvtepi32_epi16(round_to_bfloat16(high));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low_half), high_half, 1);
}

// Sanitizers check this copy.
inline __m512 load_first(__mmask16 mask, const void* from) {
  alignas(64) float values[16] = {};
  std::memcpy(values, from, sizeof(float) * __builtin_popcount(mask));
  return _mm512_load_ps(values);
}

}  // namespace
}  // namespace lltm_test::emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig(config) lltm_test::emulated::load_config(config)
#define _tile_release() lltm_test::emulated::release()
#define _tile_zero(tile) lltm_test::emulated::zero(tile)
#define _tile_loadd(tile, from, stride) lltm_test::emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) lltm_test::emulated::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) lltm_test::emulated::multiply(c, a, b)
#define _tile_dpbusd(c, a, b) lltm_test::emulated::multiply_bytes(c, a, b)
#define _mm512_cvtne2ps_pbh(high, low) lltm_test::emulated::convert_two(high, low)
#define _mm512_maskz_loadu_ps(mask, from) lltm_test::emulated::load_first(mask, from)
