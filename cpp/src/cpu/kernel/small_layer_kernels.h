// A built-in cell's layer (small_layer.h). One step is, for each block of units,
//     z = bias + x W_x^T + h W_h^T
//     h', c' from z and c
// A CPU that executes out of order computes the second line while it reads the next block's
// weights. As accurate as the other engines for cells that forget (docs/accuracy.md).
#pragma once

#include "cell/cells.h"
#include "cpu/kernel/floats.h"
#include "cpu/kernel/small_layer.h"

#include <cstdint>

namespace lltm::cpu {
namespace {

// Vectors that are summed at once. Sums must hide the latency of a multiply-add, and fit in the
// registers with a product's operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMostSums = 16;
#elif defined(__AVX__)
constexpr int kMostSums = 12;
#else
constexpr int kMostSums = 8;
#endif
// Products that are added in float32 in one chain.
constexpr std::int64_t kLongestChain = 32;

#if defined(__AVX512F__)
// The larger of two, or NaN if `x` is NaN.
LLTM_CELL_INLINE Floats larger(Floats bound, Floats x) {
  return _mm512_max_ps(bound, x);
}
// y where x >= bound, otherwise z.
LLTM_CELL_INLINE Floats select(Floats x, Floats bound, Floats y, Floats z) {
  return _mm512_mask_mov_ps(z, _mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ), y);
}
#elif defined(__AVX__)
LLTM_CELL_INLINE Floats larger(Floats bound, Floats x) {
  return _mm256_max_ps(bound, x);
}
LLTM_CELL_INLINE Floats select(Floats x, Floats bound, Floats y, Floats z) {
  return _mm256_blendv_ps(z, y, _mm256_cmp_ps(x, bound, _CMP_GE_OQ));
}
#else
LLTM_CELL_INLINE Floats larger(Floats bound, Floats x) {
  return bound > x ? bound : x;
}
LLTM_CELL_INLINE Floats select(Floats x, Floats bound, Floats y, Floats z) {
  return x >= bound ? y : z;
}
#endif

// Values of a vector's units, in a cell's definition.
struct Lanes {
  Floats v;

