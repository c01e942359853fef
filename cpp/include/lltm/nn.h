// torch::nn modules around the operators, with the shapes, defaults and meanings of
// torch::nn::LSTMCell and torch::nn::LSTM. Parameters have the names and shapes of the
// Python modules, so a checkpoint of one loads into the other (lltm/serialize.h).
//
//     lltm::LLTM layer(lltm::LLTMOptions(64, 128).num_layers(2));
//     auto [output, state] = layer->forward(input);
//     auto [next_output, next_state] = layer->forward(next_input, state);
//
// Letters: T steps, B batch size, I input size, H hidden size, L layers,
// D directions (1 or 2), N rows of a packed sequence.
//
// Wrong shapes and values throw c10::ValueError, wrong dtypes c10::TypeError;
// the message names the argument, the expected value and the actual one.
#pragma once

#include <lltm/export.h>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/rnn.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm {

/// (h, c): hidden state and cell state.
using State = std::tuple<torch::Tensor, torch::Tensor>;

struct LLTM_API LLTMCellOptions {
  LLTMCellOptions(int64_t input_size, int64_t hidden_size);
  TORCH_ARG(int64_t, input_size);
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(bool, bias) = true;
};

/// One step with parameters `weights` (3H, H+I) and, with bias, `bias` (3H);
/// see lltm::cell for the formulas.
class LLTM_API LLTMCellImpl : public torch::nn::Cloneable<LLTMCellImpl> {
 public:
  LLTMCellImpl(int64_t input_size, int64_t hidden_size)
      : LLTMCellImpl(LLTMCellOptions(input_size, hidden_size)) {}
  /// Throws if a size is not positive.
  explicit LLTMCellImpl(const LLTMCellOptions& options);

  void reset() override;
  /// Draws every parameter from the uniform distribution on ±1/sqrt(H).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (B, I), or (I) for one row without a batch
  /// @param state (h, c), each (B, H) or (H); zeros if absent
  /// @returns (h', c'), shaped as the state
  State forward(const torch::Tensor& input, const std::optional<State>& state = std::nullopt);

  LLTMCellOptions options;
  torch::Tensor weights;
  torch::Tensor bias;  // undefined without bias

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<State>())})
};

TORCH_MODULE(LLTMCell);

struct LLTM_API LLTMOptions {
  LLTMOptions(int64_t input_size, int64_t hidden_size);
  TORCH_ARG(int64_t, input_size);
  TORCH_ARG(int64_t, hidden_size);
  /// Each layer runs over the output of the one before.
  TORCH_ARG(int64_t, num_layers) = 1;
  TORCH_ARG(bool, bias) = true;
  /// Batched input and output are (B, T, .) rather than (T, B, .). Does not apply
  /// to the states, nor to unbatched and packed input.
  TORCH_ARG(bool, batch_first) = false;
  /// Probability of zeroing an element of the output of every layer but the
  /// last, when training.
  TORCH_ARG(double, dropout) = 0.0;
  /// A second direction runs from the last step to the first; its output is
  /// concatenated to the first one's.
  TORCH_ARG(bool, bidirectional) = false;
  /// For training on long sequences, in steps: at least 1, or 0 for not at all. Each
  /// layer and direction then runs as sequence does with it, with less memory.
  TORCH_ARG(int64_t, checkpoint_steps) = 0;
};

/// A layer for inference whose weights were packed once (LLTMImpl::prepack).
///
/// Computes what the layer computes in evaluation mode, without packing the
/// weights in every call. For short sequences and small batches, such as a
/// stream in chunks, packing can take most of the time. It cannot be changed,
/// does not follow changes of the layer, and several threads may use it
/// concurrently. It has no derivatives, and autocast does not affect it.
class LLTM_API PrepackedLLTM {
 public:
  /// As LLTMImpl::forward.
  std::tuple<torch::Tensor, State> forward(
      const torch::Tensor& input, const std::optional<State>& state = std::nullopt) const;
  /// As LLTMImpl::forward_with_packed_input.
  std::tuple<torch::nn::utils::rnn::PackedSequence, State> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<State>& state = std::nullopt) const;

  const LLTMOptions& options() const { return options_; }

 private:
  friend class LLTMImpl;
  PrepackedLLTM(const LLTMOptions& options, std::vector<torch::Tensor> weights);

  LLTMOptions options_;
  std::vector<torch::Tensor> weights_;  // in the order of LLTMImpl::all_weights
};

/// A recurrent layer over sequences. Parameters of layer k, with the suffix
/// `_reverse` for the second direction:
///
///     weights_l{k}  (3H, H+I); for k > 0, I is D * H
///     bias_l{k}     (3H), with bias
class LLTM_API LLTMImpl : public torch::nn::Cloneable<LLTMImpl> {
 public:
  LLTMImpl(int64_t input_size, int64_t hidden_size)
      : LLTMImpl(LLTMOptions(input_size, hidden_size)) {}
  /// Throws if a size is not positive, checkpoint_steps negative or dropout not in [0, 1]. Warns if
  /// dropout has no effect because there is only one layer.
  explicit LLTMImpl(const LLTMOptions& options);

  void reset() override;
  /// Draws every parameter from the uniform distribution on ±1/sqrt(H).
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (T, B, I), (B, T, I) with batch_first, or (T, I) for one
  ///              sequence without a batch
  /// @param state (h_0, c_0), each (L*D, B, H), or (L*D, H) unbatched; zeros if
  ///              absent
  /// @returns (output, (h_n, c_n)): output like the input, with D*H features;
  ///          the states after each row's last step, shaped as h_0 and c_0.
  ///          T = 0 gives an empty output and the initial states.
  std::tuple<torch::Tensor, State> forward(
      const torch::Tensor& input, const std::optional<State>& state = std::nullopt);

  /// The same for rows of different lengths.
  ///
  /// @param input rows (N, I), sorted by length or not
  /// @param state (h_0, c_0), each (L*D, B, H), in the order of the batch
  ///              before it was sorted; zeros if absent
  /// @returns (output, (h_n, c_n)): output packed as the input, with D*H
  ///          features; the states in the order of the initial ones
  std::tuple<torch::nn::utils::rnn::PackedSequence, State> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<State>& state = std::nullopt);

  /// A copy of this layer for inference, its weights packed once; with torch::kQInt8
  /// quantised to 8 bits (lltm::prepack).
  PrepackedLLTM prepack(std::optional<torch::Dtype> weights = std::nullopt) const;

  /// The parameters by layer, then direction: weights_l0, bias_l0, ...
  std::vector<torch::Tensor> all_weights() const;

  /// Does nothing; code written for torch::nn::LSTM calls it.
  void flatten_parameters() {}

  LLTMOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<State>())})

 private:
  std::vector<torch::Tensor> all_weights_;
};

TORCH_MODULE(LLTM);

}  // namespace lltm
