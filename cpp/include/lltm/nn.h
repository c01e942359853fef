// torch::nn modules: the layers LLTM, LSTM, GRU and RNN, their single-step modules (LLTMCell, ...),
// and CustomLayer and CustomCell for custom cells (lltm/cell.h). Options, shapes and defaults are
// the same as in torch::nn::LSTM and torch::nn::LSTMCell. Parameters have the names and shapes of
// the Python modules, which for LSTM, GRU and RNN are also the names and shapes of torch.nn.
// Checkpoint files are therefore interchangeable (lltm/serialize.h).
//
//     lltm::LLTM layer(lltm::LLTMOptions(64, 128).num_layers(2));
//     auto [output, state] = layer->forward(input);
//     auto [next_output, next_state] = layer->forward(next_input, state);
//
//     lltm::GRU gru(lltm::GRUOptions(64, 128).bidirectional(true));
//     auto [gru_output, h_n] = gru->forward(input, h_0);
//
//     lltm::CustomLayer own(lltm::CustomLayerOptions(lltm::Cell::load("cifg.cell"), 64, 128));
//     auto [custom_output, states] = own->forward(input);
//
// The state is (h, c) for LLTM and LSTM, h for GRU and RNN, and a std::vector with h and the cell's
// other states for a custom cell.
//
// Symbols: T steps, B batch size, I input size, H hidden size, L layers, D directions (1 or 2), N
// packed rows (the sum of batch_sizes), P features of a projected h. G is the number of gates: 3
// for LLTM and GRU, 4 for LSTM, 1 for RNN. A custom cell has G_x gates that depend on x and G_h
// gates that depend on h.
//
// Wrong shapes and values throw c10::ValueError, wrong dtypes c10::TypeError. The message names the
// argument, the expected value and the actual value.
#pragma once

#include <lltm/cell.h>
#include <lltm/export.h>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/options/rnn.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/rnn.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <tuple>
#include <variant>
#include <vector>

namespace lltm {

/// State of LLTM and LSTM, (h, c): hidden state and cell state.
using State = std::tuple<torch::Tensor, torch::Tensor>;

/// State type of modules whose only state is h: a tensor.
struct LLTM_API OneState {
  using Type = torch::Tensor;
};
/// State type of modules with h and c: a State.
struct LLTM_API TwoStates {
  using Type = State;
};
/// State type of modules of custom cells: a vector of h and the cell's states.
struct LLTM_API AnyStates {
  using Type = std::vector<torch::Tensor>;
};

/// Nonlinearity of an RNN: torch::kTanh or torch::kReLU.
using Nonlinearity = torch::nn::RNNOptions::nonlinearity_t;

// ---- one step -------------------------------------------------------------------

/// Options of the single-step modules.
struct LLTM_API CellOptions {
  CellOptions(int64_t input_size, int64_t hidden_size);
  /// Options of a CustomCell.
  CellOptions(Cell cell, int64_t input_size, int64_t hidden_size);
  /// Number of input features, I. Must be positive.
  TORCH_ARG(int64_t, input_size);
  /// Number of hidden units, H. Must be positive.
  TORCH_ARG(int64_t, hidden_size);
  /// If false, the module has no biases. Default: true
  TORCH_ARG(bool, bias) = true;
  /// CustomCell only: number of heads, as in LayerOptions. Default: 1
  TORCH_ARG(int64_t, heads) = 1;
  /// RNNCell only: torch::kTanh or torch::kReLU. Default: torch::kTanh
  TORCH_ARG(std::optional<Nonlinearity>, nonlinearity);
  /// The custom cell. Required by CustomCell; must not be set for other modules.
  TORCH_ARG(std::optional<Cell>, cell);
};
using LLTMCellOptions = CellOptions;
using LSTMCellOptions = CellOptions;
using GRUCellOptions = CellOptions;
using RNNCellOptions = CellOptions;
using CustomCellOptions = CellOptions;

/// Parameters of LLTMCell.
struct LLTM_API JoinedParameters {
  torch::Tensor weights;  ///< (3H, H+I): H columns for h, then I columns for the input
  torch::Tensor bias;     ///< (3H), or undefined without bias
};

/// Parameters of LSTMCell, GRUCell and RNNCell, as in %torch.nn.
struct LLTM_API GateParameters {
  torch::Tensor weight_ih;  ///< (GH, I)
  torch::Tensor weight_hh;  ///< (GH, H)
  torch::Tensor bias_ih;    ///< (GH), or undefined without bias
  torch::Tensor bias_hh;    ///< (GH), or undefined without bias
};

/// Parameters of CustomCell. weight_ih is (G_x H, I), weight_hh (G_h H, H), bias_ih (G_x H) and
/// bias_hh (G_h H).
struct LLTM_API CustomParameters : GateParameters {
  std::vector<torch::Tensor> own;  ///< (H) each, in the order of Cell::parameters
};

/// Common interface of the single-step modules LLTMCell, LSTMCell, GRUCell, RNNCell and CustomCell.
/// StateT is State for LLTM and LSTM, torch::Tensor for GRU and RNN, and std::vector<torch::Tensor>
/// for a custom cell.
template <typename Module, typename Parameters, typename States = TwoStates>
class LLTM_API RecurrentCell : public torch::nn::Cloneable<Module>, public Parameters {
 public:
  using StateT = typename States::Type;

