#include "cpu/gemm/formats.h"

#include "cpu/prefetch.h"

#include <algorithm>
#include <cstring>

namespace lltm::cpu {
namespace {

Transpose<float> transpose_of(float) {
  return kernels().transpose_f32;
}
Transpose<BFloat16> transpose_of(BFloat16) {
  return kernels().transpose_bf16;
}

// x(n, k) to element (k, n), and zeros from row k_size on. Handling a few rows at a time keeps both
// strides small.
template <int64_t vnni, typename Element>
void pack_elements(
    PackedB<Element> b, int64_t n0, Matrix<const Element> x, int64_t k_size, int64_t n) {
  constexpr int64_t kTile = 16;
  for (int64_t first = 0; first < k_size; first += kTile) {
    const int64_t last = std::min(first + kTile, round_up(k_size, vnni));
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t k = first; k < last; ++k) {
        b.data[(k / vnni * b.ld + n0 + j) * vnni + k % vnni] =
            k < k_size ? x.row(j)[k * x.col_stride] : Element{};
      }
    }
  }
}

// Zeroes rows from k0 + k on, up to a multiple of 32 or to the end. The last row pair is already
// complete.
template <int64_t vnni, typename Element>
void pad_k(PackedB<Element> b, int64_t k0, int64_t n0, int64_t k, int64_t n) {
  const int64_t end = std::min(b.k, round_up(k0 + k, 32));
  for (int64_t row = round_up(k0 + k, vnni); row < end; row += vnni) {
    std::fill_n(b.data + row * b.ld + n0 * vnni, n * vnni, Element{});
  }
}

}  // namespace

template <typename T, int64_t vnni>
bool RowFormat<T, vnni>::pack_a(int64_t m, int64_t k, Matrix<const Unpacked> x, Matrix<Element> a) {
  for (int64_t r = 0; r < m; ++r) std::copy_n(x.row(r), k, a.row(r));
  return true;
}

template <typename T, int64_t vnni>
bool RowFormat<T, vnni>::pack_a_transposed(
    int64_t m, int64_t k, int64_t padded_k, Matrix<const Unpacked> x, Matrix<Element> a) {
  transpose_of(T{})(k, m, x, a);
  for (int64_t r = 0; r < m && k < padded_k; ++r) {
    std::fill(a.row(r) + k, a.row(r) + padded_k, Element{});
  }
  return true;
}

template <typename T, int64_t vnni>
bool RowFormat<T, vnni>::pack_b(
    PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n) {
  const PackedB<Element> part = {b.data + k0 * b.ld, b.k - k0, b.n, b.ld};
  if constexpr (vnni == 1) {
    for (int64_t r = 0; r < k; ++r) {
      std::memcpy(part.data + r * b.ld + n0, x.row(r), n * sizeof(Element));
    }
  } else {
    // The hardware prefetcher does not follow distant rows.
    constexpr int64_t kAhead = 16;
    for (int64_t r = 0; r < k; r += 2) {
      prefetch_rows(x, {std::min(r + kAhead, k), std::min(r + kAhead + 2, k)}, n);
      const Element* const second = r + 1 < k ? x.row(r + 1) : nullptr;
      kernels().pair_rows_bf16(n, x.row(r), second, part.data + r * b.ld + n0 * vnni);
    }
  }
  pad_k<vnni>(b, k0, n0, k, n);
  return true;
}

template <typename T, int64_t vnni>
bool RowFormat<T, vnni>::pack_b_transposed(
    PackedB<Element> b, int64_t k0, int64_t n0, Matrix<const Unpacked> x, int64_t k, int64_t n) {
  const PackedB<Element> part = {b.data + k0 * b.ld, b.k - k0, b.n, b.ld};
  const Matrix<Element> to = {part.data + n0 * vnni, b.ld * vnni};
  if (x.col_stride != 1) {
    pack_elements<vnni>(part, n0, x, k, n);
  } else if constexpr (vnni == 1) {
    kernels().transpose_f32(n, k, x, to);
  } else {
    kernels().pair_columns_bf16(n, k, x, to);
  }
  pad_k<vnni>(b, k0, n0, k, n);
  return true;
}

template struct RowFormat<float, 1>;
template struct RowFormat<BFloat16, 2>;

}  // namespace lltm::cpu
