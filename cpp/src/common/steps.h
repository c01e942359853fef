// The steps of a sequence. No PyTorch header: tensor_steps.h reads them from tensors.
#pragma once

#include "cell/cell.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace lltm {

// Rows [offset, offset + rows) of the flattened (N, .) input and output. In both directions, they
// continue the state's first `rows` rows; other sequences have ended or not started.
struct Step {
  int64_t offset;
  int64_t rows;
};

// Steps [first, last) and their rows, which are contiguous.
struct Chunk {
  size_t first, last;
  int64_t begin, rows;
};

// A chunk has at least 1 step.
inline std::vector<Chunk> plan_chunks(
    const std::vector<Step>& steps,
    int64_t max_rows,
    size_t max_steps = std::numeric_limits<size_t>::max()) {
  std::vector<Chunk> chunks;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    if (chunks.empty() || chunks.back().rows + rows > max_rows ||
        k - chunks.back().first == max_steps) {
      chunks.push_back({k, k, offset, 0});
    }
    Chunk& chunk = chunks.back();
    chunk.last = k + 1;
    chunk.begin = std::min(chunk.begin, offset);
    chunk.rows += rows;
  }
  return chunks;
}

inline int64_t most_rows(const std::vector<Chunk>& chunks) {
  int64_t most = 0;
  for (const Chunk& chunk : chunks) most = std::max(most, chunk.rows);
  return most;
}

inline int64_t carried_rows(const std::vector<Step>& steps, size_t k) {
  return k == 0 ? 0 : std::min(steps[k].rows, steps[k - 1].rows);
}

// States before rows [row, row + count) of the flattened input: from `source` on in the output or,
// if `initial`, in h_0.
struct StateSpan {
  int64_t row, source, count;
  bool initial;
};

// In the order of input rows. Consecutive steps of equal size share a span.
inline std::vector<StateSpan> states_before(
    const std::vector<Step>& steps, size_t first, size_t last) {
  std::vector<StateSpan> spans;
  const auto append = [&](const StateSpan& span) {
    if (span.count <= 0) return;
    if (!spans.empty()) {
      StateSpan& end = spans.back();
      if (end.initial == span.initial && end.source + end.count == span.source) {
        end.count += span.count;
        return;
      }
    }
    spans.push_back(span);
  };
  const bool reversed = first < last && steps[last - 1].offset < steps[first].offset;
  for (size_t n = 0; n < last - first; ++n) {
    const size_t k = reversed ? last - 1 - n : first + n;
    const auto [offset, rows] = steps[k];
    const int64_t carried = carried_rows(steps, k);
    if (carried > 0) append({offset, steps[k - 1].offset, carried, /*initial=*/false});
    append({offset + carried, carried, rows - carried, /*initial=*/true});
  }
  return spans;
}

// The k-th state in the engines' c (cell.h) before the first step, and after a reset.
inline double first_value(const CellInfo& cell, int k) {
  const int index = k - (cell.reads_h ? 1 : 0);
  return index < 0 ? 0 : cell.programs->initial_states[index];
}

// Calls body(slot, column) for each given gate: its columns begin there in the input, of `width`
// columns, and in its gradient.
template <typename Body>
void for_each_given(const CellInfo& cell, int64_t hidden, int64_t width, const Body& body) {
  for (int slot = 0; slot < cell.slots; ++slot) {
    const int given = cell.given_blocks[slot];  // from 1 on
    if (given > 0) body(slot, width - (cell.given - given + 1) * hidden);
  }
}

}  // namespace lltm