  /// Constructs a module with default options.
  RecurrentCell(int64_t input_size, int64_t hidden_size)
      : RecurrentCell(CellOptions(input_size, hidden_size)) {}
  /// Constructs a module and initializes its parameters. Throws c10::ValueError if a size is not
  /// positive, if an option belongs to another module, or if a CustomCell has no cell.
  explicit RecurrentCell(const CellOptions& options);

  void reset() override;
  /// Initializes every parameter from the uniform distribution on ±1/sqrt(H). Parameters that a
  /// custom cell declares get their initial values, or NaN if the serialized cell has none.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// Runs one time step.
  ///
  /// @param input (B, I), or (I) without a batch
  /// @param state initial state: (h, c) for LLTM and LSTM, h for GRU and RNN, (h, states...) for a
  ///     custom cell; each tensor is (B, H), or (H) without a batch. Default: h and c are zero,
  ///     custom states have their initial values.
  /// @returns the next state, with the form and shapes of `state`
  StateT forward(const torch::Tensor& input, const std::optional<StateT>& state = std::nullopt);

  CellOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<StateT>())})
};

/// One step of an LLTM, with the pre-activations z = weights [h, x] + bias of i, o, g:
///
///     i, o = sigmoid(z_i), sigmoid(z_o);  g = elu(z_g)
///     c' = c + i g;  h' = o tanh(c')
class LLTM_API LLTMCellImpl : public RecurrentCell<LLTMCellImpl, JoinedParameters> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const LLTMCellOptions&) { return "lltm"; }
};
TORCH_MODULE(LLTMCell);

/// One step of an LSTM, like torch::nn::LSTMCell.
class LLTM_API LSTMCellImpl : public RecurrentCell<LSTMCellImpl, GateParameters> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const LSTMCellOptions&) { return "lstm"; }
};
TORCH_MODULE(LSTMCell);

/// One step of a GRU, like torch::nn::GRUCell.
class LLTM_API GRUCellImpl : public RecurrentCell<GRUCellImpl, GateParameters, OneState> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const GRUCellOptions&) { return "gru"; }
};
TORCH_MODULE(GRUCell);

template <typename Options>
const char* name_of_rnn(const Options& options) {
  const Nonlinearity tanh = torch::kTanh;
  const bool relu = options.nonlinearity().value_or(tanh).index() != tanh.index();
  return relu ? "rnn_relu" : "rnn_tanh";
}

/// One step of an RNN, like torch::nn::RNNCell.
class LLTM_API RNNCellImpl : public RecurrentCell<RNNCellImpl, GateParameters, OneState> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const RNNCellOptions& options) { return name_of_rnn(options); }
};
TORCH_MODULE(RNNCell);

/// One step of a custom cell.
class LLTM_API CustomCellImpl : public RecurrentCell<CustomCellImpl, CustomParameters, AnyStates> {
 public:
  /// Constructs a module with default options.
  CustomCellImpl(const Cell& cell, int64_t input_size, int64_t hidden_size)
      : CustomCellImpl(CustomCellOptions(cell, input_size, hidden_size)) {}
  /// Throws c10::ValueError if the options have no cell or an invalid size.
  explicit CustomCellImpl(const CustomCellOptions& of_cell) : RecurrentCell(of_cell) {}
};
TORCH_MODULE(CustomCell);

// ---- layers ---------------------------------------------------------------------

