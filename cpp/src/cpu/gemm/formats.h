// GEMM operand formats: types with the same members, for engine templates.
//
//   F32Format     float32 (gemm_kernels.h)
//   Bf16Format    bfloat16 in VNNI layout (gemm_kernels.h, amx_kernels.h)
//   Bf16x3Format  float32 as bf16x3 (bf16x3.h)
//   Int8Format    float32 quantized to 8 bits (int8.h); forward only
//
// No torch header.
#pragma once

#include "common/matrix.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"

#include <algorithm>
#include <cstdint>

namespace lltm::cpu {

// Maximum products per chain in a float32 GEMM: long chains increase rounding errors. MKL is more
// accurate for m < 16, so chains are shorter.
constexpr int64_t longest_chain(int64_t m) {
  return m < 16 ? 32 : 128;
}

// A is row-major, unpacked. B has VNNI layout: kVnniFactor rows are interleaved, element (k, n) is
// at [k / kVnniFactor][n][k % kVnniFactor].
template <typename T, int64_t vnni_factor>
struct RowFormat {
  using Element = T;
  using Unpacked = T;  // operands are packed from it
  using B = T;
  static constexpr bool kBInPlace = false;
  static constexpr int64_t kVnniFactor = vnni_factor;
  // Rows of a Unpacked matrix can be A.
  static constexpr bool kInPlace = true;
  // Block alignment: a vector.
  static constexpr int64_t kUnitAlign = 16;

  static bool available() {
    if constexpr (kVnniFactor == 1) return gemms_f32<float>().multiply != nullptr;
    return kernels().gemm_bf16_operands != nullptr;
  }

  // K is padded with zeros, N with arbitrary values. bfloat16 pads K to pairs, and K > 32 to full
  // AMX tiles (32): a partial tile costs as much as a full one, or 4 to 10 times as much if K is
  // not a multiple of 4.
  static constexpr int64_t padded_k(int64_t k) {
    constexpr int64_t kTile = 32;
    return kVnniFactor == 1 ? k : round_up(k, k <= kTile ? kVnniFactor : kTile);
  }
  static constexpr int64_t padded_n(int64_t n) { return n; }
  static constexpr int64_t a_stride(int64_t k, int64_t /*heads*/ = 1) { return padded_k(k); }
  // Columns between heads, of `units` each, if A has states.
  static constexpr int64_t head_stride(int64_t units) { return units; }
  // Columns between pre-activations if A is dz.
  static constexpr int64_t slot_pitch(int64_t hidden) { return hidden; }

  static constexpr bool fits_in_place(int64_t k, int64_t stride) {
    return padded_k(k) == k && stride % kVnniFactor == 0;
  }
  static Matrix<const Element> in_place(Matrix<const Unpacked> x) { return x; }
  // The parts of A that the element-wise kernel does not write.
  static void init_states(int64_t /*m*/, int64_t /*k*/, Matrix<Element> /*a*/) {}

  // Packing returns whether all values can be represented: here always. x has contiguous rows. A's
  // padding is not written.
  static bool pack_a(int64_t m, int64_t k, Matrix<const Unpacked> x, Matrix<Element> a);
  // A (m, padded_k) from x (k, m).
  static bool pack_a_transposed(
      int64_t m, int64_t k, int64_t padded_k, Matrix<const Unpacked> x, Matrix<Element> a);
  // x (k, n) into B from row k0 and column n0 on, with zeros up to a multiple of 32 rows or B's
  // end.
  static bool pack_b(
      PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n);
  static bool pack_b_transposed(
      PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n);
  static Element at(const PackedB<const Element>& b, int64_t k, int64_t n) {
    return b.data[(k / kVnniFactor * b.ld + n) * kVnniFactor + k % kVnniFactor];
  }

  // C (m, b.n) = A (m, b.k) B, or += if `accumulate`. No size is 0. If the m rows are a thread's
  // share of more `rows`, these decide the rounding.
  static void gemm(
      int64_t m,
      Matrix<const Element> a,
      PackedB<const Element> b,
      Matrix<float> c,
      bool accumulate,
      [[maybe_unused]] int64_t rows = 0) {
    if constexpr (kVnniFactor == 1) {
      const int64_t chain = longest_chain(std::max(m, rows));
      gemms_f32<float>().multiply(m, a, b, c, chain, accumulate);
    } else {
      kernels().gemm_bf16_operands(m, a, b, c, accumulate);
    }
  }
};

using F32Format = RowFormat<float, 1>;
using Bf16Format = RowFormat<BFloat16, 2>;

struct PackedFormat {
  using Unpacked = float;
  static constexpr bool kInPlace = false;

  static constexpr bool fits_in_place(int64_t /*k*/, int64_t /*stride*/) { return false; }
};

struct Bf16x3Format : PackedFormat {
  using Element = BFloat16x3;
  static constexpr int64_t kVnniFactor = 2;
  // Blocks write complete groups in A.
  static constexpr int64_t kUnitAlign = kBf16x3Group;

