// The library built with the cell page of the LSTM, against torch.lstm: what checks, engines,
// GEMM formats, kernels and the composite path know of a cell, they take from its page.
#include "lstm/torch_lstm.h"

#include <lltm/ops.h>

#include <torch/csrc/autograd/autograd.h>

#include <string>

namespace lltm_test {
namespace {

class LstmCell : public testing::TestWithParam<at::ScalarType> {};

INSTANTIATE_TEST_SUITE_P(Dtypes, LstmCell, testing::ValuesIn(kDtypes), [](const auto& info) {
  return name(info.param);
});

// By ATen, and by the GEMM kernel block by block.
TEST_P(LstmCell, ValuesAndGradientsMatchTorch) {
  for (const Sizes& sizes :
       {Sizes{1, 3, 5, 7}, Sizes{1, 16, 32, 64}, Sizes{1, 40, 20, 96}, Sizes{1, 70, 33, 48}}) {
    SCOPED_TRACE(testing::PrintToString(sizes));
    check_lstm(cell, torch_lstm_cell, [&](uint64_t seed) {
      return for_lstm(cell_problem(sizes, GetParam(), seed, /*bias=*/true), seed);
    });
  }
}

class LstmSequence : public LstmSequenceTest {};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    LstmSequence,
    testing::Combine(testing::ValuesIn(kDtypes), testing::Bool()),
    lstm_sequence_name);

// Few rows; few enough for the input projection to be merged; blocks on threads that share
// rows and that do not; padded K.
TEST_P(LstmSequence, ValuesAndGradientsMatchTorch) {
  for (const bool bias : {true, false}) {
    for (const Sizes& sizes :
         {Sizes{5, 3, 5, 7}, Sizes{9, 16, 32, 64}, Sizes{5, 33, 17, 100}, Sizes{4, 70, 64, 160}}) {
      SCOPED_TRACE(testing::PrintToString(sizes) + (bias ? "" : ", without bias"));
      check_lstm(sequence, torch_lstm, [&](uint64_t seed) {
        return for_lstm(reversed(sequence_problem(sizes, dtype(), seed, bias)), seed);
      });
    }
  }
}

TEST_P(LstmSequence, PackedValuesAndGradientsMatchTorch) {
  std::vector<int64_t> many;
  for (int64_t row = 0; row < 40; ++row) many.push_back(12 - row / 4);
  for (const std::vector<int64_t>& lengths :
       std::vector<std::vector<int64_t>>{{7, 6, 5, 4, 3, 2, 1}, {9, 9, 9, 9, 9, 1, 1}, many}) {
    SCOPED_TRACE(testing::PrintToString(lengths));
    check_lstm(sequence, torch_lstm, [&](uint64_t seed) {
      return for_lstm(reversed(packed_problem(lengths, 20, 96, dtype(), seed)), seed);
    });
  }
}

TEST_P(LstmSequence, PrepackedWeightsGiveTheSame) {
  const Arguments a =
      for_lstm(reversed(sequence_problem({6, 40, 20, 96}, dtype(), /*seed=*/1, true)), 1);
  const auto [output, h_n, c_n] = lltm::sequence_prepacked(
      a.input, a.h, a.c, lltm::prepack(a.weights), a.bias, a.batch_sizes, a.reverse);
  const Tensors expected = sequence(a);
  // Blocks of another width are rounded in another way.
  const double tolerance = dtype() == at::kDouble || dtype() == at::kFloat ? 1e-5 : 1e-2;
  EXPECT_TRUE(at::allclose(output, expected[0], tolerance, tolerance));
  EXPECT_TRUE(at::allclose(h_n, expected[1], tolerance, tolerance));
  EXPECT_TRUE(at::allclose(c_n, expected[2], tolerance, tolerance));
}

// The composite path computes them.
TEST(LstmComposite, SecondDerivativesMatchTorch) {
  const Arguments a = for_lstm(sequence_problem({3, 4, 5, 6}, at::kDouble, 1, true), 1);
  const auto second = [&](const Function& function) {
    Tensors x;
    for (const at::Tensor& tensor : differentiable(a)) {
      x.push_back(tensor.detach().clone().requires_grad_());
    }
    const at::Tensor sum = function(with(a, x))[0].pow(2).sum();
    const Tensors first = torch::autograd::grad({sum}, x, {}, std::nullopt, /*create_graph=*/true);
    at::Tensor squares = at::zeros({}, at::kDouble);
    for (const at::Tensor& gradient : first) squares = squares + gradient.pow(2).sum();
    return torch::autograd::grad({squares}, x);
  };
  const Tensors results = second(sequence);
  const Tensors expected = second(torch_lstm);
  for (size_t k = 0; k < expected.size(); ++k) {
    EXPECT_TRUE(at::allclose(results[k], expected[k], 1e-10, 1e-12)) << kArgumentNames[k];
  }
}

TEST(LstmChecks, ShapesAreThoseOfFourGates) {
  const at::Tensor x = at::zeros({2, 3}), h = at::zeros({2, 4});
  try {
    lltm::cell(x, h, h, at::zeros({14, 7}));
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_EQ(
        std::string(error.what_without_backtrace()),
        "lltm::cell: expected weights of shape (4H, H+I), got (14, 7)");
  }
  const auto meta = at::TensorOptions(at::kMeta);
  const auto [h_next, c_next] =
      lltm::cell(x.to(meta), h.to(meta), h.to(meta), at::zeros({16, 7}, meta));
  EXPECT_EQ(h_next.sizes(), at::IntArrayRef({2, 4}));
  EXPECT_EQ(c_next.sizes(), at::IntArrayRef({2, 4}));
}

}  // namespace
}  // namespace lltm_test