  Lanes() = default;
  LLTM_CELL_INLINE Lanes(Floats x) : v(x) {}
  LLTM_CELL_INLINE Lanes(float x) : v(broadcast(x)) {}
  friend LLTM_CELL_INLINE Lanes operator+(Lanes a, Lanes b) { return a.v + b.v; }
  friend LLTM_CELL_INLINE Lanes operator-(Lanes a, Lanes b) { return a.v - b.v; }
  friend LLTM_CELL_INLINE Lanes operator*(Lanes a, Lanes b) { return a.v * b.v; }
};

// tanh(x), or tanh(x / 2) / 2 if kHalf, as x P(x^2) / Q(x^2): a minimax approximation with an error
// up to 3.2e-7, or 1.7e-7, and half the latency of cell/math.h, which is also exact relative to
// small results. Never exceeds its limits, and reaches them: a gate must close for an infinite h.
template <bool kHalf>
LLTM_CELL_INLINE Floats scaled_tanh(Floats x) {
  constexpr float kScale = kHalf ? 0.5f : 1.0f;
  constexpr float kLimit = 8.0f / kScale;  // beyond it, rounding errors exceed the limits
  constexpr float k2 = kScale * kScale, k4 = k2 * k2, k6 = k4 * k2, k8 = k4 * k4, k10 = k8 * k2;
  const Floats u = x * x;
  Floats p = broadcast(k10 * 4.575810308e-8f);
  p = p * u + broadcast(k8 * 3.004014070e-5f);
  p = p * u + broadcast(k6 * 3.933778964e-3f);
  p = p * u + broadcast(k4 * 1.372579932e-1f);
  p = p * u + broadcast(k2);
  Floats q = broadcast(k10 * 6.418772736e-10f);
  q = q * u + broadcast(k8 * 1.501866564e-6f);
  q = q * u + broadcast(k6 * 4.074876197e-4f);
  q = q * u + broadcast(k4 * 2.746433020e-2f);
  q = q * u + broadcast(k2 * 4.705911875e-1f);
  q = q * u + broadcast(1.0f);
  const Floats limit = broadcast(kLimit), most = broadcast(kScale);
  return select(x, limit, most, select(-x, limit, -most, x * p / q));
}
LLTM_CELL_INLINE Lanes tanh(Lanes x) {
  return scaled_tanh<false>(x.v);
}
LLTM_CELL_INLINE Lanes sigmoid(Lanes x) {
  return scaled_tanh<true>(x.v) + broadcast(0.5f);
}
LLTM_CELL_INLINE Lanes maximum(Lanes x, Lanes y) {
  return larger(y.v, x.v);
}
LLTM_CELL_INLINE Lanes elu(Lanes x) {
  alignas(64) float values[kLanes];
  store_lanes(x.v, values);
  for (float& value : values) value = math::elu(value);
  return load_lanes(values);
}

// n values, or a vector unless kPart.
template <bool kPart>
LLTM_CELL_INLINE Floats load_units(const float* x, std::int64_t n) {
  if constexpr (kPart) {
    return load_first(x, n);
  } else {
    return load_lanes(x);
  }
}

// z (kSlots, kWidth) += a (n) w (n, kSlots, units), for kWidth vectors of each row, or `part`
// values.
template <int kSlots, bool kPart, int kWidth>
LLTM_CELL_INLINE void multiply(
    const float* w,
    std::int64_t units,
    std::int64_t part,
    const float* a,
    std::int64_t n,
    Floats (*z)[kWidth]) {
  constexpr int kSums = kSlots * kWidth;
  constexpr int kChains = kMostSums >= 8 * kSums   ? 8
                          : kMostSums >= 4 * kSums ? 4
                          : kMostSums >= 2 * kSums ? 2
                                                   : 1;
  const auto for_each = [&](const auto& body) __attribute__((always_inline)) {
    LLTM_UNROLL
    for (int s = 0; s < kSlots; ++s) {
      LLTM_UNROLL
      for (int v = 0; v < kWidth; ++v) body(s, v);
    }
  };
  const auto add = [&](std::int64_t k, Floats(*sums)[kWidth]) __attribute__((always_inline)) {
    const Floats factor = broadcast(a[k]);
    const float* const row = w + k * kSlots * units;
    for_each([&](int s, int v) __attribute__((always_inline)) {
      sums[s][v] += factor * load_units<kPart>(row + s * units + v * kLanes, part);
    });
  };
  // Two multiply-adds begin in a cycle, and one takes four: fewer than eight sums wait for each
  // other. Several chains cost 24 cycles more.
  constexpr std::int64_t kFew = kSums >= 8 ? kLongestChain : 24 * 2 / (8 - kSums);
  if (n <= kFew) {
    for (std::int64_t k = 0; k < n; ++k) add(k, z);
    return;
  }
  for (std::int64_t k = 0; k < n;) {
    Floats chains[kChains][kSlots][kWidth] = {};
    const std::int64_t left = n - k, most = kChains * kLongestChain;
    const std::int64_t end = k + (left < most ? left : most);
    for (; k + kChains <= end; k += kChains) {
      LLTM_UNROLL
      for (int q = 0; q < kChains; ++q) add(k + q, chains[q]);
    }
    for (; k < end; ++k) add(k, chains[0]);
    for_each([&](int s, int v) __attribute__((always_inline)) {
      LLTM_UNROLL
      for (int half = kChains / 2; half > 0; half /= 2) {
        LLTM_UNROLL
        for (int q = 0; q < half; ++q) chains[q][s][v] += chains[q + half][s][v];
      }
      z[s][v] += chains[0][s][v];
    });
  }
}

// Vectors of a block that are computed at once.
template <int kSlots>
constexpr int kWidthFor = [] {
  int width = kLayerUnits / kLanes;
  while (width > 1 && width * kSlots > kMostSums) width /= 2;
  return width;
}();

struct RowOfStep {
  const float *x, *h;
  float *c, *h_next;
};

// Units from `unit` on in a step of a row: kWidth vectors, or `part` units. w: of these units, in
// rows of `units`. Pre-activations stay in registers.
template <typename Definition, int kWidth, std::int64_t kUnits = 0, bool kPart = false>
LLTM_CELL_INLINE void run_units(
    const SmallLayer& layer,
    const float* w,
    std::int64_t width_of_row,
    std::int64_t unit,
    const RowOfStep& row,
    std::int64_t part = 0) {
  constexpr CellInfo kCell = Definition::kCell;
  const std::int64_t units = kUnits > 0 ? kUnits : width_of_row;
  constexpr int kX = kCell.x.count(), kH = kCell.h.count();
  Floats z[kCell.slots][kWidth];
  LLTM_UNROLL
  for (int s = 0; s < kCell.slots; ++s) {
    LLTM_UNROLL
    for (int v = 0; v < kWidth; ++v) {
      z[s][v] = load_lanes(layer.bias + s * layer.padded + unit + v * kLanes);
    }
  }
  multiply<kX, kPart>(w, units, part, row.x, layer.input, z + kCell.x.begin);
  w += layer.input * kX * units;
  multiply<kH, kPart>(w, units, part, row.h, layer.hidden, z + kCell.h.begin);
  LLTM_UNROLL
  for (int v = 0; v < kWidth; ++v) {
    const std::int64_t first = unit + v * kLanes;
    Lanes z_v[kCell.slots];
    LLTM_UNROLL
    for (int s = 0; s < kCell.slots; ++s) z_v[s] = z[s][v];
    const auto next = Definition::forward(z_v, Lanes(load_lanes(row.c + first)));
    if constexpr (kPart) {
      store_first(next.h.v, row.h_next + first, part);
    } else {
      store_lanes(next.h.v, row.h_next + first);
    }
    store_lanes(next.c.v, row.c + first);
  }
}

// A block of other widths than kLayerUnits: not inlined, for better code there.
template <typename Definition>
__attribute__((noinline)) void run_block(
    const SmallLayer& layer,
    const float* w,
    std::int64_t unit,
    std::int64_t end,
    const RowOfStep& row) {
  constexpr int kWidth = kWidthFor<Definition::kCell.slots>, kN = kWidth * kLanes;
  const std::int64_t units = end - unit;
  if (units == kLanes) return run_units<Definition, 1, kLanes>(layer, w, units, unit, row);
  for (; end - unit >= kN; unit += kN, w += kN) {
    run_units<Definition, kWidth>(layer, w, units, unit, row);
  }
  for (; end - unit >= kLanes; unit += kLanes, w += kLanes) {
    run_units<Definition, 1>(layer, w, units, unit, row);
  }
  if (const std::int64_t part = end - unit; part > 0) {
    run_units<Definition, 1, 0, true>(layer, w, units, unit, row, part);
  }
}

template <typename Definition>
void run_small_layer(const SmallLayer& layer, const float* x, float* y, std::int64_t steps) {
  constexpr CellInfo kCell = Definition::kCell;
  static_assert(kCell.state_columns() == 1 && kCell.parameters == 0);
  constexpr int kWidth = kWidthFor<kCell.slots>;
  const std::int64_t weights_of_unit =
      kCell.x.count() * layer.input + kCell.h.count() * layer.hidden;
  const float* h = layer.h;
  for (std::int64_t t = 0; t < steps; ++t) {
    for (std::int64_t r = 0; r < layer.batch; ++r) {
      const RowOfStep row = {
          x + r * layer.input,
          h + r * layer.hidden,
          layer.c + r * layer.padded,
          y + r * layer.hidden};
      const float* w = layer.weights;
      for (std::int64_t block = 0; block < layer.blocks; ++block) {
        const std::int64_t unit = layer.begins[block], units = layer.begins[block + 1] - unit;
        if (units == kLayerUnits) {
          LLTM_UNROLL
          for (int j = 0; j < kLayerUnits; j += kWidth * kLanes) {
            run_units<Definition, kWidth, kLayerUnits>(layer, w + j, units, unit + j, row);
          }
        } else {
          run_block<Definition>(layer, w, unit, unit + units, row);
        }
        w += weights_of_unit * units;
      }
    }
    h = y;
    x += layer.x_step;
    y += layer.y_step;
  }
  if (steps > 0) __builtin_memcpy(layer.h, h, layer.batch * layer.hidden * sizeof(float));
}

}  // namespace
}  // namespace lltm::cpu
