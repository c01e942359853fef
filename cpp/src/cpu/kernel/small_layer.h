// A layer of few sequences whose weights stay in the cache: a single call of a kernel computes all
// steps (small_layer_kernels.h). No PyTorch header.
#pragma once

#include <cstdint>

namespace lltm::cpu {

constexpr std::int64_t kLayerUnits = 16;  // of the fastest blocks of weights

// S pre-activations. Rows of `padded` values are H, rounded up to complete blocks.
struct SmallLayer {
  std::int64_t input, hidden, padded, batch;
  std::int64_t x_step, y_step;  // between steps of x (B, I) and y (B, H), which are contiguous
  // For each block of units, from begins[block] to begins[block + 1]: (I, ., units) for the
  // pre-activations that read x, then (H, ., units) for those that read h.
  const float* weights;
  std::int64_t blocks;
  const std::int64_t* begins;
  const float* bias;  // (S, padded)
  float* h;           // (B, H), of the last step
  float* c;           // (B, state columns, padded); cell.h explains c
};

// y (steps, B, H) from x (steps, B, I). They do not overlap.
using RunSmallLayer =
    void (*)(const SmallLayer& layer, const float* x, float* y, std::int64_t steps);

}  // namespace lltm::cpu
