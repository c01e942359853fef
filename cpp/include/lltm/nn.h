// torch::nn modules around the operators, in the manner of torch::nn::LSTMCell
// and torch::nn::LSTM. Parameters have the names and shapes of the Python
// modules, so a checkpoint of one loads into the other (lltm/serialize.h).
#pragma once

#include <lltm/export.h>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <ostream>
#include <tuple>

namespace lltm {

struct LLTM_API LLTMCellOptions {
  LLTMCellOptions(int64_t input_size, int64_t hidden_size);
  TORCH_ARG(int64_t, input_size);
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(bool, bias) = true;
};

/// One step with parameters `weights` (3H, H+I) and, with bias, `bias` (3H).
class LLTM_API LLTMCellImpl : public torch::nn::Cloneable<LLTMCellImpl> {
 public:
  LLTMCellImpl(int64_t input_size, int64_t hidden_size)
      : LLTMCellImpl(LLTMCellOptions(input_size, hidden_size)) {}
  explicit LLTMCellImpl(const LLTMCellOptions& options);

  void reset() override;
  /// Draws every parameter from the uniform distribution on ±1/sqrt(H).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (B, I), or (I) for one row without a batch
  /// @param state (h, c), each (B, H) or (H); zeros if absent
  /// @returns (h', c'), shaped as the state
  std::tuple<torch::Tensor, torch::Tensor> forward(
      const torch::Tensor& input,
      const std::optional<std::tuple<torch::Tensor, torch::Tensor>>& state = std::nullopt);

  LLTMCellOptions options;
  torch::Tensor weights;
  torch::Tensor bias;

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::optional<std::tuple<torch::Tensor, torch::Tensor>>())})
};

TORCH_MODULE(LLTMCell);

struct LLTM_API LLTMOptions {
  LLTMOptions(int64_t input_size, int64_t hidden_size);
  TORCH_ARG(int64_t, input_size);
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, num_layers) = 1;
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(bool, batch_first) = false;
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(bool, bidirectional) = false;
};

/// A recurrent layer over sequences, with parameters `weights_l0` and
/// `bias_l0`.
class LLTM_API LLTMImpl : public torch::nn::Cloneable<LLTMImpl> {
 public:
  LLTMImpl(int64_t input_size, int64_t hidden_size)
      : LLTMImpl(LLTMOptions(input_size, hidden_size)) {}
  explicit LLTMImpl(const LLTMOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (T, B, I), (B, T, I) with batch_first, or (T, I) unbatched
  /// @param state (h_0, c_0), each (1, B, H), or (1, H) unbatched; zeros if absent
  /// @returns (output, (h_n, c_n)), shaped as the input and the state
  std::tuple<torch::Tensor, std::tuple<torch::Tensor, torch::Tensor>> forward(
      const torch::Tensor& input,
      const std::optional<std::tuple<torch::Tensor, torch::Tensor>>& state = std::nullopt);

  LLTMOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::optional<std::tuple<torch::Tensor, torch::Tensor>>())})
};

TORCH_MODULE(LLTM);

}  // namespace lltm
