// Layers saved for lltm/realtime.h, whose library is loaded together with liblltm here.
#include "cell_program.h"
#include "testing.h"

#include <lltm/cell.h>
#include <lltm/lltm.h>
#include <lltm/realtime.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

class SaveRealtime : public testing::Test {
 protected:
  void TearDown() override { std::remove(path_.c_str()); }

  // The layer in float64 and the saved layer agree, and so does their state.
  template <typename Holder>
  void expect_equal(Holder layer, int64_t batch) {
    SCOPED_TRACE(torch::str(*layer));
    const torch::NoGradGuard no_grad;
    layer->save_realtime(path_);
    lltm::realtime::Layer saved(path_, batch);
    const auto& options = layer->options;
    EXPECT_EQ(saved.num_layers(), options.num_layers());
    EXPECT_EQ(saved.input_size(), options.input_size());
    EXPECT_EQ(saved.hidden_size(), options.hidden_size());
    constexpr int64_t kSteps = 20;
    const Tensor x = torch::randn({kSteps, batch, options.input_size()});
    Tensor y = torch::empty({kSteps, batch, options.hidden_size()});
    saved.process(x.data_ptr<float>(), y.data_ptr<float>(), kSteps);
    layer->to(torch::kDouble);
    const auto [expected, states] = layer->forward(x.to(torch::kDouble));
    EXPECT_TRUE(torch::allclose(y.to(torch::kDouble), expected, 1e-5, 1e-6))
        << (y - expected).abs().max();
    Tensor state = torch::empty({saved.state_size()});
    saved.get_state(state.data_ptr<float>());
    state = state.view({options.num_layers(), -1, batch, options.hidden_size()});
    const Tensor h_n = state.select(1, 0).to(torch::kDouble);
    EXPECT_TRUE(torch::allclose(h_n, first(states), 1e-5, 1e-6));
  }

  static Tensor first(const Tensor& h) { return h; }
  static Tensor first(const lltm::State& states) { return std::get<0>(states); }
  static Tensor first(const std::vector<Tensor>& states) { return states[0]; }

  const std::string path_ = testing::TempDir() + "lltm_save_realtime_test.rt";
};

TEST_F(SaveRealtime, EveryLayerAgrees) {
  for (const bool bias : {true, false}) {
    for (const int64_t batch : {1, 3}) {
      const auto options = lltm::LayerOptions(5, 19).num_layers(2).bias(bias);
      expect_equal(lltm::LSTM(options), batch);
      expect_equal(lltm::GRU(options), batch);
      expect_equal(lltm::LLTM(options), batch);
      expect_equal(lltm::RNN(options), batch);
      expect_equal(
          lltm::RNN(lltm::RNNOptions(options).nonlinearity(lltm::Nonlinearity(torch::kReLU))),
          batch);
      // Not kEveryText, whose discontinuities amplify rounding errors.
      for (const std::string& text :
           {lltm_test::kDuoText, lltm_test::kAloneText, lltm_test::kLimitsText}) {
        auto of_cell =
            lltm::CustomLayerOptions(lltm::Cell::parse(text), 5, 19).num_layers(2).bias(bias);
        expect_equal(lltm::CustomLayer(of_cell), batch);
      }
    }
  }
  auto of_16_bits = lltm::LSTM(3, 8);
  of_16_bits->to(torch::kBFloat16);
  expect_equal(of_16_bits, 1);
}

TEST_F(SaveRealtime, OtherFormsAreRefused) {
  const auto error_of = [&](const auto& layer) -> std::string {
    try {
      layer->save_realtime(path_);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  const auto options = lltm::LayerOptions(3, 4);
  EXPECT_EQ(
      error_of(lltm::GRU(lltm::GRUOptions(options).bidirectional(true))),
      "lltm::save_realtime: expected a layer with one direction and without a projection, got "
      "bidirectional");
  EXPECT_EQ(
      error_of(lltm::LSTM(lltm::LSTMOptions(options).proj_size(2))),
      "lltm::save_realtime: expected a layer with one direction and without a projection, got "
      "proj_size");
  EXPECT_EQ(
      error_of(lltm::CustomLayer(lltm::Cell::parse(lltm_test::kStagedText), 3 + 4, 4)),
      "lltm::save_realtime: expected a cell without gates in the input, got staged");
  const auto heads =
      lltm::CustomLayerOptions(lltm::Cell::parse(lltm_test::kDuoText), 3, 4).heads(2);
  EXPECT_NE(
      error_of(lltm::CustomLayer(heads)).find("expected weight_hh of shape"), std::string::npos);
  EXPECT_EQ(error_of(lltm::GRU(options)), "");
  EXPECT_THROW(
      lltm::save_realtime("gru", {torch::zeros({12, 3})}, true, 1, 4, path_), c10::ValueError);
  const std::vector<Tensor> wrong = {torch::zeros({12, 3}), torch::zeros({9, 4})};
  EXPECT_THROW(lltm::save_realtime("gru", wrong, false, 1, 4, path_), c10::ValueError);
  EXPECT_THROW(lltm::save_realtime("other", wrong, false, 1, 4, path_), c10::ValueError);
}

}  // namespace
