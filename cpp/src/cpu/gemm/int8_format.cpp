// Quantization of weights, column by column (cpu/kernel/int8.h has the layout).
#include "cpu/gemm/formats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace lltm::cpu {

void Int8Format::init_states(int64_t m, int64_t k, Matrix<Element> a) {
  const float scale = 1 / kInt8Largest;
  for (int64_t r = 0; r < m; ++r) std::memcpy(a.row(r) + int8_depth(k), &scale, sizeof(scale));
}

namespace {

template <typename Byte>
struct Int8Column {
  Int8Column(const PackedB<Byte>& b, int64_t n) {
    Byte* const panel = b.data + n / kInt8Panel * kInt8Panel * b.k;
    const int64_t column = n % kInt8Panel;
    bytes = panel + column * kInt8Group;
    scale = panel + (b.k - kInt8ColumnBytes) * kInt8Panel + column * int64_t{sizeof(float)};
    sum = scale + kInt8Panel * int64_t{sizeof(float)};
  }
  Byte& at(int64_t k) const {
    return bytes[k / kInt8Group * kInt8Group * kInt8Panel + k % kInt8Group];
  }

  Byte *bytes, *scale, *sum;
};

// Truncated to 17 bits, so that products with bytes are exact: quantizing dequantized weights gives
// the same bytes and scale.
float scale_of(float largest) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(largest / kInt8Largest) & ~0x7Fu);
}

}  // namespace

bool Int8Format::pack_b_transposed(
    PackedB<Element> b,
    int64_t /*k0*/,
    int64_t n0,
    Matrix<const Unpacked> x,
    int64_t k,
    int64_t n) {
  bool finite = true;
  for (int64_t j = 0; j < round_up(n, kInt8Panel); ++j) {
    const auto element = [&](int64_t at) {
      return j < n && at < k ? x.row(j)[at * x.col_stride] : 0.0f;
    };
    float largest = 0;
    for (int64_t at = 0; at < k; ++at) {
      const float magnitude = std::abs(element(at));
      finite &= std::isfinite(magnitude);
      largest = std::max(largest, magnitude);
    }
    const Int8Column<Element> column(b, n0 + j);
    const float scale = scale_of(largest);
    int32_t sum = 0;
    for (int64_t at = 0; at < int8_depth(k); ++at) {
      // float64, because the scale may be subnormal.
      const double value = scale == 0 ? 0.0 : double{element(at)} / double{scale};
      const auto byte = static_cast<int8_t>(std::clamp(std::nearbyint(value), -127.0, 127.0));
      column.at(at).bits = static_cast<uint8_t>(byte);
      sum += kInt8Offset * byte;
    }
    std::memcpy(column.scale, &scale, sizeof(scale));
    std::memcpy(column.sum, &sum, sizeof(sum));
  }
  return finite;
}

float Int8Format::at(const PackedB<const Element>& b, int64_t k, int64_t n) {
  const Int8Column<const Element> column(b, n);
  float scale = 0;
  std::memcpy(&scale, column.scale, sizeof(scale));
  return scale * static_cast<float>(static_cast<int8_t>(column.at(k).bits));
}

}  // namespace lltm::cpu
