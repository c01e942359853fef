// The formats of GEMM operands: types with equal members, so that engines are templates over the
// format.
//
//   F32Format     float32 (gemm_kernels.h)
//   Bf16Format    bfloat16 in VNNI layout (gemm_kernels.h, amx_kernels.h)
//   Bf16x3Format  float32 decomposed to bf16x3 (bf16x3.h)
//   Int8Format    float32 quantised to 8 bits (int8.h); forward only
//
// No header of torch.
#pragma once

#include "common/matrix.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"

#include <cstdint>

namespace lltm::cpu {

// The most products that a float32 GEMM of m rows adds one after another: rounding errors grow with
// their number. With few rows MKL, which plain PyTorch uses, is more accurate.
constexpr int64_t longest_chain(int64_t m) {
  return m < 16 ? 32 : 128;
}

// What the formats share whose A is row-major and not packed. K is padded with zeros. B is in VNNI
// layout: kVnniFactor rows interleaved, element (k, n) at [k / kVnniFactor][n][k % kVnniFactor].
template <typename Element, int64_t vnni_factor>
struct RowFormat {
  using Operand = Element;  // an element of an operand
  using Source = Element;   // what it is packed from
  using B = Element;        // an element of B, and whether its rows need no packing
  static constexpr bool kBInPlace = false;
  static constexpr int64_t kVnniFactor = vnni_factor;
  // Whether the rows of a matrix of Source can be A without being packed.
  static constexpr bool kInPlace = true;
  // Blocks of hidden units begin at multiples of this: a vector of floats.
  static constexpr int64_t kUnitAlign = 16;

  // Whether there is a kernel for this CPU.
  static bool available() {
    if constexpr (kVnniFactor == 1) return gemms_f32<float>().multiply != nullptr;
    return kernels().gemm_bf16_operands != nullptr;
  }

  // K is padded with zeros, N with arbitrary values. bfloat16 pads K to pairs, and K > 32 to whole
  // AMX tiles (32): a partial tile costs as much as a whole one, or 4 to 10 times as much where K
  // is not a multiple of 4.
  static constexpr int64_t padded_k(int64_t k) {
    constexpr int64_t kTile = 32;
    return kVnniFactor == 1 ? k : round_up(k, k <= kTile ? kVnniFactor : kTile);
  }
  static constexpr int64_t padded_n(int64_t n) { return n; }
  // Elements from one row of A to the next.
  static constexpr int64_t a_stride(int64_t k) { return padded_k(k); }
  // Columns from one slot to the next where A is the gradients of all slots.
  static constexpr int64_t slot_pitch(int64_t hidden) { return hidden; }

  // Whether rows (., k), `stride` elements apart, can be A without packing.
  static constexpr bool fits_in_place(int64_t k, int64_t stride) {
    return padded_k(k) == k && stride % kVnniFactor == 0;
  }
  static Matrix<const Operand> in_place(Matrix<const Source> x) { return x; }
  // What the element-wise kernel leaves out of states (m, k) that it packs as A.
  static void init_states(int64_t /*m*/, int64_t /*k*/, Matrix<Operand> /*a*/) {}

  // The packing functions return whether all values can be represented, here always.
  //
  // A (m, k) from x (m, k), its rows contiguous; padding is left as it is.
  static bool pack_a(int64_t m, int64_t k, Matrix<const Source> x, Matrix<Operand> a);
  // A (m, padded_k) from x (k, m), its rows contiguous; padded with zeros.
  static bool pack_a_transposed(
      int64_t m, int64_t k, int64_t padded_k, Matrix<const Source> x, Matrix<Operand> a);
  // Rows from k0 and columns from n0 of B, of x (k, n); then zeros up to the next multiple of
  // 32 rows, or to the end of B.
  static bool pack_b(
      PackedB<Operand> b, int64_t k0, int64_t n0, Matrix<const Source> x, int64_t k, int64_t n);
  // The same of the transpose of x (n, k).
  static bool pack_b_transposed(
      PackedB<Operand> b, int64_t k0, int64_t n0, Matrix<const Source> x, int64_t k, int64_t n);
  // Element (k, n) of B.
  static Operand at(const PackedB<const Operand>& b, int64_t k, int64_t n) {
    return b.data[(k / kVnniFactor * b.ld + n) * kVnniFactor + k % kVnniFactor];
  }

  // C (m, b.n) = A (m, b.k) B, or += where `accumulate`. No size may be 0.
  static void gemm(
      int64_t m,
      Matrix<const Operand> a,
      PackedB<const Operand> b,
      Matrix<float> c,
      bool accumulate) {
    if constexpr (kVnniFactor == 1) {
      gemms_f32<float>().multiply(m, a, b, c, longest_chain(m), accumulate);
    } else {
      kernels().gemm_bf16_operands(m, a, b, c, accumulate);
    }
  }
};

using F32Format = RowFormat<float, 1>;
using Bf16Format = RowFormat<BFloat16, 2>;

// What the formats share whose operands are packed in every case.
struct PackedFormat {
  using Source = float;
  static constexpr bool kInPlace = false;

