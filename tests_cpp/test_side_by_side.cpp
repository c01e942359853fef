// Two calls as one node of autograd (op/side_by_side.h), on a device whose backend takes both at
// once, as that of a GPU does: here the CPU, whose operators are called in turn and counted.
#include "op/operators.h"
#include "op/side_by_side.h"
#include "testing.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lltm_test {
namespace {

using lltm::Gradients;
using lltm::SequenceArgs;
using lltm::SequenceBackwardArgs;
using lltm::SequenceOutputs;
using lltm::SequenceResult;

int forward_calls = 0, backward_calls = 0;

std::vector<SequenceResult> forward(bool save, std::span<const SequenceArgs> calls) {
  ++forward_calls;
  std::vector<SequenceResult> results;
  for (const SequenceArgs& args : calls) {
    if (save) {
      results.push_back(lltm::op::sequence_forward(args));
    } else {
      const auto [output, h_n, c_n] = lltm::op::sequence(args);
      results.emplace_back(output, h_n, c_n, at::Tensor());
    }
  }
  return results;
}

std::vector<Gradients> backward(std::span<const SequenceBackwardArgs> calls) {
  ++backward_calls;
  std::vector<Gradients> gradients;
  for (const SequenceBackwardArgs& args : calls) {
    gradients.push_back(lltm::op::sequence_backward(args));
  }
  return gradients;
}

// One call of a cell with two matrices, T = 4, B = 3, I = 5, H = 6.
struct Call {
  std::string cell;
  bool reverse;
  at::Tensor input, h_0;
  std::optional<at::Tensor> c_0;
  at::Tensor weight_ih;
  std::optional<at::Tensor> weight_hh, bias_ih, bias_hh, none = {};
  int64_t checkpoint_steps = 0;

  SequenceArgs args() const {
    return {
        {std::string_view(cell),
         input,
         h_0,
         c_0,
         weight_ih,
         weight_hh,
         bias_ih,
         bias_hh,
         none,
         reverse,
         none,
         checkpoint_steps,
         none}};
  }
  // Those that are there.
  Tensors tensors() const {
    Tensors all = {input, h_0};
    if (c_0) all.push_back(*c_0);
    all.push_back(weight_ih);
    for (const auto& tensor : {weight_hh, bias_ih, bias_hh}) {
      if (tensor) all.push_back(*tensor);
    }
    return all;
  }
};

Call draw(const std::string& cell, bool reverse, bool bias) {
  const int64_t gates = cell == "lstm" ? 4 : 3;
  const auto tensor = [](at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble).requires_grad_();
  };
  Call call = {
      cell, reverse, tensor({4, 3, 5}), tensor({3, 6}), {}, tensor({gates * 6, 5}), {}, {}, {}};
  if (cell != "gru") call.c_0 = tensor({3, 6});
  call.weight_hh = tensor({gates * 6, 6});
  if (bias) call.bias_ih = tensor({gates * 6});
  if (bias) call.bias_hh = tensor({gates * 6});
  return call;
}

using Pair = std::array<Call, 2>;
Pair draw_pair(const std::string& cell) {
  return {
      draw(cell, /*reverse=*/false, /*bias=*/true), draw(cell, /*reverse=*/true, /*bias=*/false)};
}

// A number that depends on every result, but for c_n of the second call.
at::Tensor loss_of(const std::array<SequenceOutputs, 2>& results) {
  const auto& [output, h_n, c_n] = results[0];
  const auto& [other_output, other_h_n, other_c_n] = results[1];
  return output.square().sum() + (h_n * c_n.sum()).sum() + other_output.exp().sum() +
         other_h_n.sum();
}

std::array<SequenceOutputs, 2> together(const Pair& calls) {
  auto [first, second] = lltm::sequences_side_by_side(calls[0].args(), calls[1].args());
  return {first, second};
}
std::array<SequenceOutputs, 2> alone(const Pair& calls) {
  return {lltm::op::sequence(calls[0].args()), lltm::op::sequence(calls[1].args())};
}

Tensors wanted(const Pair& calls) {
  Tensors all;
  for (const Call& call : calls) {
    for (const at::Tensor& tensor : call.tensors()) {
      if (tensor.requires_grad()) all.push_back(tensor);
    }
  }
  return all;
}

class SideBySide : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { lltm::operators_at_once(at::kCPU) = {forward, backward}; }
  void TearDown() override { lltm::operators_at_once(at::kCPU) = {}; }

  static void expect_the_same(const Pair& calls, int expected_backward = 1) {
    forward_calls = backward_calls = 0;
    const Tensors inputs = wanted(calls);
    const Tensors ours = torch::autograd::grad({loss_of(together(calls))}, inputs);
    EXPECT_EQ(forward_calls, 1);
    EXPECT_EQ(backward_calls, expected_backward);
    EXPECT_TRUE(identical(ours, torch::autograd::grad({loss_of(alone(calls))}, inputs)));
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, SideBySide, testing::Values("lltm", "lstm", "gru"));

TEST_P(SideBySide, GradientsAreThoseOfEachCall) {
  expect_the_same(draw_pair(GetParam()));
}

TEST_P(SideBySide, OfCheckpointsToo) {
  Pair calls = draw_pair(GetParam());
  for (Call& call : calls) call.checkpoint_steps = 2;
  expect_the_same(calls);
}

TEST_P(SideBySide, WhateverWantsAGradient) {
  const Pair all = draw_pair(GetParam());
  const size_t count = wanted(all).size();
  for (size_t skipped = 0; skipped < count; ++skipped) {
    SCOPED_TRACE(skipped);
    const Tensors tensors = wanted(all);
    tensors[skipped].requires_grad_(false);
    expect_the_same(all);
    tensors[skipped].requires_grad_(true);
  }
  for (const Call& call : all) {
    for (const at::Tensor& tensor : call.tensors()) tensor.requires_grad_(false);
    expect_the_same(all);
    for (const at::Tensor& tensor : call.tensors()) tensor.requires_grad_(true);
  }
}

TEST_P(SideBySide, WithoutGradientsNothingIsRecorded) {
  const Pair calls = draw_pair(GetParam());
  const at::NoGradGuard no_grad;
  forward_calls = 0;
  const auto results = together(calls);
  EXPECT_EQ(forward_calls, 1);
  const auto expected = alone(calls);
  for (size_t k = 0; k < 2; ++k) {
    EXPECT_TRUE(identical(std::get<0>(results[k]), std::get<0>(expected[k])));
    EXPECT_FALSE(std::get<0>(results[k]).requires_grad());
  }
}

// The first by the composite path, as for a call alone, so that it has one: that is once more by
// the results.
TEST_P(SideBySide, SecondDerivativesAreThoseOfEachCall) {
  const Pair calls = draw_pair(GetParam());
  const Tensors inputs = wanted(calls);
  const auto second = [&](const at::Tensor& loss) {
    const Tensors first = torch::autograd::grad(
        {loss}, inputs, {}, /*retain_graph=*/std::nullopt, /*create_graph=*/true);
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const at::Tensor& gradient : first) sum = sum + gradient.square().sum();
    return torch::autograd::grad({sum}, inputs);
  };
  backward_calls = 0;
  const Tensors ours = second(loss_of(together(calls)));
  EXPECT_EQ(backward_calls, 1);
  const Tensors expected = second(loss_of(alone(calls)));
  for (size_t k = 0; k < ours.size(); ++k) EXPECT_TRUE(at::allclose(ours[k], expected[k])) << k;
}

}  // namespace
}  // namespace lltm_test