  static bool available() { return kernels().bf16x3.gemm != nullptr; }

  static constexpr int64_t padded_k(int64_t k) { return round_up(k, kBf16x3Group); }
  static constexpr int64_t padded_n(int64_t n) { return round_up(n, kBf16x3Panel); }
  static constexpr int64_t a_stride(int64_t k, int64_t /*heads*/ = 1) {
    return bf16x3_row_stride(k);
  }
  static constexpr int64_t head_stride(int64_t units) { return units; }
  static constexpr int64_t slot_pitch(int64_t hidden) { return padded_k(hidden); }

  static Matrix<const Element> in_place(Matrix<const Unpacked> /*x*/) { return {}; }
  static void init_states(int64_t /*m*/, int64_t /*k*/, Matrix<Element> /*a*/) {}

  static bool pack_a(int64_t m, int64_t k, Matrix<const Unpacked> x, Matrix<Element> a) {
    return kernels().bf16x3.pack_a(m, k, x, a);
  }
  static bool pack_a_transposed(
      int64_t m, int64_t k, int64_t /*padded_k*/, Matrix<const Unpacked> x, Matrix<Element> a) {
    return kernels().bf16x3.pack_a_transposed(k, m, x, a);
  }
  // k0 is a multiple of 32, n0 of 16; x has contiguous rows.
  static bool pack_b(
      PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n) {
    return kernels().bf16x3.pack_b(k, n, x, panels(b, k0, n0));
  }
  static bool pack_b_transposed(
      PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n) {
    return kernels().bf16x3.pack_b_transposed(n, k, x, panels(b, k0, n0));
  }

  static void gemm(
      int64_t m,
      Matrix<const Element> a,
      PackedB<const Element> b,
      Matrix<float> c,
      bool accumulate,
      int64_t /*rows*/ = 0) {
    kernels().bf16x3.gemm(m, a, b, c, accumulate);
  }

 private:
  static Matrix<Element> panels(PackedB<Element> b, int64_t k0, int64_t n0) {
    const Matrix<Element> all = {b.data, b.k * kBf16x3Panel};
    return all.from(n0 / kBf16x3Panel, k0 * kBf16x3Panel);
  }
};

struct Int8Format : PackedFormat {
  using Element = Int8;
  static constexpr int64_t kVnniFactor = kInt8Group;
  static constexpr int64_t kUnitAlign = kInt8Panel;

  static constexpr int64_t padded_k(int64_t k) { return int8_padded_k(k); }
  static constexpr int64_t padded_n(int64_t n) { return round_up(n, kInt8Panel); }
  static constexpr int64_t a_stride(int64_t k, int64_t heads = 1) {
    return heads * head_stride(k / heads);
  }
  // Each head has a scale, as a row of its size.
  static constexpr int64_t head_stride(int64_t units) { return int8_row_stride(units); }

  static Matrix<const Element> in_place(Matrix<const Unpacked> /*x*/) { return {}; }
  static void init_states(int64_t m, int64_t k, Matrix<Element> a);

  static bool pack_a(
      int64_t m, int64_t k, Matrix<const Unpacked> x, Matrix<Element> a, float least = 0) {
    return kernels().int8.pack_a(m, k, x, a, least);
  }
  // k0 is 0 (all K rows), n0 a multiple of 16.
  static bool pack_b_transposed(
      PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n);
  static float at(const PackedB<const Element>& b, int64_t k, int64_t n);

  static void gemm(
      int64_t m,
      Matrix<const Element> a,
      PackedB<const Element> b,
      Matrix<float> c,
      bool accumulate,
      int64_t /*rows*/ = 0) {
    kernels().int8.gemm(m, a, b, c, accumulate);
  }
};

// B has storage type T, unpacked; the kernel widens rows. Available with F32Format.
template <typename T>
struct F32InPlaceFormat : F32Format {
  using B = T;
  static constexpr bool kBInPlace = true;
  static void gemm(
      int64_t m, Matrix<const float> a, PackedB<const B> b, Matrix<float> c, bool accumulate) {
    gemms_f32<T>().multiply(m, a, b, c, longest_chain(m), accumulate);
  }
};

// Formats for training only.
template <typename Body>
decltype(auto) visit_format(GemmFormat format, const Body& body) {
  switch (format) {
    case GemmFormat::kF32:
      return body(F32Format{});
    case GemmFormat::kBf16:
      return body(Bf16Format{});
    default:
      return body(Bf16x3Format{});
  }
}

template <typename Format>
constexpr GemmFormat kFormat = GemmFormat::kF32;
template <>
inline constexpr GemmFormat kFormat<Bf16Format> = GemmFormat::kBf16;
template <>
inline constexpr GemmFormat kFormat<Bf16x3Format> = GemmFormat::kBf16x3;
template <>
inline constexpr GemmFormat kFormat<Int8Format> = GemmFormat::kInt8;

}  // namespace lltm::cpu