/// Options of the layers.
struct LLTM_API LayerOptions {
  LayerOptions(int64_t input_size, int64_t hidden_size);
  /// Options of a CustomLayer.
  LayerOptions(Cell cell, int64_t input_size, int64_t hidden_size);
  /// Number of input features, I. Must be positive.
  TORCH_ARG(int64_t, input_size);
  /// Number of hidden units, H. Must be positive.
  TORCH_ARG(int64_t, hidden_size);
  /// Number of stacked layers. Each layer reads the output of the previous layer. Default: 1
  TORCH_ARG(int64_t, num_layers) = 1;
  /// If false, the module has no biases. Default: true
  TORCH_ARG(bool, bias) = true;
  /// If true, batched input and output are (B, T, ...) instead of (T, B, ...). Does not apply to
  /// states, unbatched input and packed input. Default: false
  TORCH_ARG(bool, batch_first) = false;
  /// Dropout probability for the outputs of all layers except the last, in training. Default: 0
  TORCH_ARG(double, dropout) = 0.0;
  /// Dropout probability for h where the recurrent GEMM (weight_hh) reads it, in training. Each
  /// call samples one mask (B, H) per layer and direction and uses it for all steps (Gal and
  /// Ghahramani, 2016). Not supported with proj_size. Default: 0
  TORCH_ARG(double, recurrent_dropout) = 0.0;
  /// If true, a second direction runs from the last step to the first, and its output is
  /// concatenated to the output of the first direction. Default: false
  TORCH_ARG(bool, bidirectional) = false;
  /// LSTM only. If P > 0, projects h to P < H features, like torch::nn::LSTM: output and h have P
  /// features, c has H. Cannot be combined with recurrent_dropout. Default: 0
  TORCH_ARG(int64_t, proj_size) = 0;
  /// Activation checkpointing for training on long sequences. If n > 0, each layer and direction
  /// saves the states before every n-th step instead of all activations. Backward recomputes n
  /// steps at a time. 0 disables it. Default: 0
  TORCH_ARG(int64_t, checkpoint_steps) = 0;
  /// CustomLayer only: a divisor of H. The recurrent weights of a head connect only its own H/heads
  /// units: weight_hh is (heads, G*H/heads, H/heads). Default: 1
  TORCH_ARG(int64_t, heads) = 1;
  /// RNN only: torch::kTanh or torch::kReLU. Default: torch::kTanh
  TORCH_ARG(std::optional<Nonlinearity>, nonlinearity);
  /// The custom cell. Required by CustomLayer; must not be set for other layers.
  TORCH_ARG(std::optional<Cell>, cell);
};
using LLTMOptions = LayerOptions;
using LSTMOptions = LayerOptions;
using GRUOptions = LayerOptions;
using RNNOptions = LayerOptions;
using CustomLayerOptions = LayerOptions;

template <typename Module, typename States = TwoStates>
class RecurrentLayer;

/// Inference-only layer with prepacked weights (RecurrentLayer::prepack).
///
/// It computes the same results as the layer in evaluation mode, but does not pack the weights in
/// every call. For short sequences and small batches, such as chunks of a stream, packing can take
/// most of the time. It is immutable and does not follow later changes of the layer. Several
/// threads may use it concurrently. It has no derivatives, and autocast does not affect it.
template <typename Module>
class LLTM_API PrepackedLayer {
 public:
  using StateT = typename Module::StateT;

  /// Runs the layer over sequences of equal length, like RecurrentLayer::forward.
  ///
  /// @param input (T, B, I), or (B, T, I) with batch_first, or (T, I) without a batch
  /// @param state initial state, each tensor (L*D, B, H), or (L*D, H) without a batch. Default:
  ///     zeros, or a custom state's initial value
  /// @param reset boolean mask with the batch shape of the input. Default: no resets
  /// @returns (output, state), like RecurrentLayer::forward
  std::tuple<torch::Tensor, StateT> forward(
      const torch::Tensor& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt) const;
  /// Runs the layer over sequences of different lengths, like
  /// RecurrentLayer::forward_with_packed_input.
  ///
  /// @param input packed sequences with data (N, I), sorted by length or not
  /// @param state initial state, each tensor (L*D, B, H), in the order of the batch before sorting.
  ///     Default: zeros, or a custom state's initial value
  /// @param reset boolean mask (N), in the order of the packed rows. Default: no resets
  /// @returns (output, state): output packed like the input, state in the order of the initial
  ///     state
  std::tuple<torch::nn::utils::rnn::PackedSequence, StateT> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt) const;

  /// Options of the layer that was prepacked.
  const LayerOptions& options() const { return options_; }

 private:
  template <typename, typename>
  friend class RecurrentLayer;
  PrepackedLayer(const LayerOptions& options, std::vector<torch::Tensor> parameters);

  LayerOptions options_;
  // By layer, then direction: the packed weights, the biases and custom parameters of all_weights
  // and, with proj_size, weight_hr.
  std::vector<torch::Tensor> parameters_;
};

