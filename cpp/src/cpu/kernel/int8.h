// GEMM for floats quantized to 8 bits, accumulated exactly in int32.
//
// A scale maps the largest magnitude in each weight row (a B column) to 127. A is quantized at run
// time: input rows by their largest magnitude, states by 1 (|h'| <= 1). Rounding errors are up to
// half a scale. VNNI and I8MM multiply unsigned by signed bytes: A is stored plus 128, and 128
// times the B column's sum is subtracted from the results.
//
// No torch header.
#pragma once

#include "common/matrix.h"

#include <cstdint>

namespace lltm::cpu {

// Unsigned in A, signed in B.
struct Int8 {
  std::uint8_t bits;
};

constexpr float kInt8Largest = 127;
constexpr int kInt8Offset = 128;

// A 32-bit lane multiplies four A bytes by four B bytes.
constexpr std::int64_t kInt8Group = 4;
constexpr std::int64_t int8_depth(std::int64_t k) {
  return (k + kInt8Group - 1) / kInt8Group * kInt8Group;
}
// Sums stay below 2^31.
constexpr std::int64_t kInt8MostK = 1 << 16;

// A (M, K): a row's bytes, and at byte int8_depth(K) its scale as a float.
constexpr std::int64_t int8_row_stride(std::int64_t k) {
  constexpr std::int64_t kLine = 64;
  return (int8_depth(k) + std::int64_t{sizeof(float)} + kLine - 1) / kLine * kLine;
}

// B (K, N): panels of 16 columns, in groups of four rows, [group][column][row % 4], padded with
// zeros; then, per column, its scale (float) and 128 times its byte sum (int32), as eight more
// rows.
constexpr std::int64_t kInt8Panel = 16;
constexpr std::int64_t kInt8ColumnBytes = sizeof(float) + sizeof(std::int32_t);
// PackedB::k includes these eight rows.
constexpr std::int64_t int8_padded_k(std::int64_t k) {
  return int8_depth(k) + kInt8ColumnBytes;
}

struct Int8Kernels {
  Gemm<Int8>* gemm;  // b.n is a multiple of 16
  // Contiguous rows of x (m, k), scales of at least least / 127. False if a value is not finite.
  bool (*pack_a)(
      std::int64_t m, std::int64_t k, Matrix<const float> x, Matrix<Int8> a, float least);
};

// Null if not compiled.
const Int8Kernels* kernels_vnni();
const Int8Kernels* kernels_dotprod();
const Int8Kernels* kernels_i8mm();

}  // namespace lltm::cpu
