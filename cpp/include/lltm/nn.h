// torch::nn modules around the operators: LLTM, LSTM, GRU and RNN, and their cells of one step; and
// of cells that users have written (lltm/cell.h), CustomLayer and CustomCell. Options, shapes,
// defaults and meanings are those of torch::nn::LSTM and torch::nn::LSTMCell.
// Parameters have the names and shapes of the Python modules, and those of LSTM, GRU and RNN also
// the ones of torch.nn: a checkpoint of one loads into the other (lltm/serialize.h).
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
// The state of LLTM and LSTM is (h, c), that of GRU and RNN is h alone, that of a user's cell a
// std::vector of h and the states that the cell names.
//
// Letters: T steps, B batch size, I input size, H hidden size, L layers,
// D directions (1 or 2), N rows of a packed sequence, P features of a projected h, G gates: 3, of
// the LSTM 4, of the RNN 1; of a user's cell, G_x that read x and G_h that read h.
//
// Wrong shapes and values throw c10::ValueError, wrong dtypes c10::TypeError;
// the message names the argument, the expected value and the actual one.
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

/// (h, c): hidden state and cell state.
using State = std::tuple<torch::Tensor, torch::Tensor>;

// The state that a module takes and returns, by how many tensors it has.
struct LLTM_API OneState {
  using Type = torch::Tensor;
};
struct LLTM_API TwoStates {
  using Type = State;
};
struct LLTM_API AnyStates {
  using Type = std::vector<torch::Tensor>;
};

/// Of an RNN: torch::kTanh or torch::kReLU.
using Nonlinearity = torch::nn::RNNOptions::nonlinearity_t;

// ---- one step -------------------------------------------------------------------

struct LLTM_API CellOptions {
  CellOptions(int64_t input_size, int64_t hidden_size);
  /// Of a CustomCell.
  CellOptions(Cell cell, int64_t input_size, int64_t hidden_size);
  TORCH_ARG(int64_t, input_size);
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(bool, bias) = true;
  /// Of an RNNCell; the other modules have none.
  TORCH_ARG(std::optional<Nonlinearity>, nonlinearity);
  /// What a CustomCell computes; the other modules have none.
  TORCH_ARG(std::optional<Cell>, cell);
};
using LLTMCellOptions = CellOptions;
using LSTMCellOptions = CellOptions;
using GRUCellOptions = CellOptions;
using RNNCellOptions = CellOptions;
using CustomCellOptions = CellOptions;

/// The parameters of LLTMCell.
struct LLTM_API JoinedParameters {
  torch::Tensor weights;  ///< (3H, H+I): the first H columns multiply h, the others the input
  torch::Tensor bias;     ///< (3H), or undefined without bias
};

/// The parameters of LSTMCell, GRUCell and RNNCell, as in %torch.nn.
struct LLTM_API GateParameters {
  torch::Tensor weight_ih;  ///< (GH, I)
  torch::Tensor weight_hh;  ///< (GH, H)
  torch::Tensor bias_ih;    ///< (GH), or undefined without bias
  torch::Tensor bias_hh;    ///< (GH), or undefined without bias
};

/// The parameters of CustomCell; weight_ih is (G_x H, I), weight_hh (G_h H, H).
struct LLTM_API CustomParameters : GateParameters {
  std::vector<torch::Tensor> own;  ///< (H) each, in the order of Cell::parameters
};

/// What LLTMCell, LSTMCell, GRUCell, RNNCell and CustomCell have in common: one step. StateT is
/// State, of GRU and RNN torch::Tensor, of a user's cell std::vector<torch::Tensor>.
template <typename Module, typename Parameters, typename States = TwoStates>
class LLTM_API RecurrentCell : public torch::nn::Cloneable<Module>, public Parameters {
 public:
  using StateT = typename States::Type;

  RecurrentCell(int64_t input_size, int64_t hidden_size)
      : RecurrentCell(CellOptions(input_size, hidden_size)) {}
  /// Throws if a size is not positive, or if a CustomCell has no cell or another module has one.
  explicit RecurrentCell(const CellOptions& options);

