// Oracle: the LLTM's formulas in scalar loops.
//
//     X = [h, x];  z = X W^T + b;  i, o = sigmoid(z_i), sigmoid(z_o)
//     g = elu(z_g);  c' = c + i g;  h' = o tanh(c')
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace reference {

// Wider than float64 if possible, to check it. For narrower types, float64 suffices and is several
// times as fast.
using Widest = long double;

template <typename Real>
using Vector = std::vector<Real>;

template <typename Real = Widest>
struct Matrix {
  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols)
      : rows(rows), cols(cols), data(static_cast<std::size_t>(rows * cols)) {}
  template <typename Other>
  explicit Matrix(const Matrix<Other>& other)
      : rows(other.rows), cols(other.cols), data(other.data.begin(), other.data.end()) {}

  Real* row(std::int64_t r) { return data.data() + r * cols; }
  const Real* row(std::int64_t r) const { return data.data() + r * cols; }

  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Vector<Real> data;
};

template <typename Real>
Real sigmoid(Real z) {
  return 1 / (1 + std::exp(-z));
}
template <typename Real>
Real elu(Real z) {
  return z > 0 ? z : std::expm1(z);
}
template <typename Real>
Real elu_derivative(Real z) {
  return z > 0 ? Real(1) : std::exp(z);
}

template <typename Real>
struct Step {
  Vector<Real> h_and_x;         // X, (H+I)
  Vector<Real> i, o, z_g, g;    // (H) each
  Vector<Real> c_next, h_next;  // (H) each
};

// input (I); h, c (H); weights (3H, H+I); bias (3H) or omitted.
template <typename Real>
Step<Real> step_forward(
    const Real* input,
    std::int64_t input_size,
    const Vector<Real>& h,
    const Vector<Real>& c,
    const Matrix<Real>& weights,
    const std::optional<Vector<Real>>& bias) {
  const std::size_t hidden_size = h.size();
  Step<Real> step;
  step.h_and_x = h;
  step.h_and_x.insert(step.h_and_x.end(), input, input + input_size);

  const auto pre_activation = [&](std::size_t row) {
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t k = 0; k < step.h_and_x.size(); ++k) {
      sum += weights.row(static_cast<std::int64_t>(row))[k] * step.h_and_x[k];
    }
    return bias ? sum + (*bias)[row] : sum;
  };
  for (std::size_t j = 0; j < hidden_size; ++j) {
    step.i.push_back(sigmoid(pre_activation(j)));
    step.o.push_back(sigmoid(pre_activation(hidden_size + j)));
    step.z_g.push_back(pre_activation(2 * hidden_size + j));
    step.g.push_back(elu(step.z_g[j]));
    step.c_next.push_back(c[j] + step.i[j] * step.g[j]);
    step.h_next.push_back(step.o[j] * std::tanh(step.c_next[j]));
  }
  return step;
}

// Replaces the gradients of h' and c' with those of h and c. Adds to d_input (I), d_weights and
// d_bias.
template <typename Real>
void step_backward(
    const Step<Real>& step,
    const Matrix<Real>& weights,
    Vector<Real>& dh,
    Vector<Real>& dc,
    Real* d_input,
    Matrix<Real>& d_weights,
    Vector<Real>& d_bias) {
  const std::size_t hidden_size = dh.size();
  Vector<Real> dz(3 * hidden_size);
  for (std::size_t j = 0; j < hidden_size; ++j) {
    const Real i = step.i[j];
    const Real o = step.o[j];
    const Real tanh_c = std::tanh(step.c_next[j]);
    dc[j] += dh[j] * o * (1 - tanh_c * tanh_c);
    dz[j] = dc[j] * step.g[j] * i * (1 - i);
    dz[hidden_size + j] = dh[j] * tanh_c * o * (1 - o);
    dz[2 * hidden_size + j] = dc[j] * i * elu_derivative(step.z_g[j]);
  }
  Vector<Real> d_h_and_x(step.h_and_x.size());
  for (std::size_t row = 0; row < dz.size(); ++row) {
    const Real* w = weights.row(static_cast<std::int64_t>(row));
    Real* dw = d_weights.row(static_cast<std::int64_t>(row));
#pragma omp simd
    for (std::size_t k = 0; k < d_h_and_x.size(); ++k) {
      d_h_and_x[k] += dz[row] * w[k];
      dw[k] += dz[row] * step.h_and_x[k];
    }
    d_bias[row] += dz[row];
  }
  for (std::size_t j = 0; j < hidden_size; ++j) {
    dh[j] = d_h_and_x[j];
  }
  for (std::size_t k = hidden_size; k < d_h_and_x.size(); ++k) {
    d_input[k - hidden_size] += d_h_and_x[k];
  }
}

