// Operands of GEMMs: weights in place, packed rows, conversions. No PyTorch header.
#pragma once

#include "cell/cell.h"
#include "common/memory.h"
#include "cpu/gemm/formats.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace lltm::cpu {

template <typename T>
struct WeightMatrices {
  Matrix<const T> ih, hh;
};

// For few rows, with weights in place, whose rows are contiguous. For `width` units from `unit` on:
// z (rows, S * width) = x W_x^T + h W_h^T. Without x, adds the recurrent part. Without h,
// pre-activations of only h do not change.
template <typename T>
struct WeightsInPlace {
  void multiply(
      int64_t rows,
      Matrix<const float> x,
      Matrix<const float> h,
      int64_t unit,
      int64_t width,
      Matrix<float> z) const {
    using Term = typename InPlaceGemm<T>::Term;
    for (int64_t r = 0; r < rows; r += kMostProductRows) {
      const int64_t count = std::min(rows - r, kMostProductRows);
      for (int slot = 0; slot < cell.slots; ++slot) {
        const bool of_x = x.data != nullptr && cell.x.contains(slot);
        const bool of_h = h.data != nullptr && cell.h.contains(slot);
        if (!of_x && !of_h) continue;
        const auto term = [&](bool has_term,
                              Matrix<const float> a,
                              Matrix<const T> w,
                              const int* blocks,
                              int64_t k) {
          return has_term ? Term{a.from(r), w.from(blocks[slot] * hidden + unit), k} : Term{};
        };
        gemms_f32<T>().multiply_transposed(
            count,
            {{term(of_x, x, weights.ih, cell.x_blocks, input_size),
              term(of_h, h, weights.hh, cell.h_blocks, hidden)},
             width,
             z.from(r, slot * width),
             /*accumulate=*/!of_x && (cell.x.contains(slot) || cell.given_blocks[slot] > 0)});
      }
    }
  }

  const CellInfo& cell;
  WeightMatrices<T> weights;
  int64_t hidden, input_size;
};

template <typename Format>
struct OperandA {
  void clear() const { std::memset(memory.data(), 0, static_cast<std::size_t>(bytes)); }

  Workspace<std::byte> memory;
  int64_t bytes = 0;
  Matrix<typename Format::Element> rows;
};

// Packing does not write the K padding, which is zero.
template <typename Format>
OperandA<Format> allocate_a(int64_t rows, int64_t k, int64_t heads = 1) {
  using Element = typename Format::Element;
  const int64_t stride = Format::a_stride(k, heads);
  const int64_t bytes = rows * stride * static_cast<int64_t>(sizeof(Element));
  Workspace<std::byte> memory(bytes);
  auto* const data = reinterpret_cast<Element*>(memory.data());
  OperandA<Format> operand = {std::move(memory), bytes, {data, stride, 1}};
  if (Format::padded_k(k) != k) operand.clear();
  return operand;
}

template <typename Body>
auto visit_storage_and_format(Storage storage, GemmFormat format, const Body& body) {
  if (format == GemmFormat::kBf16) {
    return storage == Storage::kF32 ? body(float{}, Bf16Format{}) : body(BFloat16{}, Bf16Format{});
  }
  if (format == GemmFormat::kBf16x3) {
    return storage == Storage::kF16 ? body(Half{}, Bf16x3Format{}) : body(float{}, Bf16x3Format{});
  }
  if (storage == Storage::kF16) return body(Half{}, F32Format{});
  return storage == Storage::kBf16 ? body(BFloat16{}, F32Format{}) : body(float{}, F32Format{});
}

inline void narrow(const float* x, float* y, int64_t n) {
  std::copy_n(x, n, y);
}
inline void narrow(const float* x, Half* y, int64_t n) {
  kernels().convert_f16.store(x, y, n);
}
inline void narrow(const float* x, BFloat16* y, int64_t n) {
  kernels().convert_bf16.store(x, y, n);
}

// n elements of a row.
inline void widen(Matrix<const float> x, float* y, int64_t n) {
  for (int64_t j = 0; j < n; ++j) y[j] = x.data[j * x.col_stride];
}
template <typename T>
void widen(Matrix<const T> x, float* y, int64_t n, const ArrayConvert<T>& convert) {
  if (x.col_stride == 1) return convert.load(x.data, y, n);
  for (int64_t j = 0; j < n; ++j) convert.load(x.data + j * x.col_stride, y + j, 1);
}
inline void widen(Matrix<const Half> x, float* y, int64_t n) {
  widen(x, y, n, kernels().convert_f16);
}
inline void widen(Matrix<const BFloat16> x, float* y, int64_t n) {
  widen(x, y, n, kernels().convert_bf16);
}

// Packs rows of x, 16-bit rows for a float32 format in pieces that usually stay in the cache after
// widening. pack(rows, first, count) packs `count` rows from `first` on.
template <typename Unpacked, typename T, typename Pack>
bool pack_widened(Matrix<const T> x, int64_t rows, int64_t columns, const Pack& pack) {
  if constexpr (std::is_same_v<T, Unpacked>) {
    return pack(x, 0, rows);
  } else {
    const int64_t most = std::min(rows, kPackedRows);
    const Workspace<Unpacked> memory(most * columns);
    const Matrix<Unpacked> wide = {memory.data(), columns};
    bool in_range = true;
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first);
      for (int64_t r = 0; r < count; ++r) widen(x.from(first + r), wide.row(r), columns);
      in_range &= pack(as_const(wide), first, count);
    }
    return in_range;
  }
}

// The types of weights that a format multiplies, widened if need be: body(T*) for `storage`.
template <typename Format, typename Body>
decltype(auto) visit_packed_storage(Storage storage, const Body& body) {
  using Unpacked = typename Format::Unpacked;
  if constexpr (std::is_same_v<Unpacked, float>) {
    if (storage == Storage::kF16) return body(static_cast<Half*>(nullptr));
    if (storage == Storage::kBf16) return body(static_cast<BFloat16*>(nullptr));
  }
  return body(static_cast<Unpacked*>(nullptr));
}

}  // namespace lltm::cpu