  void reset() override;
  /// Draws every parameter from the uniform distribution on ±1/sqrt(H); a user's cell's own
  /// parameters get their initial values.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (B, I), or (I) for one row without a batch
  /// @param state (h, c), of GRU and RNN h, of a user's cell h and its states, each (B, H) or (H);
  ///              zeros, and the states' initial values, if absent
  /// @returns (h', c'), of GRU and RNN h', of a user's cell h' and states', shaped as the state
  StateT forward(const torch::Tensor& input, const std::optional<StateT>& state = std::nullopt);

  CellOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<StateT>())})
};

/// One step of the LLTM; see lltm::cell for the formulas.
class LLTM_API LLTMCellImpl : public RecurrentCell<LLTMCellImpl, JoinedParameters> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const LLTMCellOptions&) { return "lltm"; }
};
TORCH_MODULE(LLTMCell);

/// One step of the LSTM, as torch::nn::LSTMCell.
class LLTM_API LSTMCellImpl : public RecurrentCell<LSTMCellImpl, GateParameters> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const LSTMCellOptions&) { return "lstm"; }
};
TORCH_MODULE(LSTMCell);

/// One step of the GRU, as torch::nn::GRUCell.
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

/// One step of an RNN, as torch::nn::RNNCell.
class LLTM_API RNNCellImpl : public RecurrentCell<RNNCellImpl, GateParameters, OneState> {
 public:
  using RecurrentCell::RecurrentCell;
  static const char* cell_name(const RNNCellOptions& options) { return name_of_rnn(options); }
};
TORCH_MODULE(RNNCell);

/// One step of a cell that a user has written.
class LLTM_API CustomCellImpl
    : public RecurrentCell<CustomCellImpl, CustomParameters, AnyStates> {
 public:
  CustomCellImpl(const Cell& cell, int64_t input_size, int64_t hidden_size)
      : CustomCellImpl(CustomCellOptions(cell, input_size, hidden_size)) {}
  explicit CustomCellImpl(const CustomCellOptions& options) : RecurrentCell(options) {}
};
TORCH_MODULE(CustomCell);

// ---- layers ---------------------------------------------------------------------

struct LLTM_API LayerOptions {
  LayerOptions(int64_t input_size, int64_t hidden_size);
  /// Of a CustomLayer.
  LayerOptions(Cell cell, int64_t input_size, int64_t hidden_size);
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
  /// Probability of zeroing an element of h where the next step's product with
  /// weight_hh reads it, when training: one mask (B, H) for all steps of a call, drawn
  /// for each layer and direction (Gal and Ghahramani, 2016).
  TORCH_ARG(double, recurrent_dropout) = 0.0;
  /// A second direction runs from the last step to the first; its output is
  /// concatenated to the first one's.
  TORCH_ARG(bool, bidirectional) = false;
  /// Of an LSTM, 0 or P < H: h is projected to P features, as torch::nn::LSTM does it.
  /// The output and h are then P wide, c is H wide; takes no recurrent_dropout.
  TORCH_ARG(int64_t, proj_size) = 0;
  /// For training on long sequences, in steps: at least 1, or 0 for not at all. Each
  /// layer and direction then runs as sequence does with it, with less memory.
  TORCH_ARG(int64_t, checkpoint_steps) = 0;
  /// Of an RNN; the other modules have none.
  TORCH_ARG(std::optional<Nonlinearity>, nonlinearity);
  /// What a CustomLayer computes; the other modules have none.
  TORCH_ARG(std::optional<Cell>, cell);
};
using LLTMOptions = LayerOptions;
using LSTMOptions = LayerOptions;
using GRUOptions = LayerOptions;
using RNNOptions = LayerOptions;
using CustomLayerOptions = LayerOptions;

template <typename Module, typename States = TwoStates>
class RecurrentLayer;

