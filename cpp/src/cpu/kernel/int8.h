// GEMM of floats quantised to 8 bits, accumulated exactly in int32.
//
// Weights are quantised once, each row of the weights (a column of B) by a scale of its own:
// its largest magnitude becomes 127. A is quantised as the call runs: each row of the input by
// its own largest magnitude, states by 1, which no h' of these cells exceeds. Rounding to nearest
// leaves an error of at most half a scale in each element.
//
// The instructions (VNNI, I8MM) multiply an unsigned byte by a signed one. So A is stored plus 128,
// and 128 times the sum of a column of B is taken off its products.
//
// Part of the files per instruction set: no header of torch.
#pragma once

#include "common/matrix.h"

#include <cstdint>

namespace lltm::cpu {

// One byte of an operand: of A unsigned, of B signed.
struct Int8 {
  std::uint8_t bits;
};

constexpr float kInt8Largest = 127;
// What is added to A.
constexpr int kInt8Offset = 128;

// K in whole groups of four: one 32-bit lane multiplies four of A by four of B.
constexpr std::int64_t kInt8Group = 4;
constexpr std::int64_t int8_depth(std::int64_t k) {
  return (k + kInt8Group - 1) / kInt8Group * kInt8Group;
}
// The sums stay below 2^31 for every A and B.
constexpr std::int64_t kInt8MostK = 1 << 16;

// A (M, K): each row is its bytes, from byte int8_depth(K) on its scale as a float.
constexpr std::int64_t int8_row_stride(std::int64_t k) {
  constexpr std::int64_t kLine = 64;
  return (int8_depth(k) + std::int64_t{sizeof(float)} + kLine - 1) / kLine * kLine;
}

// B (K, N) in panels of 16 columns. A panel is its bytes in groups of four rows, [group][column]
// [row % 4], padded with zeros, and then for each column its scale, a float, and 128 times the sum
// of its bytes, an int32: as many bytes as eight more rows.
constexpr std::int64_t kInt8Panel = 16;
constexpr std::int64_t kInt8ColumnBytes = sizeof(float) + sizeof(std::int32_t);
// The rows of B, these eight with them: PackedB::k.
constexpr std::int64_t int8_padded_k(std::int64_t k) {
  return int8_depth(k) + kInt8ColumnBytes;
}

struct Int8Kernels {
  Gemm<Int8>* gemm;  // b.n is a multiple of 16
  // Quantises the rows of x (m, k), which are contiguous. False where one is not finite.
  bool (*pack_a)(std::int64_t m, std::int64_t k, Matrix<const float> x, Matrix<Int8> a);
};

// Those that need VNNI, for a CPU that has AVX-512 and VNNI; and for ARM CPUs those with the dot
// products of the extensions DotProd and I8MM. Null where the compiler was not told to use them.
const Int8Kernels* kernels_vnni();
const Int8Kernels* kernels_dotprod();
const Int8Kernels* kernels_i8mm();

}  // namespace lltm::cpu