  static constexpr bool fits_in_place(int64_t /*k*/, int64_t /*stride*/) { return false; }
};

struct Bf16x3Format : PackedFormat {
  using Operand = BFloat16x3;
  static constexpr int64_t kVnniFactor = 2;
  // Blocks write whole groups of A.
  static constexpr int64_t kUnitAlign = kBf16x3Group;

  static bool available() { return kernels().bf16x3.gemm != nullptr; }

  static constexpr int64_t padded_k(int64_t k) { return round_up(k, kBf16x3Group); }
  static constexpr int64_t padded_n(int64_t n) { return round_up(n, kBf16x3Panel); }
  static constexpr int64_t a_stride(int64_t k) { return bf16x3_row_stride(k); }
  static constexpr int64_t slot_pitch(int64_t hidden) { return padded_k(hidden); }

  static Matrix<const Operand> in_place(Matrix<const Source> /*x*/) { return {}; }
  static void init_states(int64_t /*m*/, int64_t /*k*/, Matrix<Operand> /*a*/) {}

  static bool pack_a(int64_t m, int64_t k, Matrix<const Source> x, Matrix<Operand> a) {
    return kernels().bf16x3.pack_a(m, k, x, a);
  }
  static bool pack_a_transposed(
      int64_t m, int64_t k, int64_t /*padded_k*/, Matrix<const Source> x, Matrix<Operand> a) {
    return kernels().bf16x3.pack_a_transposed(k, m, x, a);
  }
  // k0 is a multiple of 32, n0 of 16; the rows of x are contiguous.
  static bool pack_b(
      PackedB<Operand> b, int64_t k0, int64_t n0, Matrix<const Source> x, int64_t k, int64_t n) {
    return kernels().bf16x3.pack_b(k, n, x, panels(b, k0, n0));
  }
  static bool pack_b_transposed(
      PackedB<Operand> b, int64_t k0, int64_t n0, Matrix<const Source> x, int64_t k, int64_t n) {
    return kernels().bf16x3.pack_b_transposed(n, k, x, panels(b, k0, n0));
  }

  static void gemm(
      int64_t m,
      Matrix<const Operand> a,
      PackedB<const Operand> b,
      Matrix<float> c,
      bool accumulate) {
    kernels().bf16x3.gemm(m, a, b, c, accumulate);
  }

 private:
  // The panels of B, from row k0 and column n0 on.
  static Matrix<Operand> panels(PackedB<Operand> b, int64_t k0, int64_t n0) {
    const Matrix<Operand> all = {b.data, b.k * kBf16x3Panel};
    return all.from(n0 / kBf16x3Panel, k0 * kBf16x3Panel);
  }
};

struct Int8Format : PackedFormat {
  using Operand = Int8;
  static constexpr int64_t kVnniFactor = kInt8Group;
  static constexpr int64_t kUnitAlign = kInt8Panel;

  static constexpr int64_t padded_k(int64_t k) { return int8_padded_k(k); }
  static constexpr int64_t padded_n(int64_t n) { return round_up(n, kInt8Panel); }
  static constexpr int64_t a_stride(int64_t k) { return int8_row_stride(k); }

  static Matrix<const Operand> in_place(Matrix<const Source> /*x*/) { return {}; }
  static void init_states(int64_t m, int64_t k, Matrix<Operand> a);

  static bool pack_a(int64_t m, int64_t k, Matrix<const Source> x, Matrix<Operand> a) {
    return kernels().int8.pack_a(m, k, x, a);
  }
  // All of K at once: k0 is 0. n0 is a multiple of 16.
  static bool pack_b_transposed(
      PackedB<Operand> b, int64_t k0, int64_t n0, Matrix<const Source> x, int64_t k, int64_t n);
  // The float that element (k, n) of B stands for.
  static float at(const PackedB<const Operand>& b, int64_t k, int64_t n);

  static void gemm(
      int64_t m,
      Matrix<const Operand> a,
      PackedB<const Operand> b,
      Matrix<float> c,
      bool accumulate) {
    kernels().int8.gemm(m, a, b, c, accumulate);
  }
};

// float32 with a B of storage type T that is not packed: rows as they lie, widened as they are
// read. Available where F32Format is.
template <typename T>
struct F32InPlaceFormat : F32Format {
  using B = T;
  static constexpr bool kBInPlace = true;
  static void gemm(
      int64_t m, Matrix<const float> a, PackedB<const B> b, Matrix<float> c, bool accumulate) {
    gemms_f32<T>().multiply(m, a, b, c, longest_chain(m), accumulate);
  }
};

// Calls body with a value of the type that belongs to `format`, one that training uses.
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
