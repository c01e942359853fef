// The LLTM operators: an LSTM without a forget gate, with an ELU candidate.
//
//     X    = [h, x]                      (B, H+I)
//     z    = X W^T + b                   (B, 3H)   rows of W: input, output, candidate
//     i, o = sigmoid(z_i), sigmoid(z_o)
//     g    = elu(z_g)
//     c'   = c + i * g
//     h'   = o * tanh(c')
//
// Letters used in this library:
//     T  steps of a sequence         I  input size
//     B  batch size                  H  hidden size
//     N  rows of a packed sequence, the sum of its batch_sizes
//
// Every function goes through PyTorch's dispatcher (namespace `lltm`), so it
// takes part in autograd, autocast and compiled graphs, and makes the same
// checks as torch.ops.lltm.* in Python.
//
// Arguments of one call have one device and one dtype: float64, float32,
// bfloat16 or float16. They may be strided in any way. Results are new
// contiguous tensors. Wrong shapes and values throw c10::ValueError, wrong
// dtypes c10::TypeError, wrong devices and layouts c10::Error; the message names
// the argument, the expected value and the actual one.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace lltm {

/// One step.
///
/// @param input    (B, I)
/// @param h        (B, H) hidden state
/// @param c        (B, H) cell state
/// @param weights  (3H, H+I): the rows are the gates, the first H columns
///                 multiply h, the others input
/// @param bias     (3H), or nothing
/// @returns (h', c'), each (B, H). B = 0 gives empty results.
LLTM_API std::tuple<at::Tensor, at::Tensor> cell(
    const at::Tensor& input,
    const at::Tensor& h,
    const at::Tensor& c,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias = std::nullopt);

/// A whole sequence: one layer, one direction.
///
/// @param input        (T, B, I), or packed (N, I) when batch_sizes is given
/// @param h_0          (B, H) initial hidden state
/// @param c_0          (B, H) initial cell state
/// @param weights      (3H, H+I), as for cell; or what prepack returned for such
///                     weights: then there are no derivatives and no recurrent_mask,
///                     and autocast does nothing
/// @param bias         (3H), or nothing
/// @param batch_sizes  int64 on the CPU, (T): the number of rows that reach
///                     each step, none larger than the one before, the first
///                     equal to B, the sum equal to N, as in a PackedSequence
/// @param reverse      run from each row's own last step to its first
/// @param checkpoint_steps  0, or n for training on long sequences: instead of the
///                     activations of every step, 4H values a row, it keeps c at
///                     every n-th step and computes the activations again in
///                     backward, those of n steps at a time. Results are the
///                     same, gradients up to rounding too. With about sqrt(T)
///                     memory is least. Without gradients it does nothing.
/// @param reset        bool, (T, B), or packed (N) when batch_sizes is given: where
///                     it is true, h and c of that row are zero before the step, in
///                     the order of execution, and no gradient goes further back
/// @param recurrent_mask  (B, H): what h is multiplied by where the product with the
///                     weights reads it, in every step the same; output and h_n are
///                     h without it. For dropout: 0 or 1 / (1 - p)
/// @returns (output, h_n, c_n): output (T, B, H) or (N, H) holds h' of every
///          step; h_n and c_n (B, H) the states after each row's last step
///          taken. T = 0 gives an empty output and the initial states, whose
///          gradients of weights and bias are zero.
LLTM_API std::tuple<at::Tensor, at::Tensor, at::Tensor> sequence(
    const at::Tensor& input,
    const at::Tensor& h_0,
    const at::Tensor& c_0,
    const at::Tensor& weights,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const std::optional<at::Tensor>& batch_sizes = std::nullopt,
    bool reverse = false,
    int64_t checkpoint_steps = 0,
    const std::optional<at::Tensor>& reset = std::nullopt,
    const std::optional<at::Tensor>& recurrent_mask = std::nullopt);

/// Packs weights once for the kernels of this machine, for repeated inference
/// with the same weights. `sequence` packs them in every call.
///
/// @param weights  (3H, H+I), as for sequence; finite, and H and I at most 65536,
///                 where they are quantised
/// @param dtype    at::kQInt8 quantises the weights to 8 bits, each row by a scale
///                 of its own; then sequence quantises input and h as it runs. A
///                 quarter of the size of float32 and faster, at the price of small
///                 errors. On the CPU, not for float64. None: the weights as they
///                 are.
/// @returns a packed copy of the weights, for sequence only (of another dtype and
///          shape). It works on other machines too, but may be slower there.
LLTM_API at::Tensor prepack(
    const at::Tensor& weights, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace lltm
