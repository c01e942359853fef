// torch.lstm in the form of our operators, and the comparison with it of a library or engine
// that is built with the LSTM's cell page (cell.h).
//
// Weights are W = [W_hh, W_ih] (4H, H+I); b_ih is the bias, and b_hh zero.
#pragma once

#include "testing.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm_test {

constexpr int64_t kLstmGates = 4;  // i, f, g, o

// W_ih, W_hh and, where there is a bias, b_ih and b_hh.
inline Tensors lstm_parameters(const Arguments& a) {
  const int64_t hidden = a.h.size(1);
  Tensors parameters = {a.weights.slice(1, hidden), a.weights.slice(1, 0, hidden)};
  if (a.bias) parameters.insert(parameters.end(), {*a.bias, at::zeros_like(*a.bias)});
  return parameters;
}

inline Tensors torch_lstm_cell(const Arguments& a) {
  const Tensors p = lstm_parameters(a);
  const auto [h, c] = a.bias ? at::lstm_cell(a.input, {a.h, a.c}, p[0], p[1], p[2], p[3])
                             : at::lstm_cell(a.input, {a.h, a.c}, p[0], p[1]);
  return {h, c};
}

// torch has the reverse direction only beside the forward one, which here has zero weights.
inline Tensors torch_lstm(const Arguments& a) {
  const Tensors own = lstm_parameters(a);
  Tensors parameters, h_0, c_0;
  if (a.reverse) {
    for (const at::Tensor& parameter : own) parameters.push_back(at::zeros_like(parameter));
    h_0.push_back(at::zeros_like(a.h));
    c_0.push_back(at::zeros_like(a.c));
  }
  parameters.insert(parameters.end(), own.begin(), own.end());
  h_0.push_back(a.h);
  c_0.push_back(a.c);
  const Tensors state = {at::stack(h_0), at::stack(c_0)};
  const bool bias = a.bias.has_value();
  const auto [output, h, c] =
      a.batch_sizes
          ? at::lstm(a.input, *a.batch_sizes, state, parameters, bias, 1, 0.0, false, a.reverse)
          : at::lstm(a.input, state, parameters, bias, 1, 0.0, false, a.reverse, false);
  return {output.slice(-1, a.reverse ? a.h.size(1) : 0).contiguous(), h[-1], c[-1]};
}

// The problem with weights, and a bias where it has one, for four gates.
inline Arguments for_lstm(Arguments a, uint64_t seed) {
  const int64_t hidden = a.h.size(1);
  const auto random = [&](at::IntArrayRef shape, uint64_t seed) {
    return random_like(at::empty(shape, a.input.options()), seed).div(std::sqrt(hidden));
  };
  a.weights = random({kLstmGates * hidden, a.weights.size(1)}, seed + 2000);
  if (a.bias) a.bias = random({kLstmGates * hidden}, seed + 3000);
  return a;
}

// Of a dtype, and reversed or not.
class LstmSequenceTest : public testing::TestWithParam<std::tuple<at::ScalarType, bool>> {
 protected:
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  Arguments reversed(Arguments arguments) const {
    arguments.reverse = std::get<1>(GetParam());
    return arguments;
  }
};

inline std::string lstm_sequence_name(
    const testing::TestParamInfo<LstmSequenceTest::ParamType>& info) {
  const auto [dtype, reverse] = info.param;
  return name(dtype) + (reverse ? "_reverse" : "");
}

// Every output and gradient of `ours` against `torch` in float64, by the statement of
// accuracy (testing.h), with `torch` in the dtype in the place of eager. Seeds 1, 2, ...
// until the smallest result has had some hundred elements.
inline void check_lstm(const Function& ours, const Function& torch, const Problem& problem) {
  const auto matrix = [](const at::Tensor& tensor) {
    const at::Tensor values = tensor.detach().to(at::kDouble).contiguous();
    reference::Matrix<> matrix(1, values.numel());
    std::copy_n(values.const_data_ptr<double>(), values.numel(), matrix.data.begin());
    return matrix;
  };
  const auto in_float64 = [](Tensors tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(at::kDouble);
    return tensors;
  };
  const auto results = [](Evaluation evaluation) {
    Tensors all = std::move(evaluation.outputs);
    all.insert(all.end(), evaluation.gradients.begin(), evaluation.gradients.end());
    return all;
  };
  std::vector<Comparison> comparisons;
  int64_t elements = 0;
  for (uint64_t seed = 1; seed <= 3 || elements < 200; ++seed) {
    const Arguments a = problem(seed);
    const Tensors grads = random_like(torch(a), seed + 1000);
    const Arguments a64 = with(a, in_float64(differentiable(a)));
    const Tensors mine = results(evaluate(ours, a, grads));
    const Tensors baseline = results(evaluate(torch, a, grads));
    const Tensors exact = results(evaluate(torch, a64, in_float64(grads)));
    ASSERT_EQ(mine.size(), exact.size());
    comparisons.resize(exact.size());
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (size_t k = 0; k < exact.size(); ++k) {
      comparisons[k].add(mine[k], baseline[k], matrix(exact[k]));
      fewest = std::min(fewest, exact[k].numel());
    }
    elements += fewest;
  }
  const size_t outputs = comparisons.size() - differentiable(problem(1)).size();
  for (size_t k = 0; k < comparisons.size(); ++k) {
    EXPECT_TRUE(comparisons[k].result())
        << (k < outputs ? "output " + std::to_string(k)
                        : std::string("gradient of ") + kArgumentNames[k - outputs]);
  }
}

}  // namespace lltm_test
