#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "common/operator_args.h"
#include "common/steps.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/parallel.h"

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace lltm::cpu {

using RowSpan = std::span<const int64_t>;

class Resets {
 public:
  // `reset` is bool, (T, B) or (N), or undefined.
  Resets(const at::Tensor& reset, const std::vector<Step>& steps) {
    if (!reset.defined()) return;
    const at::Tensor flat = reset.contiguous();
    const bool* const mask = flat.const_data_ptr<bool>();
    for (const auto [offset, rows] : steps) {
      first_.push_back(rows_.size());
      for (int64_t r = 0; r < rows; ++r) {
        if (mask[offset + r]) rows_.push_back(r);
      }
    }
    first_.push_back(rows_.size());
  }

  // Reset rows within `rows`, ascending.
  RowSpan of(size_t k, Range rows) const {
    if (rows_.empty()) return {};
    const auto begin = rows_.begin() + static_cast<int64_t>(first_[k]);
    const auto end = rows_.begin() + static_cast<int64_t>(first_[k + 1]);
    return {std::lower_bound(begin, end, rows.begin), std::lower_bound(begin, end, rows.end)};
  }

  bool any() const { return !rows_.empty(); }

 private:
  std::vector<int64_t> rows_;  // reset rows, for all steps
  std::vector<size_t> first_;  // each step's start in rows_, and the end
};

template <typename T>
T stored(double value) {
  if constexpr (std::is_same_v<T, Half>) {
    return {c10::Half(static_cast<float>(value)).x};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return {c10::BFloat16(static_cast<float>(value)).x};
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
void fill_rows(RowSpan rows, Matrix<T> matrix, int64_t columns, double value) {
  for (const int64_t r : rows) std::fill_n(matrix.row(r), columns, stored<T>(value));
}

// State k becomes value(k), for units [unit, unit + units).
template <typename T, typename Value>
void fill_states(
    const CellInfo& cell,
    RowSpan rows,
    Matrix<T> c,
    int64_t hidden,
    Range units,
    const Value& value) {
  for (int k = 0; rows.size() > 0 && k < cell.state_columns(); ++k) {
    fill_rows(rows, c.from(0, k * hidden + units.begin), units.size(), value(k));
  }
}

template <typename T>
void restart_c(const CellInfo& cell, RowSpan rows, Matrix<T> c, int64_t hidden, Range units) {
  fill_states(cell, rows, c, hidden, units, [&](int k) { return first_value(cell, k); });
}

// No gradient flows to the state before a reset.
template <typename T>
void clear_grad_c(const CellInfo& cell, RowSpan rows, Matrix<T> c, int64_t hidden, Range units) {
  fill_states(cell, rows, c, hidden, units, [](int) { return 0.0; });
}

// Calls change(), which adds h W_h^T to z (., columns). The given rows keep their z: for them h
// counts as zero, but h itself is part of the output. As a GEMM with zeros does, zero_product (0,
// or NaN where a weight is not finite) is added to them.
template <typename T, typename Change>
void except_rows(
    RowSpan rows, Matrix<T> z, int64_t columns, const T* zero_product, const Change& change) {
  std::vector<T> kept;
  kept.reserve(rows.size() * columns);
  for (const int64_t r : rows) kept.insert(kept.end(), z.row(r), z.row(r) + columns);
  change();
  const T* next = kept.data();
  for (const int64_t r : rows) {
    for (int64_t j = 0; j < columns; ++j) z.row(r)[j] = *next++ + zero_product[j];
  }
}

}  // namespace lltm::cpu
