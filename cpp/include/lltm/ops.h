// The operators as functions, for every cell: one step, a sequence, and prepacked weights.
//
//     auto states = lltm::step("lstm", input, {h, c}, weight_ih, weight_hh, bias_ih, bias_hh);
//     auto [output, final] = lltm::sequence("gru", input, {h_0}, weight_ih, weight_hh);
//
// `cell` is "lltm", "lstm", "gru", "rnn_tanh", "rnn_relu", or a serialized custom cell
// (lltm::Cell::text).
//
// Symbols: T steps, B batch size, I input size, H hidden size, N rows of a packed sequence (the sum
// of its batch_sizes), G gates (4 for the LSTM, 3 for the GRU and the LLTM, 1 for the RNN). A
// custom cell can have different G for weight_ih and weight_hh (lltm/nn.h). The equations are in
// docs/notation.md.
//
// Every function calls an operator of PyTorch's dispatcher (namespace `lltm`), so it supports
// autograd, autocast and compiled graphs, and makes the same checks as torch.ops.lltm in Python.
//
// All tensors of a call have one device and one dtype (float64, float32, bfloat16 or float16), and
// any strides. Results are new tensors. Wrong shapes and values throw c10::ValueError, wrong dtypes
// c10::TypeError, wrong devices and layouts c10::Error. The message names the argument, the
// expected value and the actual one.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace lltm {

/// One step.
///
/// @param cell       name of a built-in cell, or a serialized custom cell
/// @param input      (B, I)
/// @param states     the cell's states, (B, H) each, h first: h and c for the LSTM and the LLTM, h
///                   for the GRU and the RNN
/// @param weight_ih  (G H, I) input weights. Without weight_hh: the concatenated matrix
///                   [weight_hh, weight_ih] of shape (G H, H+I), as the LLTM stores it.
/// @param weight_hh  (G H, H) recurrent weights
/// @param bias_ih    (G H); a custom cell's parameters, (H) each, are appended: scalars are
///                   expanded, and gates without biases have zeros. Default: no bias.
/// @param bias_hh    (G H). Default: no bias.
/// @returns the states after the step, (B, H) each. B = 0 returns empty tensors.
LLTM_API std::vector<at::Tensor> step(
    std::string_view cell,
    const at::Tensor& input,
    at::TensorList states,
    const at::Tensor& weight_ih,
    const std::optional<at::Tensor>& weight_hh = std::nullopt,
    const std::optional<at::Tensor>& bias_ih = std::nullopt,
    const std::optional<at::Tensor>& bias_hh = std::nullopt);

/// A sequence: one layer, one direction.
///
/// @param cell         name of a built-in cell, or a serialized custom cell
/// @param input        (T, B, I), or packed (N, I) with batch_sizes
/// @param states       the initial states, (B, H) each, h first
/// @param weight_ih    as for step; or prepacked weights, with an undefined weight_hh. Prepacked
///                     weights have no derivatives and support no recurrent_mask; autocast does not
///                     apply to them.
/// @param weight_hh    as for step
/// @param bias_ih      as for step
/// @param bias_hh      as for step
/// @param batch_sizes  (T), int64 on the CPU: the batch size of each step, as in a PackedSequence.
///                     Never increases, begins with B, and sums to N.
/// @param reverse      runs from the last step of each sequence to its first. Default: false
/// @param reset        (T, B), or (N) with batch_sizes, bool. If true, the states of that batch
///                     element are reset to their initial values before the step, in the order of
///                     execution, and no gradient flows further back.
/// @param checkpoint_steps  n > 0 saves the states before every n-th step instead of all
///                     activations, and backward recomputes n steps at a time. Results are
///                     identical, gradients equal up to rounding. Memory is least for n near
///                     sqrt(T). Without gradients it has no effect. Default: 0
/// @param recurrent_mask  (B, H), multiplies h in the recurrent GEMM of every step; output and the
///                     final h are not masked. For dropout with probability p: 0 or 1 / (1 - p).
/// @returns (output, states): output (T, B, H) or (N, H) has h' of every step (if a custom cell has
/// n
///          outputs in addition to h: (T, B, (1 + n) H), h', then these); the states are those
///          after the last step of each sequence, (B, H) each. T = 0 returns an empty output and
///          the initial states, whose gradients of weights and biases are zero.
LLTM_API std::tuple<at::Tensor, std::vector<at::Tensor>> sequence(
    std::string_view cell,
    const at::Tensor& input,
    at::TensorList states,
    const at::Tensor& weight_ih,
    const std::optional<at::Tensor>& weight_hh = std::nullopt,
    const std::optional<at::Tensor>& bias_ih = std::nullopt,
    const std::optional<at::Tensor>& bias_hh = std::nullopt,
    const std::optional<at::Tensor>& batch_sizes = std::nullopt,
    bool reverse = false,
    const std::optional<at::Tensor>& reset = std::nullopt,
    int64_t checkpoint_steps = 0,
    const std::optional<at::Tensor>& recurrent_mask = std::nullopt);

/// Packs weights for repeated inference; `sequence` otherwise packs them in every call.
///
/// @param cell       name of a built-in cell, or a serialized custom cell
/// @param weight_ih  as for step. To be quantized: finite, I and H at most 65536
/// @param weight_hh  as for step
/// @param dtype      at::kQInt8 quantizes the weights to 8 bits, with one scale per row; sequence
///                   then quantizes input and h, and sums, states and pre-activations stay float32.
///                   A quarter of the memory of float32 and faster, with small errors. CPU only,
///                   not for float64, and only for cells with |h| <= 1 (not rnn_relu; a custom cell
///                   must be bounded). Default: the weights keep their dtype.
/// @returns a packed copy of the weights, for weight_ih of sequence only. Its dtype and shape are
///          unspecified. It works on other systems too, but may be slower there.
LLTM_API at::Tensor prepack(
    std::string_view cell,
    const at::Tensor& weight_ih,
    const std::optional<at::Tensor>& weight_hh = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace lltm
