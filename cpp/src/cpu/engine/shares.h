#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "common/steps.h"
#include "cpu/range.h"
#include "cpu/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lltm::cpu {

// A group: all grid positions with the same rows.
struct Share {
  int64_t group;
  Range rows, blocks;
};

class Shares {
 public:
  // `steps` must outlive this object.
  Shares(const std::vector<Step>& steps, int64_t batch, Grid grid, int64_t blocks)
      : steps_(steps), grid_(grid), blocks_(blocks), begin_(grid.rows + 1, batch) {
    begin_[0] = 0;
    if (grid.rows == 1) return;
    // Groups have nearly equal sums of lengths.
    std::vector<int64_t> ending(batch + 1), before(batch + 1);
    for (const Step& step : steps) ++ending[step.rows];
    auto length = static_cast<int64_t>(steps.size());
    for (int64_t row = 0; row < batch; ++row) {
      length -= ending[row];
      before[row + 1] = before[row] + length;
    }
    for (int64_t group = 1; group < grid.rows; ++group) {
      const int64_t sum = share(before[batch], grid.rows, group).begin;
      begin_[group] = std::upper_bound(before.begin(), before.end(), sum) - before.begin() - 1;
    }
  }

  Range rows_of_group(int64_t group) const { return {begin_[group], begin_[group + 1]}; }
  Range rows_of_step(size_t k, int64_t group) const {
    return intersect(rows_of_group(group), {0, steps_[k].rows});
  }
  // After count_rows_before: of a group.
  int64_t most_rows_in_chunk() const { return most_rows_in_chunk_; }

  Share share_of(int64_t worker) const {
    const int64_t group = worker / grid_.columns;
    return {group, rows_of_group(group), share(blocks_, grid_.columns, worker % grid_.columns)};
  }

  // With `reverse`, a chunk's rows begin at its last step.
  void count_rows_before(const std::vector<Chunk>& chunks, bool reverse) {
    rows_before_.resize(steps_.size() * grid_.rows);
    for (const Chunk& chunk : chunks) {
      for (int64_t group = 0; group < grid_.rows; ++group) {
        int64_t rows = 0;
        for (size_t i = 0; i < chunk.last - chunk.first; ++i) {
          const size_t k = reverse ? chunk.last - 1 - i : chunk.first + i;
          rows_before_[k * grid_.rows + group] = rows;
          rows += rows_of_step(k, group).size();
          most_rows_in_chunk_ = std::max(most_rows_in_chunk_, rows);
        }
      }
    }
  }

  // The group's rows in the steps before step k in its chunk.
  int64_t rows_before(size_t k, int64_t group) const {
    return rows_before_[k * grid_.rows + group];
  }

 private:
  const std::vector<Step>& steps_;
  Grid grid_;
  int64_t blocks_;
  std::vector<int64_t> begin_;        // groups' first batch rows, and the batch size
  std::vector<int64_t> rows_before_;  // indexed by step and group
  int64_t most_rows_in_chunk_ = 0;
};

// Zeroes columns of z (rows, S * width) without a term in x, because the recurrent GEMM
// accumulates.
inline void clear_slots_of_h(const CellInfo& cell, int64_t width, int64_t rows, Matrix<float> z) {
  const int64_t columns = (cell.slots - cell.x.end) * width;
  if (columns == 0) return;
  for (int64_t r = 0; r < rows; ++r) std::fill_n(z.row(r) + cell.x.end * width, columns, 0.0f);
}

}  // namespace lltm::cpu
