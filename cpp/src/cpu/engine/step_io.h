// Everything that enters or leaves a step (common/step_io.h), for a thread's rows of the batch and
// hidden units.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "common/operator_args.h"
#include "common/step_io.h"
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/range.h"

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

template <typename From, typename To>
void copy_rows(Matrix<const From> from, Matrix<To> to, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    const From* const x = from.row(r);
    To* const y = to.row(r);
    for (int64_t j = 0; j < columns; ++j) y[j] = static_cast<To>(x[j * from.col_stride]);
  }
}

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

// Below, matrices of states and their gradients begin at the first of the rows and units. A state
// of c is H columns after the previous one. T is the storage type. `steps` must outlive the object.
template <typename T>
class RowsIO {
 public:
  using C = compute_t<T>;

  RowsIO(const SequenceInputs& args, const std::vector<Step>& steps)
      : resets(args.reset, steps),
        cell_(*args.cell),
        hidden_(args.h_0->size(1)),
        steps_(steps),
        wide_mask_(widened(args.recurrent_mask)),
        mask_(read<C>(wide_mask_)) {}

  // h for the recurrent GEMM or, after a step of backward, the gradient of h from that of the
  // GEMM's operand.
  void enter_h(size_t k, Matrix<C> h, Range rows, Range units) const {
    if (mask_.data != nullptr) multiply(h, as_const(h), rows, units);
    fill(k, h, rows, units, 0);
  }

  const Resets resets;

 protected:
  static at::Tensor widened(const at::Tensor& tensor) {
    constexpr at::ScalarType dtype = std::is_same_v<C, double> ? at::kDouble : at::kFloat;
    return tensor.defined() ? tensor.to(dtype) : tensor;
  }

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
  const at::Tensor wide_mask_;
  const Matrix<const C> mask_;  // or null
};

template <typename T>
class ForwardIO : public ForwardResults, public RowsIO<T> {
  using Rows = RowsIO<T>;
  using Rows::cell_, Rows::hidden_, Rows::steps_;

 public:
  ForwardIO(const SequenceArgs& args, const std::vector<Step>& steps)
      : ForwardResults(args, steps.size()),
        Rows(args, steps),
        output_{static_cast<T*>(output.mutable_data_ptr()), cell_.output_columns() * hidden_},
        activations_(write<T>(activations)) {}

  // True if enter_c() may do anything.
  bool changes_c(size_t k) const { return Rows::resets.any() || has_checkpoint(k, every); }
  // Before a step: stores c, also of sequences that have ended, then resets it.
  template <typename S>
  void enter_c(size_t k, Matrix<S> c, Range rows, Range units) const {
    const bool stores = has_checkpoint(k, every) && rows.size() > 0;
    const auto to = stores ? write<T>(checkpoint(k)).from(rows.begin, units.begin) : Matrix<T>();
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

 private:
  const Matrix<T> output_, activations_;
};

template <typename T>
class BackwardIO : public RowsIO<T> {
  using Rows = RowsIO<T>;
  using Rows::cell_, Rows::hidden_, Rows::steps_;

 public:
  using C = compute_t<T>;

  BackwardIO(const SequenceBackwardArgs& args, const std::vector<Step>& steps)
      : Rows(args, steps),
        grad_output_(args.grad_output),
        wide_grad_states_(Rows::widened(args.grad_states)),
        grad_states_(wide_grad_states_) {}

  // Before a step: the gradient of h' in the output, and of states of c' there.
  Matrix<const T> grad_of_output(size_t k, Range rows, Range units) const {
    return grad_output_.of(steps_[k].offset).from(rows.begin, units.begin);
  }
  void add_grad_of_states(size_t k, Matrix<C> grad_c, Range rows, Range units) const {
    if (!wide_grad_states_.defined()) return;
    for (int n = 0; n < cell_.outputs; ++n) {
      const auto from =
          grad_states_.of(steps_[k].offset).from(rows.begin, n * hidden_ + units.begin);
      const auto to = grad_c.from(0, cell_.output_states[n] * hidden_);
      for (int64_t r = 0; r < rows.size(); ++r) {
        for (int64_t j = 0; j < units.size(); ++j) {
          to.row(r)[j] += from.row(r)[j * from.col_stride];
        }
      }
    }
  }

  // After a step: no gradient goes beyond a reset.
  void cut_grad_c(size_t k, Matrix<C> grad_c, Range rows, Range units) const {
    for (int n = 0; n < cell_.state_columns(); ++n) {
      Rows::fill(k, grad_c.from(0, n * hidden_), rows, units, 0);
    }
  }

 private:
  const StepRows<T> grad_output_;
  const at::Tensor wide_grad_states_;  // (T, B, outputs * H), or packed
  const StepRows<C> grad_states_;
};

}  // namespace lltm::cpu