/// Common interface of LLTM, LSTM, GRU, RNN and CustomLayer: recurrent layers over sequences.
/// StateT is State for LLTM and LSTM, torch::Tensor for GRU and RNN, and std::vector<torch::Tensor>
/// for a custom cell. Layer k has the following parameters, whose names end in `_reverse` for the
/// second direction. For k > 0, I is D * H.
///
///     LLTM       weights_l{k} (3H, H+I) and, with bias, bias_l{k} (3H)
///     LSTM, GRU, RNN
///                weight_ih_l{k} (GH, I), weight_hh_l{k} (GH, H) and, with bias,
///                bias_ih_l{k}, bias_hh_l{k} (GH); with proj_size, weight_hh_l{k} is (4H, P), I of
///                k > 0 is D * P, and weight_hr_l{k} (P, H) comes last
///     CustomLayer  weight_ih_l{k} (G_x H, I), weight_hh_l{k} (G_h H, H), with bias
///                bias_ih_l{k} (G_x H), bias_hh_l{k} (G_h H), and the cell's parameters by their
///                names, such as p_l{k} (H), or (1) for scalars. Gates without biases have no rows
///                in biases
template <typename Module, typename States>
class LLTM_API RecurrentLayer : public torch::nn::Cloneable<Module> {
 public:
  using StateT = typename States::Type;

  /// Constructs a layer with default options.
  RecurrentLayer(int64_t input_size, int64_t hidden_size)
      : RecurrentLayer(LayerOptions(input_size, hidden_size)) {}
  /// Constructs a layer and initializes its parameters.
  ///
  /// Throws c10::ValueError if a size is not positive, if checkpoint_steps is negative, or if a
  /// dropout probability is not in [0, 1]. Also throws if proj_size is not in [0, H) or is combined
  /// with recurrent_dropout, if an option belongs to another layer, or if a CustomLayer has no
  /// cell. Warns if dropout has no effect because num_layers is 1.
  explicit RecurrentLayer(const LayerOptions& options);

  void reset() override;
  /// Initializes every parameter from the uniform distribution on ±1/sqrt(H). Parameters that a
  /// custom cell declares get their initial values, or NaN if the serialized cell has none.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// Runs the layer over sequences of equal length.
  ///
  /// @param input (T, B, I), or (B, T, I) with batch_first, or (T, I) without a batch
  /// @param state initial state: (h_0, c_0) for LLTM and LSTM, h_0 for GRU and RNN, (h_0,
  ///     states...) for a custom cell; each tensor is (L*D, B, H), or (L*D, H) without a batch, and
  ///     h_0 has P features with proj_size. Default: h_0 and c_0 are zero, custom states have their
  ///     initial values.
  /// @param reset boolean mask with the batch shape of the input: (T, B), (B, T) with batch_first,
  ///     or (T). Where true, the state of that sequence is reset to its initial value (zero, or a
  ///     custom state's initial value) before the time step, in every layer and direction.
  ///     Gradients do not flow through a reset. Default: no resets.
  /// @returns (output, state). The output has the layout of the input, with D*H features (D*P with
  ///     proj_size). The state has the form and shapes of the initial state, after the last step of
  ///     each sequence. If T = 0, the output is empty and the state is the initial state. If a
  ///     custom cell returns several values of each step, the output is the first, and the others,
  ///     of its shape, follow the states (in the packed form: as data). The next call takes only
  ///     the states.
  std::tuple<torch::Tensor, StateT> forward(
      const torch::Tensor& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt);

