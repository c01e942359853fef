// How the hidden units of a layer are cut into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lltm::cpu {

// Blocks begin at multiples of this, the longest vector of floats.
constexpr int64_t kUnits = 16;

// Hidden units in blocks of equal width, at most `max_width`, the last one
// perhaps narrower; as many blocks as a multiple of `parts`, where there are
// units enough.
struct Blocks {
  Blocks(int64_t hidden_units, int64_t parts, int64_t max_width) : hidden(hidden_units) {
    const int64_t wanted = std::max((hidden + max_width - 1) / max_width, parts);
    const int64_t even = (wanted + parts - 1) / parts * parts;
    const int64_t units = (hidden + even - 1) / even;
    width = (units + kUnits - 1) / kUnits * kUnits;
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

}  // namespace lltm::cpu