template <typename Real>
struct Arguments {
  Matrix<Real> input;  // (N, I), rows of a step are adjacent
  Matrix<Real> h, c;   // (B, H)
  Matrix<Real> weights;
  std::optional<Vector<Real>> bias;
  std::vector<std::int64_t> batch_sizes;  // number of sequences in each step
  bool reverse = false;
  std::vector<bool> reset;                     // (N), true for reset rows; empty: none
  std::optional<Matrix<Real>> recurrent_mask;  // (B, H)

  void mask(std::int64_t b, Vector<Real>& h) const {
    if (!recurrent_mask.has_value()) return;
    for (std::size_t j = 0; j < h.size(); ++j) h[j] *= recurrent_mask->row(b)[j];
  }
  bool starts_anew(std::int64_t row) const {
    return !reset.empty() && reset[static_cast<std::size_t>(row)];
  }
};

template <typename Real>
struct Outputs {
  Matrix<Real> output;  // (N, H), h' of every step
  Matrix<Real> h, c;    // (B, H), after each sequence's last step
};

template <typename Real>
struct Gradients {
  Matrix<Real> input, h, c, weights;
  Vector<Real> bias;
};

template <typename Real>
struct Sequence {
  Outputs<Real> outputs;
  std::vector<std::vector<Step<Real>>> steps;       // steps of each sequence, in execution order
  std::vector<std::vector<std::int64_t>> position;  // input row of each step
};

template <typename Real>
Sequence<Real> sequence_forward(const Arguments<Real>& arguments) {
  const Matrix<Real>& input = arguments.input;
  Sequence<Real> result;
  result.outputs = {Matrix<Real>(input.rows, arguments.h.cols), arguments.h, arguments.c};
  for (std::int64_t b = 0; b < arguments.h.rows; ++b) {
    std::vector<std::int64_t> position;
    std::int64_t first_of_step = 0;
    for (const std::int64_t rows : arguments.batch_sizes) {
      if (b < rows) {
        position.push_back(first_of_step + b);
      }
      first_of_step += rows;
    }
    if (arguments.reverse) {
      position = {position.rbegin(), position.rend()};
    }

    Vector<Real> h(arguments.h.row(b), arguments.h.row(b) + arguments.h.cols);
    Vector<Real> c(arguments.c.row(b), arguments.c.row(b) + arguments.c.cols);
    std::vector<Step<Real>> steps;
    for (const std::int64_t n : position) {
      if (arguments.starts_anew(n)) {
        std::fill(h.begin(), h.end(), Real(0));
        std::fill(c.begin(), c.end(), Real(0));
      }
      arguments.mask(b, h);
      steps.push_back(
          step_forward(input.row(n), input.cols, h, c, arguments.weights, arguments.bias));
      h = steps.back().h_next;
      c = steps.back().c_next;
      std::copy(h.begin(), h.end(), result.outputs.output.row(n));
    }
    std::copy(h.begin(), h.end(), result.outputs.h.row(b));
    std::copy(c.begin(), c.end(), result.outputs.c.row(b));
    result.steps.push_back(std::move(steps));
    result.position.push_back(std::move(position));
  }
  return result;
}

template <typename Real>
Gradients<Real> sequence_backward(
    const Arguments<Real>& arguments,
    const Sequence<Real>& sequence,
    const Outputs<Real>& grad_outputs) {
  const Matrix<Real>& weights = arguments.weights;
  Gradients<Real> d;
  d.input = Matrix<Real>(arguments.input.rows, arguments.input.cols);
  d.h = grad_outputs.h;
  d.c = grad_outputs.c;
  d.weights = Matrix<Real>(weights.rows, weights.cols);
  d.bias = Vector<Real>(static_cast<std::size_t>(weights.rows));
  for (std::int64_t b = 0; b < arguments.h.rows; ++b) {
    Vector<Real> dh(d.h.row(b), d.h.row(b) + d.h.cols);
    Vector<Real> dc(d.c.row(b), d.c.row(b) + d.c.cols);
    const auto& steps = sequence.steps[static_cast<std::size_t>(b)];
    const auto& position = sequence.position[static_cast<std::size_t>(b)];
    for (std::size_t s = steps.size(); s-- > 0;) {
      const Real* grad_output = grad_outputs.output.row(position[s]);
      for (std::size_t j = 0; j < dh.size(); ++j) {
        dh[j] += grad_output[j];
      }
      step_backward(steps[s], weights, dh, dc, d.input.row(position[s]), d.weights, d.bias);
      arguments.mask(b, dh);
      if (arguments.starts_anew(position[s])) {
        std::fill(dh.begin(), dh.end(), Real(0));
        std::fill(dc.begin(), dc.end(), Real(0));
      }
    }
    std::copy(dh.begin(), dh.end(), d.h.row(b));
    std::copy(dc.begin(), dc.end(), d.c.row(b));
  }
  return d;
}

}  // namespace reference
