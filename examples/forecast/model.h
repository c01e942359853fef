// The model: a layer that reads the last values of a series, and a linear layer that forecasts
// the next ones.
#pragma once

#include <lltm/lltm.h>

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <tuple>

namespace forecast {

// F columns of the series; C, the context, values that one forecast sees.
class ForecasterImpl : public torch::nn::Module {
 public:
  ForecasterImpl(int64_t columns, int64_t hidden_size)
      : mean(register_buffer("mean", torch::zeros({columns}, torch::kFloat64))),
        deviation(register_buffer("deviation", torch::ones({columns}, torch::kFloat64))),
        rnn(register_module(
            "rnn", lltm::LLTM(lltm::LLTMOptions(columns, hidden_size).batch_first(true)))),
        output(register_module("output", torch::nn::Linear(hidden_size, columns))) {}

  // window (B, C, F), standardised. Returns what follows it, (B, F).
  //
  // All of it relative to the last value: with a trend, a series leaves the
  // range of its training part, but its changes do not.
  torch::Tensor forward(const torch::Tensor& window) {
    const auto last = window.slice(1, -1);
    const auto hidden = std::get<0>(rnn->forward(window - last)).select(1, -1);
    return last.squeeze(1) + output->forward(hidden);
  }

  torch::Tensor standardise(const torch::Tensor& values) const {
    return ((values - mean) / deviation).to(torch::kFloat32);
  }
  torch::Tensor restore(const torch::Tensor& standardised) const {
    return standardised * deviation + mean;
  }

  torch::Tensor mean, deviation;  // (F), float64: of the training part
  lltm::LLTM rnn;
  torch::nn::Linear output;
};

TORCH_MODULE(Forecaster);

}  // namespace forecast
