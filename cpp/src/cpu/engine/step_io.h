// Everything that enters or leaves a step (common/step_io.h), for a thread's rows of the batch and
// hidden units. Backward has a class of its own in blocked_backward.cpp. No PyTorch header.
#pragma once

#include "cell/cell.h"
#include "common/checkpoints.h"
#include "common/matrix.h"
#include "common/steps.h"
#include "cpu/engine/forward_call.h"
#include "cpu/gemm/operands.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/range.h"

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
  // `reset` is by row of the input, or null.
  Resets(const bool* reset, const std::vector<Step>& steps) {
    if (reset == nullptr) return;
    for (const auto [offset, rows] : steps) {
      first_.push_back(rows_.size());
      for (int64_t r = 0; r < rows; ++r) {
        if (reset[offset + r]) rows_.push_back(r);
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

template <typename From, typename To>
void copy_rows(Matrix<const From> from, Matrix<To> to, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    const From* const x = from.row(r);
    To* const y = to.row(r);
    if constexpr (std::is_same_v<From, To>) {
      if (from.col_stride == 1) {
        std::copy_n(x, columns, y);
        continue;
      }
    }
    for (int64_t j = 0; j < columns; ++j) y[j] = static_cast<To>(x[j * from.col_stride]);
  }
}

template <typename T>
T stored(double value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    const auto wide = static_cast<float>(value);
    T stored;
    narrow(&wide, &stored, 1);
    return stored;
  }
}

// Below, matrices of states and their gradients begin at the first of the rows and units. A state
// of c is H columns after the previous one. T is the storage type. `steps` must outlive the object.
template <typename T>
class RowsIO {
 public:
  using C = compute_t<T>;

  RowsIO(const CellInfo& cell, int64_t hidden, const std::vector<Step>& steps, const bool* reset)
      : resets(reset, steps), cell_(cell), hidden_(hidden), steps_(steps) {}

  // h for the recurrent GEMM or, after a step of backward, the gradient of h from that of the
  // GEMM's operand.
  void enter_h(size_t k, Matrix<C> h, Range rows, Range units) const {
    if (mask_.data != nullptr) multiply(h, as_const(h), rows, units);
    fill(k, h, rows, units, 0);
  }

  const Resets resets;

 protected:
  void multiply(Matrix<C> to, Matrix<const C> h, Range rows, Range units) const {
    for (int64_t r = 0; r < rows.size(); ++r) {
      const auto factor = mask_.from(rows.begin + r, units.begin);
      for (int64_t j = 0; j < units.size(); ++j) {
        to.row(r)[j] = h.row(r)[j] * factor.data[j * factor.col_stride];
      }
    }
  }

  // In reset rows.
  template <typename S>
  void fill(size_t k, Matrix<S> state, Range rows, Range units, double value) const {
    for (const int64_t r : resets.of(k, rows)) {
      std::fill_n(state.row(r - rows.begin), units.size(), stored<S>(value));
    }
  }

  const CellInfo& cell_;
  const int64_t hidden_;
  const std::vector<Step>& steps_;
  Matrix<const C> mask_;  // or null
};

template <typename T>
class ForwardIO : public RowsIO<T> {
  using Rows = RowsIO<T>;
  using Rows::cell_, Rows::hidden_, Rows::steps_;

 public:
  explicit ForwardIO(const ForwardCall& call)
      : Rows(call.cell, call.hidden, call.steps, call.reset),
        call_(call),
        output_{static_cast<T*>(call.output), cell_.output_columns() * hidden_},
        activations_{static_cast<T*>(call.activations), cell_.saved * hidden_} {
    // Engines of 16-bit states apply it in the element-wise kernel.
    if constexpr (std::is_same_v<T, compute_t<T>>) Rows::mask_ = call.recurrent_mask.as<const T>();
  }

  // True if enter_c() may do anything.
  bool changes_c(size_t k) const { return Rows::resets.any() || has_checkpoint(k); }
  // Before a step: stores c, also of sequences that have ended, then resets it.
  template <typename S>
  void enter_c(size_t k, Matrix<S> c, Range rows, Range units) const {
    const bool stores = has_checkpoint(k) && rows.size() > 0;
    const auto to = stores ? checkpoint(k).from(rows.begin, units.begin) : Matrix<T>();
    for (int n = 0; n < cell_.state_columns(); ++n) {
      const auto state = c.from(0, n * hidden_);
      if (stores) copy_rows(as_const(state), to.from(0, n * hidden_), rows.size(), units.size());
      Rows::fill(k, state, rows, units, first_value(cell_, n));
    }
  }

  // Calls change(), which adds h W_h^T to z (., columns) from row 0 of the step on, for h in the
  // output: reset rows keep their z. As a GEMM with zeros does, zero_product (0, or NaN where a
  // weight is not finite) is added to them.
  template <typename Change>
  void enter_z(
      size_t k,
      Matrix<float> z,
      Range rows,
      int64_t columns,
      const float* zero_product,
      const Change& change) const {
    const RowSpan reset = Rows::resets.of(k, rows);
    std::vector<float> kept;
    kept.reserve(reset.size() * columns);
    for (const int64_t r : reset) kept.insert(kept.end(), z.row(r), z.row(r) + columns);
    change();
    const float* next = kept.data();
    for (const int64_t r : reset) {
      for (int64_t j = 0; j < columns; ++j) z.row(r)[j] = *next++ + zero_product[j];
    }
  }

  // Where a step writes h' and saved values, or null.
  Matrix<T> h_next(size_t k, Range rows, Range units) const {
    return output_.from(steps_[k].offset + rows.begin, units.begin);
  }
  Matrix<T> saved_values(size_t k, Range rows, Range units) const {
    return activations_.from(steps_[k].offset + rows.begin, units.begin);
  }

  // After a step: states of c' in the output.
  template <typename S>
  void leave_c(size_t k, Matrix<S> c, Range rows, Range units) const {
    for (int n = 0; n < cell_.outputs; ++n) {
      const auto from = as_const(c.from(0, cell_.output_states[n] * hidden_));
      const auto to = h_next(k, rows, units).from(0, (1 + n) * hidden_);
      copy_rows(from, to, rows.size(), units.size());
    }
  }
  // h' times the mask, for the next step.
  void leave_h(size_t k, Matrix<T> masked, Range rows, Range units) const {
    Rows::multiply(masked, as_const(h_next(k, rows, units)), rows, units);
  }

  // To h_n: h' of each batch element's last step.
  void leave_last(Matrix<T> h_n) const {
    int64_t done = 0;
    for (size_t k = steps_.size(); k-- > 0 && done < call_.batch;) {
      const Range rows = {done, std::max(done, steps_[k].rows)};
      const auto from = as_const(h_next(k, rows, {0, hidden_}));
      copy_rows(from, h_n.from(done), rows.size(), hidden_);
      done = rows.end;
    }
  }

 private:
  bool has_checkpoint(size_t k) const { return lltm::has_checkpoint(k, call_.checkpoint_steps); }
  Matrix<T> checkpoint(size_t k) const {
    const int64_t columns = cell_.state_columns() * hidden_;
    const Matrix<T> all = {static_cast<T*>(call_.checkpoints), columns};
    return all.from(static_cast<int64_t>(k) / call_.checkpoint_steps * call_.batch);
  }

  const ForwardCall& call_;
  const Matrix<T> output_, activations_;
};

}  // namespace lltm::cpu
