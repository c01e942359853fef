// Ranges of rows or columns. No torch header.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lltm::cpu {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// One of nearly equal parts of [0, total).
inline Range share(int64_t total, int64_t parts, int64_t part) {
  return {total * part / parts, total * (part + 1) / parts};
}

inline Range intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace lltm::cpu
