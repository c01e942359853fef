// How the work of a layer is cut: hidden units into blocks, threads into a grid.
#pragma once

#include "cpu/pointwise.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm::cpu {

// Blocks begin at multiples of this, the longest vector of floats,
constexpr int64_t kUnits = 16;
// or of this: those that write operands of type BFloat16x3, whole groups.
template <typename G>
constexpr int64_t kBlockUnits = std::is_same_v<G, BFloat16x3> ? kSplitGroup : kUnits;

// Hidden units in blocks of equal width, a multiple of `multiple` and at most
// `max_width`, the last one perhaps narrower; as many blocks as a multiple of `parts`, where there
// are units enough.
struct Blocks {
  Blocks(int64_t hidden_units, int64_t parts, int64_t max_width, int64_t multiple)
      : hidden(hidden_units) {
    const int64_t wanted = std::max((hidden + max_width - 1) / max_width, parts);
    const int64_t even = (wanted + parts - 1) / parts * parts;
    const int64_t units = (hidden + even - 1) / even;
    width = (units + multiple - 1) / multiple * multiple;
    count = (hidden + width - 1) / width;
  }
  // Blocks of a given width.
  Blocks(int64_t hidden_units, int64_t block_width)
      : hidden(hidden_units),
        width(block_width),
        count((hidden_units + block_width - 1) / block_width) {}
  int64_t begin(int64_t block) const { return block * width; }
  int64_t size(int64_t block) const { return std::min(width, hidden - begin(block)); }

  int64_t hidden, width, count;
};

// Hidden units of a block at most: forward their three gates, backward their
// gradient, times the rows of a step, stay in the second-level cache between
// product and pointwise part. Narrower blocks read the rows of the product's
// left operand more often.
template <typename G>
constexpr int64_t kForwardUnits = std::is_same_v<G, BFloat16x3> ? 128 : 64;
template <typename G>
constexpr int64_t kBackwardUnits = std::is_same_v<G, float> ? 128 : 256;
// Bytes of a block's weights at most. The product runs through all of them for
// every few rows, so they have to stay in the second-level cache too.
constexpr int64_t kBlockBytes = 1 << 20;
// The largest width of blocks whose weights take `bytes` per hidden unit. Forward,
// three gates of 16 units fill whole registers; backward it takes 32.
template <typename G>
int64_t block_units(int64_t most, int64_t bytes, int64_t multiple) {
  if (std::is_same_v<G, BFloat16x3>) return most;
  const int64_t units = kBlockBytes / bytes;
  return std::clamp(units / multiple * multiple, multiple, most);
}

// Threads in `rows` groups, each with its own rows of the batch, of `columns`
// threads, each with its own blocks of hidden units.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t threads() const { return rows * columns; }
};

// Rows per thread from which the micro-kernel is near its peak; for BFloat16x3, a
// tile.
template <typename G>
constexpr int64_t kGoodRows = std::is_same_v<G, BFloat16x3> ? 16 : 8;
// Packed weights up to this size stay in a core's own cache, so that each
// thread can run through all of them at every step.
constexpr int64_t kPrivateCache = 3 << 19;
// Multiply-adds of one step below which a second thread costs more than it
// saves.
constexpr int64_t kSerialStep = 150000;

template <typename G>
Grid choose_grid(
    int64_t threads, int64_t batch, int64_t hidden, int64_t weight_bytes, int64_t step) {
  Grid grid;
  if (step < kSerialStep) return grid;
  if (weight_bytes <= kPrivateCache) {
    grid.rows = std::clamp<int64_t>(batch / kGoodRows<G>, 1, threads);
  }
  grid.columns =
      std::clamp<int64_t>(threads / grid.rows, 1, (hidden + kBlockUnits<G> - 1) / kBlockUnits<G>);
  return grid;
}

// Whether products of BFloat16x3 are the faster ones for this grid: where each
// thread has rows enough for a tile of its own, or where threads have to wait for
// each other anyway, twice as many.
inline bool pays_to_split(const Grid& grid, int64_t batch) {
  const int64_t rows = batch / grid.rows;
  return rows >= (grid.columns == 1 ? 1 : 2) * kGoodRows<BFloat16x3>;
}

}  // namespace lltm::cpu
