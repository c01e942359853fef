// A run of training that can be saved, and gone on with as if it had never stopped.
#pragma once

#include "csv.h"
#include "error.h"
#include "model.h"

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace forecast {

// Example k: the values k to k+C-1 of a series (N, F), and the value k+C.
class Windows : public torch::data::datasets::Dataset<Windows> {
 public:
  Windows(torch::Tensor series, int64_t context) : series_(std::move(series)), context_(context) {}

  torch::data::Example<> get(size_t index) override {
    const auto start = static_cast<int64_t>(index);
    return {series_.narrow(0, start, context_), series_[start + context_]};
  }
  std::optional<size_t> size() const override {
    return static_cast<size_t>(series_.size(0) - context_);
  }

 private:
  torch::Tensor series_;
  int64_t context_;
};

// The model, Adam's moments and how far the run is: all of it parameters and buffers
// of one module. So lltm::save_state_dict writes all of it to one file, which replaces
// the one before only when it is complete.
class Training : public torch::nn::Module {
 public:
  // The model's parameters are drawn from PyTorch's default generator.
  Training(const std::vector<std::string>& column_names, int64_t hidden_size)
      : columns(column_names),
        rows(register_buffer("rows", torch::zeros({}, torch::kInt64))),
        context(register_buffer("context", torch::zeros({}, torch::kInt64))),
        seed(register_buffer("seed", torch::zeros({}, torch::kInt64))),
        updates(register_buffer("updates", torch::zeros({}, torch::kInt64))),
        loss(register_buffer("loss", torch::zeros({}, torch::kFloat64))),
        model(register_module(
            "model", Forecaster(static_cast<int64_t>(columns.size()), hidden_size))),
        optimizer_(model->parameters(), torch::optim::AdamOptions(kLearningRate)) {
    const std::string names = join(columns);
    register_buffer(
        "columns", torch::tensor(std::vector<uint8_t>(names.begin(), names.end()), torch::kUInt8));
    // Adam would make its state in the first update. Made here, its tensors can be buffers.
    for (const auto& parameter : model->named_parameters()) {
      std::string name = parameter.key();
      std::replace(name.begin(), name.end(), '.', '_');  // a buffer's name has no dot
      auto state = std::make_unique<torch::optim::AdamParamState>();
      state->exp_avg(register_buffer("exp_avg_" + name, torch::zeros_like(parameter.value())));
      state->exp_avg_sq(
          register_buffer("exp_avg_sq_" + name, torch::zeros_like(parameter.value())));
      optimizer_.state()[parameter.value().unsafeGetTensorImpl()] = std::move(state);
    }
  }

  static std::unique_ptr<Training> load(const std::string& path) {
    const auto saved = lltm::load_safetensors(path);
    const auto get = [&](const std::string& name, int64_t dimensions) {
      const auto found = saved.find(name);
      if (found == saved.end() || found->second.dim() != dimensions) {
        fail(path, "a checkpoint of forecast", "one without " + name);
      }
      return found->second;
    };
    const auto names = get("columns", 1).to(torch::kUInt8);
    const auto* const text = reinterpret_cast<const char*>(names.const_data_ptr<uint8_t>());
    auto training = std::make_unique<Training>(
        split({text, static_cast<size_t>(names.numel())}), get("model.output.weight", 2).size(1));
    lltm::load_state_dict(training, path);
    for (auto& [_, state] : training->optimizer_.state()) {
      static_cast<torch::optim::AdamParamState&>(*state).step(training->updates.item<int64_t>());
    }
    return training;
  }

  // batch: windows (B, C, F), and what follows them, (B, F).
  void update(const torch::data::Example<>& batch) {
    const auto mean_loss = torch::mse_loss(model->forward(batch.data), batch.target);
    optimizer_.zero_grad();
    mean_loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), kLargestGradient);
    optimizer_.step();
    updates += 1;
    loss += mean_loss.detach() * batch.data.size(0);
  }

  const std::vector<std::string> columns;  // of the series, by name; a buffer of text, too
  torch::Tensor rows;                      // int64: of the series
  torch::Tensor context, seed;             // int64
  torch::Tensor updates;                   // int64: how many were made
  torch::Tensor loss;                      // float64: the sum over an epoch's examples, so far
  Forecaster model;

 private:
  static constexpr double kLearningRate = 3e-3;
  static constexpr double kLargestGradient = 1.0;

  torch::optim::Adam optimizer_;
};

}  // namespace forecast