  /// Runs the layer over sequences of different lengths.
  ///
  /// @param input packed sequences with data (N, I), sorted by length or not
  /// @param state initial state: (h_0, c_0) for LLTM and LSTM, h_0 for GRU and RNN, (h_0,
  ///     states...) for a custom cell; each tensor is (L*D, B, H), in the order of the batch before
  ///     sorting, and h_0 has P features with proj_size. Default: h_0 and c_0 are zero, custom
  ///     states have their initial values.
  /// @param reset boolean mask (N), in the order of the packed rows. Where true, the state of that
  ///     sequence is reset to its initial value before the time step, in every layer and direction.
  ///     Gradients do not flow through a reset. Default: no resets.
  /// @returns (output, state). The output is packed like the input, with D*H features (D*P with
  ///     proj_size). The state is in the order of the initial state, after the last step of each
  ///     sequence.
  std::tuple<torch::nn::utils::rnn::PackedSequence, StateT> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt);

  /// Returns an inference-only copy of this layer with prepacked weights.
  ///
  /// @param weights torch::kQInt8 quantizes the weights to 8 bits (lltm::prepack). It requires
  ///     |h| <= 1: it does not support an RNN with ReLU, and a custom cell must be bounded.
  ///     Default: the weights keep their dtype.
  /// @returns the prepacked layer
  PrepackedLayer<Module> prepack(std::optional<torch::Dtype> weights = std::nullopt) const;

  /// Writes the layers for realtime::Layer, as save_realtime. Throws c10::ValueError if the layer
  /// is bidirectional or has a projection, and its errors.
  void save_realtime(const std::string& path) const;

  /// Returns the parameters by layer, then direction: weights_l0, bias_l0, ... or weight_ih_l0,
  /// weight_hh_l0, bias_ih_l0, bias_hh_l0, and the cell's parameters, ...
  std::vector<torch::Tensor> all_weights() const;

  /// Does nothing. Exists for code that was written for torch::nn::LSTM.
  void flatten_parameters() {}

  LayerOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::optional<StateT>())},
      {2, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  std::vector<torch::Tensor> all_weights_;
};

/// Layers of an LLTM.
class LLTM_API LLTMImpl : public RecurrentLayer<LLTMImpl> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const LLTMOptions&) { return "lltm"; }
};
TORCH_MODULE(LLTM);
using PrepackedLLTM = PrepackedLayer<LLTMImpl>;

/// Layers of an LSTM, like torch::nn::LSTM.
class LLTM_API LSTMImpl : public RecurrentLayer<LSTMImpl> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const LSTMOptions&) { return "lstm"; }
};
TORCH_MODULE(LSTM);
using PrepackedLSTM = PrepackedLayer<LSTMImpl>;

/// Layers of a GRU, like torch::nn::GRU.
class LLTM_API GRUImpl : public RecurrentLayer<GRUImpl, OneState> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const GRUOptions&) { return "gru"; }
};
TORCH_MODULE(GRU);
using PrepackedGRU = PrepackedLayer<GRUImpl>;

/// Layers of an RNN, like torch::nn::RNN.
class LLTM_API RNNImpl : public RecurrentLayer<RNNImpl, OneState> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const RNNOptions& options) { return name_of_rnn(options); }
};
TORCH_MODULE(RNN);
using PrepackedRNN = PrepackedLayer<RNNImpl>;

/// Layers of a custom cell.
class LLTM_API CustomLayerImpl : public RecurrentLayer<CustomLayerImpl, AnyStates> {
 public:
  /// Constructs a layer with default options.
  CustomLayerImpl(const Cell& cell, int64_t input_size, int64_t hidden_size)
      : CustomLayerImpl(CustomLayerOptions(cell, input_size, hidden_size)) {}
  /// Throws c10::ValueError if the options have no cell or an invalid value.
  explicit CustomLayerImpl(const CustomLayerOptions& of_layer) : RecurrentLayer(of_layer) {}
};
TORCH_MODULE(CustomLayer);
using PrepackedCustomLayer = PrepackedLayer<CustomLayerImpl>;

// Calls instantiate(layer, single-step module, its parameters, states) for each module above.
// clang-format off
#define LLTM_FOR_EACH_MODULE(instantiate)                        \
  instantiate(LLTMImpl, LLTMCellImpl, JoinedParameters, TwoStates) \
  instantiate(LSTMImpl, LSTMCellImpl, GateParameters, TwoStates)   \
  instantiate(GRUImpl, GRUCellImpl, GateParameters, OneState)      \
  instantiate(RNNImpl, RNNCellImpl, GateParameters, OneState)      \
  instantiate(CustomLayerImpl, CustomCellImpl, CustomParameters, AnyStates)
// clang-format on

// The templates are instantiated in liblltm.
#define LLTM_DECLARE_MODULE(Module, Step, Parameters, States)    \
  extern template class RecurrentCell<Step, Parameters, States>; \
  extern template class RecurrentLayer<Module, States>;          \
  extern template class PrepackedLayer<Module>;
LLTM_FOR_EACH_MODULE(LLTM_DECLARE_MODULE)
#undef LLTM_DECLARE_MODULE

}  // namespace lltm