/// A layer for inference whose weights were packed once (RecurrentLayer::prepack).
///
/// Computes what the layer computes in evaluation mode, without packing the
/// weights in every call. For short sequences and small batches, such as a
/// stream in chunks, packing can take most of the time. It cannot be changed,
/// does not follow changes of the layer, and several threads may use it
/// concurrently. It has no derivatives, and autocast does not affect it.
template <typename Module>
class LLTM_API PrepackedLayer {
 public:
  using StateT = typename Module::StateT;

  /// As RecurrentLayer::forward.
  std::tuple<torch::Tensor, StateT> forward(
      const torch::Tensor& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt) const;
  /// As RecurrentLayer::forward_with_packed_input.
  std::tuple<torch::nn::utils::rnn::PackedSequence, StateT> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt) const;

  const LayerOptions& options() const { return options_; }

 private:
  template <typename, typename>
  friend class RecurrentLayer;
  PrepackedLayer(const LayerOptions& options, std::vector<torch::Tensor> parameters);

  LayerOptions options_;
  // By layer, then direction: packed weights, and the biases of all_weights; with proj_size
  // weight_hr.
  std::vector<torch::Tensor> parameters_;
};

/// What LLTM, LSTM, GRU, RNN and CustomLayer have in common: a recurrent layer over sequences. StateT
/// is State, of GRU and RNN torch::Tensor, of a user's cell std::vector<torch::Tensor>. Parameters
/// of layer k, with the suffix `_reverse` for the second direction; for k > 0, I is D * H:
///
///     LLTM       weights_l{k} (3H, H+I) and, with bias, bias_l{k} (3H)
///     LSTM, GRU, RNN
///                weight_ih_l{k} (GH, I), weight_hh_l{k} (GH, H) and, with bias,
///                bias_ih_l{k}, bias_hh_l{k} (GH); with proj_size, weight_hh_l{k} is (4H, P), I of
///                k > 0 is D * P, and weight_hr_l{k} (P, H) comes last
///     CustomLayer  weight_ih_l{k} (G_x H, I), weight_hh_l{k} (G_h H, H), with bias
///                bias_ih_l{k} (G_x H), bias_hh_l{k} (G_h H), and the cell's own by their names,
///                such as p_l{k} (H)
template <typename Module, typename States>
class LLTM_API RecurrentLayer : public torch::nn::Cloneable<Module> {
 public:
  using StateT = typename States::Type;

  RecurrentLayer(int64_t input_size, int64_t hidden_size)
      : RecurrentLayer(LayerOptions(input_size, hidden_size)) {}
  /// Throws if a size is not positive, checkpoint_steps negative or dropout not in [0, 1], if a
  /// CustomLayer has no cell or another module has one, or if proj_size is not of an LSTM, not below
  /// hidden_size, or beside recurrent_dropout. Warns if dropout has no effect because there
  /// is only one layer.
  explicit RecurrentLayer(const LayerOptions& options);

  void reset() override;
  /// Draws every parameter from the uniform distribution on ±1/sqrt(H); a user's cell's own
  /// parameters get their initial values.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// @param input (T, B, I), (B, T, I) with batch_first, or (T, I) for one
  ///              sequence without a batch
  /// @param state (h_0, c_0), of GRU and RNN h_0, of a user's cell h_0 and its states, each
  ///              (L*D, B, H), or (L*D, H) unbatched; zeros, and the states' initial
  ///              values, if absent
  /// @param reset bool, (T, B), laid out as the input: where it is true, the state
  ///              of that row starts anew before the step, in every layer and
  ///              direction, and no gradient goes further back
  /// @returns (output, (h_n, c_n)), of GRU and RNN (output, h_n): output like the
  ///          input, with D*H features (D*P with proj_size); the states after each
  ///          row's last step, shaped as the initial ones. T = 0 gives an empty output and the
  ///          initial states.
  std::tuple<torch::Tensor, StateT> forward(
      const torch::Tensor& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt);

  /// The same for rows of different lengths.
  ///
  /// @param input rows (N, I), sorted by length or not
  /// @param state as for forward, in the order of the batch before it was sorted
  /// @param reset as for forward, bool, (N), in the order of the input's rows
  /// @returns as forward: output packed as the input, the states in the order
  ///          of the initial ones
  std::tuple<torch::nn::utils::rnn::PackedSequence, StateT> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& input,
      const std::optional<StateT>& state = std::nullopt,
      const std::optional<torch::Tensor>& reset = std::nullopt);

  /// A copy of this layer for inference, its weights packed once; with torch::kQInt8
  /// quantised to 8 bits (lltm::prepack), which a user's cell has to be bounded for.
  PrepackedLayer<Module> prepack(std::optional<torch::Dtype> weights = std::nullopt) const;

  /// The parameters by layer, then direction: weights_l0, bias_l0, ... or
  /// weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, and the cell's own, ...
  std::vector<torch::Tensor> all_weights() const;

  /// Does nothing; code written for torch::nn::LSTM calls it.
  void flatten_parameters() {}

  LayerOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::optional<StateT>())},
      {2, torch::nn::AnyValue(std::optional<torch::Tensor>())})

 private:
  std::vector<torch::Tensor> all_weights_;
};

/// Layers of the LLTM.
class LLTM_API LLTMImpl : public RecurrentLayer<LLTMImpl> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const LLTMOptions&) { return "lltm"; }
};
TORCH_MODULE(LLTM);
using PrepackedLLTM = PrepackedLayer<LLTMImpl>;

/// Layers of the LSTM, as torch::nn::LSTM.
class LLTM_API LSTMImpl : public RecurrentLayer<LSTMImpl> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const LSTMOptions&) { return "lstm"; }
};
TORCH_MODULE(LSTM);
using PrepackedLSTM = PrepackedLayer<LSTMImpl>;

/// Layers of the GRU, as torch::nn::GRU.
class LLTM_API GRUImpl : public RecurrentLayer<GRUImpl, OneState> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const GRUOptions&) { return "gru"; }
};
TORCH_MODULE(GRU);
using PrepackedGRU = PrepackedLayer<GRUImpl>;

/// Layers of an RNN, as torch::nn::RNN.
class LLTM_API RNNImpl : public RecurrentLayer<RNNImpl, OneState> {
 public:
  using RecurrentLayer::RecurrentLayer;
  static const char* cell_name(const RNNOptions& options) { return name_of_rnn(options); }
};
TORCH_MODULE(RNN);
using PrepackedRNN = PrepackedLayer<RNNImpl>;

/// Layers of a cell that a user has written.
class LLTM_API CustomLayerImpl : public RecurrentLayer<CustomLayerImpl, AnyStates> {
 public:
  CustomLayerImpl(const Cell& cell, int64_t input_size, int64_t hidden_size)
      : CustomLayerImpl(CustomLayerOptions(cell, input_size, hidden_size)) {}
  explicit CustomLayerImpl(const CustomLayerOptions& options) : RecurrentLayer(options) {}
};
TORCH_MODULE(CustomLayer);
using PrepackedCustomLayer = PrepackedLayer<CustomLayerImpl>;

// Calls instantiate(module, step module, its parameters, states) for each of the above.
// clang-format off
#define LLTM_FOR_EACH_MODULE(instantiate)                        \
  instantiate(LLTMImpl, LLTMCellImpl, JoinedParameters, TwoStates) \
  instantiate(LSTMImpl, LSTMCellImpl, GateParameters, TwoStates)   \
  instantiate(GRUImpl, GRUCellImpl, GateParameters, OneState)      \
  instantiate(RNNImpl, RNNCellImpl, GateParameters, OneState)      \
  instantiate(CustomLayerImpl, CustomCellImpl, CustomParameters, AnyStates)
// clang-format on

// All of it is compiled in liblltm.
#define LLTM_DECLARE_MODULE(Module, Step, Parameters, States)    \
  extern template class RecurrentCell<Step, Parameters, States>; \
  extern template class RecurrentLayer<Module, States>;          \
  extern template class PrepackedLayer<Module>;
LLTM_FOR_EACH_MODULE(LLTM_DECLARE_MODULE)
#undef LLTM_DECLARE_MODULE

}  // namespace lltm
